"""File beside the tag with a rank's counts of its saved tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.entries import checked
from nxd_ckpt.core.keys import checked_name, checked_text
from nxd_ckpt.core.limits import check_sizes, shown
from nxd_ckpt.core.parsing import parsing
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.reshard.summary import Summary

_VERSION = 1

Boxes = dict[Box, Summary]
"""Counts of a tensor, by box of the whole one. A tensor without pieces counts as a whole one."""


@dataclass(frozen=True)
class Summaries:
    """Counts of all tensors, by name; ``attempt`` is the one that became the tag."""

    attempt: str
    tensors: Mapping[str, Boxes]


def dump_summaries(summaries: Summaries) -> bytes:
    tensors = {
        name: [[*map(list, (box.offset, box.size)), summary.to_json()] for box, summary in boxes.items()]
        for name, boxes in summaries.tensors.items()
    }
    fields = {"format_version": _VERSION, "kind": "summaries", "attempt": summaries.attempt, "tensors": tensors}
    return json.dumps(fields, separators=(",", ":")).encode()


def load_summaries(data: bytes, where: str) -> Summaries | None:
    """Parse such a file; None for another version, whose numbers have other meanings.

    Raises MalformedFile, naming ``where``, for anything but a valid one.
    """
    with parsing(where, "what a rank counted at a save"):
        fields = document.read(data.decode(), {"tensors": _boxes})
        if fields["kind"] != "summaries":
            raise ValueError(f"found the kind {shown(fields['kind'])}")
        if fields["format_version"] != _VERSION:
            return None
        tensors: dict[str, Boxes] = checked(dict, fields["tensors"])
        return Summaries(
            checked_name(fields["attempt"]), {checked_text(name): boxes for name, boxes in tensors.items()}
        )


def _boxes(entries: Any) -> Boxes:
    boxes: Boxes = {}
    for offset, size, numbers in checked(list, entries):
        box = Box(check_sizes(offset, "a box"), check_sizes(size, "a box"))
        if len(box.offset) != len(box.size) or box in boxes:
            raise MalformedFile(f"expected each box once, offset and size, found {shown(offset)}, {shown(size)}")
        boxes[box] = Summary.from_json(numbers)
    return boxes
