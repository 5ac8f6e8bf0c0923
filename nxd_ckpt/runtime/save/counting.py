"""The tensors of one save in numbers, counted from the staged bytes while these are written, and after that.

Each rank keeps what it counted beside the tag, box by box; whoever reads it puts the boxes of all ranks together
(:mod:`nxd_ckpt.runtime.compare.counted_at_save`). Nobody waits for it: who needs the memory stops it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, wait

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats.assembly import box_of, cut_box
from nxd_ckpt.formats.tensors import itemsize, torch_dtype
from nxd_ckpt.runtime.paths import SUMMARIES, summaries_file
from nxd_ckpt.runtime.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.runtime.save.waves import Span, Wave
from nxd_ckpt.runtime.summary import CHUNK, Summary
from nxd_ckpt.storage.base import Storage

logger = logging.getLogger("nxd_ckpt")

VERSION = 1
_AT_ONCE = 16 * CHUNK
"""Elements between two looks whether to stop: a few milliseconds."""

Boxes = dict[Box, Summary]
"""What was counted of a tensor, by the box of the whole one. A tensor without pieces counts as a whole one."""


class Counting:
    """Counts what this rank writes of the ``files``, on one of the ``threads``."""

    def __init__(self, files: Sequence[PlannedFile], threads: Executor) -> None:
        self._files, self._threads = files, threads
        self._tasks: list[Future[bool]] = []
        self._stopped = self._lacks = False
        self._found: dict[str, Boxes] = {}

    def add(self, wave: Wave, views: Sequence[memoryview]) -> None:
        """Count the tensors of a wave, each in its view."""
        self._lacks = self._lacks or self._stopped
        if not self._lacks:
            self._tasks.append(self._threads.submit(self._count, wave, list(views)))

    def stop(self) -> None:
        """Look at no memory any more, once this returns. If something is not counted by now, nothing is kept."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        wait(self._tasks)

    def settle(self) -> None:
        """The same, if it is not done with all that it was given. Then what comes is not counted either."""
        if not all(task.done() for task in self._tasks):
            self.stop()

    def keep(self, storage: Storage, tag: str, attempt: str, rank: int) -> None:
        """Keep it beside the tag, which is visible, as soon as all is counted. Does not wait for that."""

        def write(_: Future[bool]) -> None:
            if not self._is_complete():
                return
            try:
                storage.write(summaries_file(tag, rank), summaries_text(attempt, self._found).encode())
                if rank == 0:
                    _drop_those_of_lost_tags(storage)
            except (OSError, CheckpointError) as error:
                logger.debug("what was counted of %s/%s is not kept: %s", storage.url, tag, error)

        if self._tasks:
            self._tasks[-1].add_done_callback(write)

    def _is_complete(self) -> bool:
        """Whether all is counted that there was; asked once nothing runs any more."""
        well = all(task.done() and not task.cancelled() and task.exception() is None for task in self._tasks)
        return well and not self._lacks and all(task.result() for task in self._tasks)

    def _count(self, wave: Wave, views: list[memoryview]) -> bool:
        """Whether it came to the end."""
        try:
            for span, view in zip(wave, views, strict=True):
                for summary, values in self._values(self._files[span.file], span, view):
                    if self._stopped:
                        return False
                    summary.add(values)
            return True
        finally:
            views.clear()  # the arena may only grow once nobody holds a view of it

    def _values(
        self, planned: PlannedFile, span: Span, view: memoryview
    ) -> Iterator[tuple[Summary, torch.Tensor]]:
        """The elements in the span, and which summary they belong to."""
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
        """``values`` are its elements from ``start`` on, in the order of the file."""
        whole, boxes = Box.whole(tensor.shape), self._found.setdefault(tensor.name, {})
        for piece in tensor.pieces if tensor.pieces is not None else (Piece(whole, whole),):
            if piece.box in boxes and not start:
                continue  # another copy of it
            if piece.local == whole:
                summary = boxes.setdefault(piece.box, Summary())
                yield from ((summary, part) for part in torch.split(values, _AT_ONCE))
            elif values.numel() == whole.numel:  # else it came in parts: who asks will read it
                summary, held = boxes.setdefault(piece.box, Summary()), values.view(tensor.shape)
                yield from ((summary, box_of(held, part).reshape(-1)) for part in cut_box(piece.local, _AT_ONCE))


def summaries_text(attempt: str, found: dict[str, Boxes]) -> str:
    """The JSON of what a rank counted."""
    tensors = {
        name: [[*map(list, (box.offset, box.size)), summary.to_json()] for box, summary in boxes.items()]
        for name, boxes in found.items()
    }
    fields = {"format_version": VERSION, "kind": "summaries", "attempt": attempt, "tensors": tensors}
    return json.dumps(fields, separators=(",", ":"))


def _drop_those_of_lost_tags(storage: Storage) -> None:
    for entry in storage.list(SUMMARIES):
        if not storage.is_dir(entry.name):
            storage.remove(f"{SUMMARIES}/{entry.name}")
