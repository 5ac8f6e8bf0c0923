"""Counts of one save's tensors, taken from the staged bytes while these are written, and after that.

Each rank stores its counts beside the tag, box by box; readers combine the boxes of all ranks
(`nxd_ckpt.examine.statistics`). A thread of its own does all of it, including the stored files. No save waits for
it: a save that needs the memory stops the counting.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from nxd_ckpt.coordination.control_files import drop_entries_of_lost_tags
from nxd_ckpt.coordination.paths import SUMMARIES, summaries_dir, summaries_file
from nxd_ckpt.core import document
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.limits import check_sizes, checked, checked_name, checked_text, shown
from nxd_ckpt.core.parsing import parsing
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.errors import CheckpointError, MalformedFile
from nxd_ckpt.formats.assembly import box_of, cut_box
from nxd_ckpt.formats.tensors import itemsize, torch_dtype
from nxd_ckpt.reshard.summary import PART, Summary
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.save.waves import Span, Wave
from nxd_ckpt.storage.base import Storage

logger = logging.getLogger("nxd_ckpt")


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


class Counting:
    """Counting of this rank's share of the ``files``, on a ``thread`` that runs one task after the other."""

    def __init__(self, files: Sequence[PlannedFile], thread: Executor) -> None:
        self._files, self._thread = files, thread
        self._tasks: list[Future[bool]] = []
        self._views: list[list[memoryview]] = []
        self._stopped = self._is_incomplete = False
        self._boxes: dict[str, Boxes] = {}

    def add(self, wave: Wave, views: Sequence[memoryview]) -> None:
        """Count the tensors of a wave, each in its view."""
        self._is_incomplete = self._is_incomplete or self._stopped
        if not self._is_incomplete:
            self._views.append(list(views))
            self._tasks.append(self._thread.submit(self._count, wave, self._views[-1]))

    def stop(self) -> None:
        """Stop reading memory before this returns. If something is not counted by now, nothing is stored."""
        self._stopped = True
        wait([task for task in self._tasks if not task.cancel()])  # not for the thread: it may be waiting for a store
        for views in self._views:
            views.clear()

    def end_wave(self) -> None:
        """Prepare for the next wave in the same memory.

        If this one is not counted yet, stop, and store nothing of the save.

        Does not wait for the rest of the wave to be counted.
        """
        if not all(task.done() for task in self._tasks):
            self.stop()

    def keep(self, storage: Storage, tag: str, attempt: str, rank: int) -> None:
        """Store the counts beside the visible tag as soon as they are complete, without waiting."""

        def write() -> None:
            if not self._is_complete():
                return
            try:
                storage.write(summaries_file(tag, rank), dump_summaries(Summaries(attempt, self._boxes)))
                if rank == 0:
                    drop_entries_of_lost_tags(storage, SUMMARIES, summaries_dir)
            except (OSError, CheckpointError) as error:
                logger.debug("what was counted of %s/%s is not kept: %s", storage.url, tag, error)

        self._thread.submit(write)

    def _is_complete(self) -> bool:
        """Return whether everything is counted; called once nothing runs any more."""
        succeeded = all(task.done() and not task.cancelled() and task.exception() is None for task in self._tasks)
        return (
            bool(self._tasks) and succeeded and not self._is_incomplete and all(task.result() for task in self._tasks)
        )

    def _count(self, wave: Wave, views: list[memoryview]) -> bool:
        """Count a wave. Return whether it was finished."""
        try:
            for span, view in zip(wave, views, strict=True):
                for summary, values in self._values(self._files[span.file], span, view):
                    if self._stopped:
                        return False
                    summary.add_all(Summary.of(values))
            return True
        finally:
            views.clear()  # the arena may only grow once nobody holds a view of it

    def _values(self, planned: PlannedFile, span: Span, view: memoryview) -> Iterator[tuple[Summary, torch.Tensor]]:
        """Yield the elements in the span, with the summary that they belong to."""
        named: dict[int, list[NamedTensor]] = {}
        for tensor in planned.tensors:
            named.setdefault(tensor.storage, []).append(tensor)
        for number, first, last, at in span.tensors(planned.image):
            for tensor in named.get(number, ()):
                size = itemsize(tensor.dtype)
                values = torch.frombuffer(
                    view, dtype=torch_dtype(tensor.dtype), count=(last - first) // size, offset=at
                )
                yield from self._of_tensor(tensor, values, first // size)

    def _of_tensor(
        self, tensor: NamedTensor, values: torch.Tensor, start: int
    ) -> Iterator[tuple[Summary, torch.Tensor]]:
        """Yield ``values``, the elements from ``start`` on in the order of the file, with their summaries."""
        whole, boxes = Box.whole(tensor.shape), self._boxes.setdefault(tensor.name, {})
        for piece in tensor.pieces if tensor.pieces is not None else (Piece(whole, whole),):
            if piece.box in boxes and not start:
                continue  # another copy of it
            if piece.local == whole:
                summary = boxes.setdefault(piece.box, Summary())
                yield from ((summary, part) for part in torch.split(values, PART))
            elif values.numel() == whole.numel:  # else it came in parts: readers count it themselves
                summary, elements = boxes.setdefault(piece.box, Summary()), values.view(tensor.shape)
                yield from ((summary, box_of(elements, part).reshape(-1)) for part in cut_box(piece.local, PART))
