"""The statistics of a tag from what its ranks counted at the save (``stats=True``): no tensor is read."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.runtime.paths import summaries_dir
from nxd_ckpt.runtime.save.counting import VERSION, Boxes
from nxd_ckpt.runtime.summary import Summary, TensorStatistics
from nxd_ckpt.runtime.tag.opened import OpenTag
from nxd_ckpt.runtime.views.whole_tag import WholeTag


def counted_at_save(opened: OpenTag) -> dict[str, TensorStatistics] | None:
    """By the tensors' names; None unless the ranks counted every element of this very save.

    Raises ValueError, TypeError, LookupError or AttributeError for files that are not what a save wrote.
    """
    boxes = {} if opened.manifest is None else _boxes(opened, opened.manifest.attempt)
    if not boxes:
        return None
    found = {}
    for name, told in WholeTag(opened).tensors.items():
        held = boxes.get(name, {})
        if told.shape is None or sum(box.numel for box in held) != prod(told.shape):
            return None
        if not all(Box.whole(told.shape).contains(box) for box in held):
            return None
        whole = Summary()
        for summary in held.values():
            whole.add_all(summary)
        found[name] = whole.statistics
    return found


def _boxes(opened: OpenTag, attempt: str) -> dict[str, Boxes]:
    """What all ranks counted; of boxes that several hold, the first."""
    found: dict[str, Boxes] = {}
    folder = summaries_dir(opened.tag)
    for entry in sorted(opened.storage.list(folder), key=lambda entry: entry.name):
        fields = json.loads(opened.storage.read(f"{folder}/{entry.name}"))
        if [fields["format_version"], fields["kind"], fields["attempt"]] != [VERSION, "summaries", attempt]:
            continue
        for name, counted in fields["tensors"].items():
            for box, summary in map(_counted, counted):
                found.setdefault(name, {}).setdefault(box, summary)
    return found


def _counted(entry: Any) -> tuple[Box, Summary]:
    offset, size, numbers = entry
    box = Box(tuple(map(int, offset)), tuple(map(int, size)))
    if numbers[0] not in (box.numel, 2 * box.numel):  # a complex element is two numbers
        raise ValueError(f"expected the numbers of {box.numel} elements, found {numbers!r:.80}")
    return box, Summary.from_json(numbers)
