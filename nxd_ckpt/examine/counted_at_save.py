"""The statistics of a tag from what its ranks counted at the save (``stats=True``): no tensor is read."""

from __future__ import annotations

from nxd_ckpt.coordination.paths import summaries_dir, summaries_file
from nxd_ckpt.core.box import Box, are_all_of
from nxd_ckpt.core.manifest import Manifest
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.reshard.summary import Summary, TensorStatistics
from nxd_ckpt.reshard.whole_tag import GlobalTensor, WholeTag
from nxd_ckpt.save.summaries import Boxes, load_summaries
from nxd_ckpt.tag.opened import OpenTag


def counted_at_save(opened: OpenTag) -> dict[str, TensorStatistics] | None:
    """By the tensors' names; None unless the ranks counted every element of this very save.

    Raises MalformedFile for files that are not what a save wrote.
    """
    boxes = {} if opened.manifest is None else _boxes(opened, opened.manifest)
    if not boxes:
        return None
    found = {}
    for name, told in WholeTag(opened).tensors.items():
        held = boxes.get(name, {})
        if told.shape is None or sum(box.numel for box in held) < Box.whole(told.shape).numel:
            return None
        _check(f"{opened.storage.url}/{summaries_dir(opened.tag)}", told, told.shape, held)
        whole = Summary()
        for summary in held.values():
            whole.add_all(summary)
        found[name] = whole.statistics
    return found


def _boxes(opened: OpenTag, manifest: Manifest) -> dict[str, Boxes]:
    """What the tag's ranks counted; of boxes that several hold, the first."""
    found: dict[str, Boxes] = {}
    storage, folder = opened.storage, summaries_dir(opened.tag)
    listed = {f"{folder}/{entry.name}" for entry in storage.list(folder)}
    for key in (summaries_file(opened.tag, rank) for rank in range(len(manifest.ranks))):
        if key not in listed:
            continue
        counted = load_summaries(storage.read(key), f"{storage.url}/{key}")
        if counted is not None and counted.attempt == manifest.attempt:  # else of an earlier save of that name
            for name, boxes in counted.tensors.items():
                held = found.setdefault(name, {})
                for box, summary in boxes.items():
                    held.setdefault(box, summary)
    return found


def _check(where: str, told: GlobalTensor, shape: tuple[int, ...], held: Boxes) -> None:
    """Raise MalformedFile unless the boxes are the whole tensor, each element once, and have as many numbers."""
    same_dimensions = all(len(box.size) == len(shape) for box in held)
    if not same_dimensions or not are_all_of(Box.whole(shape), list(held)):
        raise MalformedFile(f"{where}: {told.name}: its boxes overlap, or leave the tensor of shape {list(shape)}")
    each = 2 if told.dtype.startswith("complex") else 1
    for box, summary in held.items():
        if summary.numel != each * box.numel:
            raise MalformedFile(
                f"{where}: {told.name}, {told.dtype}: expected {each * box.numel} numbers in box {box}, "
                f"found {summary.numel}"
            )
