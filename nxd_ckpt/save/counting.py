"""The tensors of one save in numbers, counted from the staged bytes while these are written, and after that.

Each rank keeps what it counted beside the tag, box by box; whoever reads it puts the boxes of all ranks together
(:mod:`nxd_ckpt.examine.statistics_cache`). All of it, the files that are kept included, is done by a thread of
its own. No save waits for that: one that needs the memory stops the counting.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, wait

import torch

from nxd_ckpt.coordination.control_files import drop_entries_of_lost_tags
from nxd_ckpt.coordination.paths import SUMMARIES, summaries_dir, summaries_file
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats.assembly import box_of, cut_box
from nxd_ckpt.formats.tensors import itemsize, torch_dtype
from nxd_ckpt.reshard.summary import PART, Summary
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.save.summaries import Boxes, Summaries, dump_summaries
from nxd_ckpt.save.waves import Span, Wave
from nxd_ckpt.storage.base import Storage

logger = logging.getLogger("nxd_ckpt")


class Counting:
    """Counts what this rank writes of the ``files``, on a ``thread`` that does one thing after the other."""

    def __init__(self, files: Sequence[PlannedFile], thread: Executor) -> None:
        self._files, self._thread = files, thread
        self._tasks: list[Future[bool]] = []
        self._held: list[list[memoryview]] = []
        self._stopped = self._lacks = False
        self._found: dict[str, Boxes] = {}

    def add(self, wave: Wave, views: Sequence[memoryview]) -> None:
        """Count the tensors of a wave, each in its view."""
        self._lacks = self._lacks or self._stopped
        if not self._lacks:
            self._held.append(list(views))
            self._tasks.append(self._thread.submit(self._count, wave, self._held[-1]))

    def stop(self) -> None:
        """Look at no memory any more, once this returns. If something is not counted by now, nothing is kept."""
        self._stopped = True
        wait([task for task in self._tasks if not task.cancel()])  # not for the thread: it may be waiting for a store
        for views in self._held:
            views.clear()

    def end_wave(self) -> None:
        """The next wave comes into the same memory: if this one is not counted yet, stop, and keep nothing of the save.

        Does not wait for the rest of the wave to be counted.
        """
        if not all(task.done() for task in self._tasks):
            self.stop()

    def keep(self, storage: Storage, tag: str, attempt: str, rank: int) -> None:
        """Keep it beside the tag, which is visible, as soon as all is counted. Does not wait for that."""

        def write() -> None:
            if not self._is_complete():
                return
            try:
                storage.write(summaries_file(tag, rank), dump_summaries(Summaries(attempt, self._found)))
                if rank == 0:
                    drop_entries_of_lost_tags(storage, SUMMARIES, summaries_dir)
            except (OSError, CheckpointError) as error:
                logger.debug("what was counted of %s/%s is not kept: %s", storage.url, tag, error)

        self._thread.submit(write)

    def _is_complete(self) -> bool:
        """Whether all is counted that there was; asked once nothing runs any more."""
        well = all(task.done() and not task.cancelled() and task.exception() is None for task in self._tasks)
        return bool(self._tasks) and well and not self._lacks and all(task.result() for task in self._tasks)

    def _count(self, wave: Wave, views: list[memoryview]) -> bool:
        """Whether it came to the end."""
        try:
            for span, view in zip(wave, views, strict=True):
                for summary, values in self._values(self._files[span.file], span, view):
                    if self._stopped:
                        return False
                    summary.add_all(Summary.of(values))
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
                yield from ((summary, part) for part in torch.split(values, PART))
            elif values.numel() == whole.numel:  # else it came in parts: who asks will read it
                summary, held = boxes.setdefault(piece.box, Summary()), values.view(tensor.shape)
                yield from ((summary, box_of(held, part).reshape(-1)) for part in cut_box(piece.local, PART))
