"""Staging: copies one rank's state to the host at one instant, laid out in the arena as the files to write.

A snapshot larger than the arena's cap goes in waves (see `saving.planned_file`): all but the last are written before
the next is copied, so that part of an async save is then synchronous.

The buffers are the process's, which all its Checkpointers share: an idle directory's is handed on to the next. One is
in use from the moment at which a save begins to fill it until this rank's bytes are written, whatever the other ranks
do. Usually there is one. A save that meets another directory's in flight gets a second one, if both fit the cap; else
it waits for the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from nxd_ckpt import effects
from nxd_ckpt.coordination.waiting import pause_after
from nxd_ckpt.formats.image import Image, StorageRecord
from nxd_ckpt.formats.memory import copy_values
from nxd_ckpt.live import torch_xla
from nxd_ckpt.saving.options import local_world_size
from nxd_ckpt.saving.planned_file import PlannedFile, Span, Wave, end_of, plan_waves, views_of
from nxd_ckpt.saving.writing import FileWriter
from nxd_ckpt.storage.arena import Arena, default_cap, whole_pages
from nxd_ckpt.storage.progress import Counter

_TRANSFER = 16 * 2**20
_TRANSFER_AT_MOST = 256 * 2**20
"""Bytes of device tensors that are transferred in one group: several tensors, because they are copied side by side, but
no more than that needs. Their host copies are extra memory meanwhile: the allocator reuses that of small ones, and gets
that of large ones from the system, page by page."""


class Stager:
    """Copier of planned files into ``arena``, wave by wave.

    If a file lies where that of the last save did, the tensors that view its places in the arena are reused:
    making them takes longer than copying a small tensor.

    Attributes:
        done: the bytes that were copied; a caller may set another counter before each save.
        passed_over: the number of saves in turn that needed another buffer than this idle one.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.done: Counter = Counter()
        self.passed_over = 0
        self._places: dict[Span, _ArenaTensors] = {}

    def stage(self, files: Sequence[PlannedFile], wave: Wave) -> list[memoryview]:
        """Copy the tensors of one wave; return a view of each of its spans, in order. Headers are left unwritten.

        The caller has waited for pending device work, so only transfers happen here.
        """
        if end_of(wave) > self.arena.nbytes:
            self._places.clear()  # they are views of memory that is about to be replaced
        views = views_of(wave, self.arena.reserve(end_of(wave)))
        cached = self._places
        self._places = {}
        copies: list[_Copy] = []
        for span, view in zip(wave, views, strict=True):
            image = files[span.file].image
            numbers = slice(span.storages.start, span.storages.stop)
            if span.is_part:
                copies.append(_copy_of_part(image, span, view))
                continue
            places = cached.get(span)
            if places is None or places.storages is not image.storages:
                placed = zip(image.storages[numbers], image.tensors[numbers], strict=True)
                places = _ArenaTensors(image.storages, _placed(view, span.start, placed))
            self._places[span] = places
            copies += zip(image.tensors[numbers], places.tensors, strict=True)
        _copy(copies, self.done)
        return views

    def release(self) -> None:
        """Return the memory to the system, once nothing reads it any more."""
        self._places.clear()
        self.arena.release()


def stage_and_write(files: Sequence[PlannedFile], writer: FileWriter, arena: Arena) -> None:
    """Stage the files of ``writer`` and write them, wave after wave; after an error they are dropped."""
    stager = Stager(arena)
    try:
        for wave in plan_waves(files, arena.cap):
            writer.write(wave, stager.stage(files, wave))
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    finally:
        stager.release()


_Copy = tuple[torch.Tensor, torch.Tensor]
"""A live tensor, or a part of one, and its destination in memory, as a tensor of the same dtype and shape."""


@dataclass(frozen=True)
class _ArenaTensors:
    """Memory in the arena of a span's ``storages`` of a file, as tensors of the saved rows."""

    storages: Sequence[StorageRecord]
    tensors: list[torch.Tensor]


