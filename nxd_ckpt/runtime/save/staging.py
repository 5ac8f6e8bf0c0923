"""Staging: one rank's state on the host at one instant, laid out in the arena as the files it will become.

Files lie one after the other, each at a page boundary, exactly as on disk: tensors at their offsets, headers between
them filled in once the digests are known; what follows the last tensor of a file is no part of it. A snapshot larger
than the arena's cap goes in waves: all but the last are written before the next is copied, so that part of an async
save is then synchronous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nxd_ckpt.adapters import torch_xla
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import StagingTooLarge
from nxd_ckpt.formats.torch_zip_writer import Image, StorageRecord
from nxd_ckpt.runtime.arena import PAGE, Arena
from nxd_ckpt.runtime.save.planned_file import PlannedFile

_TRANSFER = 16 * 2**20
_TRANSFER_AT_MOST = 256 * 2**20
"""Bytes of device tensors that are brought over in one go: several tensors, since those go side by side, but no more
than needed for that: their host copies are extra memory while it lasts, which small ones find in the allocator's
pockets and large ones get from the system, page by page."""


@dataclass(frozen=True)
class Span:
    """Bytes ``start <= offset < stop`` of the file number ``file``, at ``at`` in the arena.

    A span holds a file's tensors, all of them, or a part of one, ``storage``, that is larger than the arena; then
    ``start`` is a multiple of the digest's block from that storage's beginning.
    """

    file: int
    start: int
    stop: int
    at: int
    storage: int | None = None


Wave = list[Span]


def plan_waves(files: Sequence[PlannedFile], cap: int) -> list[Wave]:
    """Cut the files into waves of at most ``cap`` bytes; a single wave of whole files where they fit."""
    waves: list[Wave] = [[]]
    at = 0
    for span in _spans(files, cap):
        if at + span.stop - span.start > cap:
            waves.append([])
            at = 0
        waves[-1].append(Span(span.file, span.start, span.stop, at, span.storage))
        at = -(-(at + span.stop - span.start) // PAGE) * PAGE
    return waves


class Stager:
    """Copies planned files into ``arena``, wave by wave.

    Where a file lies as the last save's did, the tensors that stand for its places in the arena are used again: making
    them takes longer than copying a small tensor.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._places: dict[tuple[int, int], _ArenaTensors] = {}

    def stage(self, files: Sequence[PlannedFile], wave: Wave) -> list[memoryview]:
        """Copy the tensors of one wave; a view of each of its spans, in order. Headers are left unwritten.

        The caller has waited for pending device work: all there is here are transfers (promise 10).
        """
        if end_of(wave) > self.arena.nbytes:
            self._places.clear()  # they look into memory that is about to be replaced
        views = views_of(wave, self.arena.reserve(end_of(wave)))
        known, self._places = self._places, {}
        copies: list[_Copy] = []
        for span, view in zip(wave, views, strict=True):
            image = files[span.file].image
            if span.storage is not None:
                copies.append(_copy_of_part(image, span, view))
                continue
            places = known.get((span.file, span.at))
            if places is None or places.storages is not image.storages:
                places = _ArenaTensors(image.storages, list(map(partial(_place, view), image.storages, image.tensors)))
            self._places[span.file, span.at] = places
            copies += zip(image.tensors, places.tensors, strict=True)
        _copy(copies)
        return views

    def release(self) -> None:
        """Give the memory back to the system."""
        self._places.clear()
        self.arena.release()


def views_of(wave: Wave, memory: memoryview) -> list[memoryview]:
    """The memory of each span of the wave, in order, whatever it holds."""
    return [memory[span.at : span.at + span.stop - span.start] for span in wave]


def contents_of(planned: PlannedFile, span: Span) -> Iterator[tuple[int, int, int, int]]:
    """The tensor bytes in a span of the file: (storage's number, its bytes from, up to, their place in the span)."""
    storages = planned.image.storages
    if span.storage is not None:
        offset = storages[span.storage].offset
        yield span.storage, span.start - offset, span.stop - offset, 0
        return
    for number, storage in enumerate(storages):
        if storage.nbytes:
            yield number, 0, storage.nbytes, storage.offset


def end_of(wave: Wave) -> int:
    """Bytes of memory that the wave takes."""
    return max((span.at + span.stop - span.start for span in wave), default=0)


def _spans(files: Sequence[PlannedFile], cap: int) -> Iterator[Span]:
    for number, planned in enumerate(files):
        if planned.image.tensor_nbytes <= cap:
            yield Span(number, 0, planned.image.tensor_nbytes, 0)
            continue
        room = cap // CRC_BLOCK * CRC_BLOCK
        for index, storage in enumerate(planned.image.storages):
            if storage.nbytes > cap and room == 0:
                raise StagingTooLarge(
                    f"{planned.key}: a tensor of {storage.nbytes} bytes does not fit a staging cap of {cap} bytes, and "
                    f"waves need at least {CRC_BLOCK}; raise memory_cap"
                )
            step = storage.nbytes if storage.nbytes <= cap else room
            for start in range(0, storage.nbytes, max(step, 1)):
                stop = min(start + step, storage.nbytes)
                yield Span(number, storage.offset + start, storage.offset + stop, 0, index)


_Copy = tuple[torch.Tensor, torch.Tensor]
"""A live tensor, or a part of one, and the memory that it goes to, as a tensor of the same dtype and shape."""


@dataclass(frozen=True)
class _ArenaTensors:
    """The memory of each of a file's ``storages`` in the arena, as a tensor: of the rows that are saved."""

    storages: Sequence[StorageRecord]
    tensors: list[torch.Tensor]


@torch.inference_mode(False)  # it is kept, and a tensor made in that mode could not be written to outside of it
def _place(view: memoryview, storage: StorageRecord, tensor: torch.Tensor) -> torch.Tensor:
    if storage.nbytes == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    count = storage.nbytes // tensor.element_size()
    shape = tensor.shape if count == tensor.numel() else (-1, *tensor.shape[1:])
    return torch.frombuffer(view, dtype=tensor.dtype, count=count, offset=storage.offset).view(shape)


def _copy_of_part(image: Image, span: Span, view: memoryview) -> _Copy:
    """For a span that holds elements of one tensor, counted in its tight form."""
    assert span.storage is not None
    tensor, offset = image.tensors[span.storage], image.storages[span.storage].offset
    start, stop = ((at - offset) // tensor.element_size() for at in (span.start, span.stop))
    target = torch.frombuffer(view, dtype=tensor.dtype)
    if target.numel() == tensor.numel():
        return tensor, target.view(tensor.shape)
    (host,) = torch_xla.to_cpu([tensor])
    return host.reshape(-1)[start:stop], target


@torch.no_grad()
def _copy(copies: Iterable[_Copy]) -> None:
    on_device = []
    for source, target in copies:
        if source.device.type == "cpu":
            target.copy_(_rows(source, target))  # whatever its strides: one copy, no temporary
        else:
            on_device.append((source, target))
    for batch in _batches(on_device):
        hosts = torch_xla.to_cpu([source for source, _ in batch])
        for host, (_, target) in zip(hosts, batch, strict=True):
            target.copy_(_rows(host, target))


def _rows(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What of the tensor is saved: all, or its first rows. Cut on the host: on a device that would be a computation."""
    return source if source.shape == target.shape else source[: len(target)]


def _batches(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    batch: list[_Copy] = []
    nbytes = 0
    for copy in copies:
        batch.append(copy)
        nbytes += copy[1].nbytes
        if nbytes >= (_TRANSFER if len(batch) > 1 else _TRANSFER_AT_MOST):
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
