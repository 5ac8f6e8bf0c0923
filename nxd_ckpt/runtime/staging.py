"""Staging: one rank's state on the host at one instant, laid out in the arena as the files it will become.

Files lie one after the other, each at a page boundary, exactly as on disk: storages at their offsets, headers and
padding in between filled in once the digests are known. A snapshot larger than the arena's cap goes in waves: all
but the last are written before the next is copied, so that part of an async save is then synchronous.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nxd_ckpt.adapters import torch_xla
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import StagingTooLarge
from nxd_ckpt.runtime.arena import PAGE, Arena
from nxd_ckpt.runtime.plan import PlannedFile

_TRANSFER = 256 * 2**20
"""Bytes of device tensors that are brought over in one go: their host copies are extra memory while it lasts."""


@dataclass(frozen=True)
class Span:
    """Bytes ``start <= offset < stop`` of the file number ``file``, at ``at`` in the arena.

    A span holds whole storages, or a part of one, ``storage``, that is larger than the arena; then ``start`` is a
    multiple of the digest's block from that storage's beginning.
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


def stage(files: Sequence[PlannedFile], wave: Wave, arena: Arena) -> list[memoryview]:
    """Copy the tensors of one wave into the arena; a view of each span, in order. Headers are left unwritten.

    The first wave's call waits for pending device work; everything after is transfers (promise 10).
    """
    views = views_of(wave, arena)
    copies = [copy for span, view in zip(wave, views, strict=True) for copy in _copies(files[span.file], span, view)]
    for batch in _batches(copies):
        hosts = torch_xla.to_cpu([tensor for tensor, _, _ in batch])
        for host, (_, part, target) in zip(hosts, batch, strict=True):
            _copy(host, part, target)
    return views


def views_of(wave: Wave, arena: Arena) -> list[memoryview]:
    """The arena's memory for each span of the wave, in order, whatever it holds."""
    memory = arena.reserve(max((span.at + span.stop - span.start for span in wave), default=0))
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


def _spans(files: Sequence[PlannedFile], cap: int) -> Iterator[Span]:
    for number, planned in enumerate(files):
        if planned.image.nbytes <= cap:
            yield Span(number, 0, planned.image.nbytes, 0)
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


_Copy = tuple[torch.Tensor, tuple[int, int], memoryview]
"""A live tensor, the bytes (start, stop) of it that are wanted, and where they go."""


def _copies(planned: PlannedFile, span: Span, view: memoryview) -> Iterator[_Copy]:
    for number, start, stop, at in contents_of(planned, span):
        yield planned.image.storages[number].tensor, (start, stop), view[at : at + stop - start]


def _batches(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Groups of about :data:`_TRANSFER` bytes: few transfers, bounded host memory."""
    batch: list[_Copy] = []
    size = 0
    for copy in copies:
        batch.append(copy)
        size += copy[0].numel() * copy[0].element_size()
        if size >= _TRANSFER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _copy(host: torch.Tensor, part: tuple[int, int], target: memoryview) -> None:
    """Copy bytes ``part`` of the tight form of ``host`` to ``target``."""
    start, stop = part
    whole = stop - start == host.numel() * host.element_size()
    if whole:
        # Straight into place, whatever the strides of the source: one copy, no temporary.
        torch.frombuffer(target, dtype=host.dtype).view(host.shape).copy_(host.detach())
        return
    size = host.element_size()
    flat = host.detach().reshape(-1)[start // size : stop // size]
    torch.frombuffer(target, dtype=host.dtype).copy_(flat)