@torch.inference_mode(False)  # a tensor made in inference mode could not be written to outside of it
def _placed(view: memoryview, start: int, tensors: Iterable[tuple[StorageRecord, torch.Tensor]]) -> list[torch.Tensor]:
    return [_place(view, start, storage, tensor) for storage, tensor in tensors]


def _place(view: memoryview, start: int, storage: StorageRecord, tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage's place in ``view``, which begins at byte ``start`` of the file."""
    if storage.nbytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    count = storage.nbytes // tensor.element_size()
    shape = tensor.shape if count == tensor.numel() else (-1, *tensor.shape[1:])
    return torch.frombuffer(view, dtype=tensor.dtype, count=count, offset=storage.offset - start).view(shape)


def _copy_of_part(image: Image, span: Span, view: memoryview) -> _Copy:
    """Return the copy for a span with elements of one tensor, counted in its tight form."""
    ((number, first, last, _),) = span.tensors(image)
    tensor = image.tensors[number]
    start = first // tensor.element_size()
    stop = last // tensor.element_size()
    target = torch.frombuffer(view, dtype=tensor.dtype)
    if target.numel() == tensor.numel():
        return tensor, target.view(tensor.shape)
    whole = torch_xla.to_cpu([tensor])[0] if torch_xla.is_xla(tensor) else tensor.detach()
    return whole.reshape(-1)[start:stop], target


@torch.no_grad()
def _copy(copies: Iterable[_Copy], done: Counter) -> None:
    from_xla = []
    streams = {}
    for source, target in copies:
        if source.is_cpu:
            copy_values(target, _rows(source, target))  # whatever its strides: one copy, no temporary
            done.add(target.nbytes)
        elif torch_xla.is_xla(source):
            from_xla.append((source, target))
        else:
            if source.device not in streams:
                streams[source.device] = _stream_with_events(source.device)
            # With events all are under way at once.
            target.copy_(_rows(source, target), non_blocking=streams[source.device] is not None)
    _wait_for([stream for stream in streams.values() if stream is not None])
    for batch in _batches(from_xla):
        hosts = torch_xla.to_cpu([source for source, _ in batch])
        for host, (_, target) in zip(hosts, batch, strict=True):
            copy_values(target, _rows(host, target))
            done.add(target.nbytes)


def _stream_with_events(device: torch.device) -> Any:
    """Return the stream of copies from ``device``; None if torch has none, or cannot wait for its work."""
    accelerator = getattr(torch, "accelerator", None)
    current = None if accelerator is None else accelerator.current_accelerator()
    if accelerator is None or current is None or current.type != device.type:
        return None
    try:
        stream = accelerator.current_stream(device)
        stream.record_event()
    except RuntimeError:  # a backend that has none
        return None
    return stream


def _wait_for(streams: Iterable[Any]) -> None:
    """Wait for the present work of the streams; not for work that other threads add meanwhile."""
    for event in [stream.record_event() for stream in streams]:
        event.synchronize()


def _rows(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the saved part of the tensor.

    All, or its first rows. Cut on the host: a device would have to compute it.
    """
    return source if source.shape == target.shape else source[: len(target)]


def _batches(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    batch: list[_Copy] = []
    nbytes = 0
    for copy in copies:
        batch.append(copy)
        nbytes += copy[1].nbytes
        if nbytes >= (_TRANSFER if len(batch) > 1 else _TRANSFER_AT_MOST):
            yield batch
            batch = []
            nbytes = 0
    if batch:
        yield batch


_AT_ONCE = 2
"""Buffers that may be in use at the same time."""

_PASSED_OVER = 2
"""Saves that need only one buffer, after which a second one is given back to the system."""


@dataclass(eq=False)
class _Use:
    """A buffer of ``nbytes`` that is in use, or about to be. ``thread`` fills it; None once it is full."""

    nbytes: int
    thread: int | None
    stager: Stager | None = None


class StagingBuffers:
    """The buffers of one process, in use and idle.

    There is no lock: signal handlers save too, and every change of the lists is atomic.
    """

    def __init__(self) -> None:
        self._idle: list[Stager] = []
        self._in_use: list[_Use] = []
        self._users: set[object] = set()
        self._caps: dict[int, int] = {}

    def cap(self, world_size: int) -> int:
        """Return the bytes that all buffers may take by default, with so many ranks on all hosts.

        It is the same as long as there are buffers, which are not free memory.
        """
        local = local_world_size(world_size)
        if not (self._idle or self._in_use):
            self._caps.clear()
        if local not in self._caps:
            self._caps[local] = default_cap(local)  # reads files
        return self._caps[local]

    def take(self, user: object, nbytes: int, cap: int, former: Stager | None) -> Stager:
        """Return a buffer for ``nbytes``, at most ``cap``; the ``user``'s ``former`` one if that is idle.

        Waits while others have so many, or so large ones, that the cap allows no further one.
        """
        self._users.add(user)
        began = effects.monotonic()
        while (stager := self._taken(nbytes, cap, former)) is None:
            effects.sleep(pause_after(effects.monotonic() - began))
        stager.arena.cap = whole_pages(cap)
        return stager

    def filled(self, stager: Stager) -> None:
        """Note that the buffer only waits to be written."""
        for use in self._in_use:
            if use.stager is stager:
                use.thread = None

    def give_back(self, stager: Stager) -> None:
        """Make the buffer idle: all of it is written."""
        stager.passed_over = 0
        self._idle.append(stager)
        for use in list(self._in_use):
            if use.stager is stager:
                self._in_use.remove(use)

    def leave(self, user: object) -> None:
        """Let the ``user`` need no buffer any more; it has none in use. Without users the memory is released."""
        self._users.discard(user)
        while not self._users and self._idle:
            self._idle.pop().release()

    def _taken(self, nbytes: int, cap: int, former: Stager | None) -> Stager | None:
        mine = _Use(nbytes, effects.get_ident())
        self._in_use.append(mine)
        try:
            idle = list(self._idle)
            stager = former if former in idle else max(idle, key=_nbytes, default=None)
            if (stager is None or nbytes > _nbytes(stager)) and not self._allows(mine, cap):
                return None
            if stager is None:
                stager = Stager(Arena(cap))
            else:
                self._idle.remove(stager)
                self._trim()
            mine.nbytes = max(nbytes, _nbytes(stager))
            mine.stager = stager
            return stager
        except ValueError:  # another thread was faster
            return None
        finally:
            if mine.stager is None:
                self._in_use.remove(mine)

    def _allows(self, mine: _Use, cap: int) -> bool:
        """Return whether there may be another buffer, beside those of uses before it."""
        before = list(self._in_use)
        before = before[: before.index(mine)]
        # To wait for what this very thread fills, which a signal handler has interrupted, would be for ever.
        if all(use.thread == mine.thread for use in before):
            return True
        return len(before) < _AT_ONCE and sum(use.nbytes for use in before) + mine.nbytes <= cap

    def _trim(self) -> None:
        """Give buffers back to the system that nobody has needed for long."""
        for stager in list(self._idle):
            stager.passed_over += 1
            if stager.passed_over >= _PASSED_OVER:
                with suppress(ValueError):  # another thread was faster
                    self._idle.remove(stager)
                    stager.release()


def _nbytes(stager: Stager) -> int:
    return stager.arena.nbytes


_of_ranks: dict[tuple[int, int], StagingBuffers] = {}
"""By process and rank: a forked child has none of its parent's, and a process may act as several ranks."""

effects.in_forked_children(_of_ranks.clear)


def buffers_of(rank: int) -> StagingBuffers:
    """Return the staging buffers of this process, as this rank of the job."""
    return _of_ranks.setdefault((effects.pid(), rank), StagingBuffers())
