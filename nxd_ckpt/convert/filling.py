"""Filling the memory of files to be written with what other files hold: verified, in waves, ahead of the writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch

from nxd_ckpt.convert.ahead import Ahead
from nxd_ckpt.core.box import boxes_of_run
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import DtypeMismatch
from nxd_ckpt.formats.tensors import Assembly, torch_dtype
from nxd_ckpt.runtime.arena import Arena
from nxd_ckpt.runtime.save.planned_file import PlannedFile
from nxd_ckpt.runtime.save.staging import Span, Wave, contents_of, end_of, plan_waves, views_of
from nxd_ckpt.runtime.tag.reading import LeafReader

WAVE = 32 * 2**20
"""Bytes that are read, and bytes that are written meanwhile: enough for any disk, and for a digest of every block."""

TOGETHER = WAVE // CRC_BLOCK
"""Sets of files that are filled side by side, at most: of each at least a block at a time."""


class Filled(NamedTuple):
    """A wave of one set of files, with its memory."""

    number: int
    wave: Wave
    views: list[memoryview]


def filled(reader: LeafReader, sets: Sequence[Sequence[PlannedFile]]) -> Iterator[list[Filled]]:
    """Wave after wave of all sets of files; while the caller writes one, the next is read. Memory is used again.

    Leaves of the files stand for tensors that ``reader`` reads. At most :data:`TOGETHER` sets are filled side by side,
    so that what several ranks hold of a tensor is read once. All is verified when the last wave has been asked for.

    Raises:
        DigestMismatch: what is read is not what was written; names the tensor.
        DtypeMismatch: a value is too large for the dtype that it is cast to.
    """
    room = WAVE // len(sets) // CRC_BLOCK * CRC_BLOCK
    every = [plan_waves(files, room) for files in sets]
    waves = [[wave or [] for wave in one] for one in zip_longest(*every)]
    for _, found in Ahead(WAVE).filled(waves, partial(_fill, reader, sets, room)):
        yield found
    reader.finish()


def _fill(
    reader: LeafReader, sets: Sequence[Sequence[PlannedFile]], room: int, waves: Sequence[Wave], arena: Arena
) -> list[Filled]:
    memory = arena.reserve(max(room * number + end_of(wave) for number, wave in enumerate(waves)))
    casts: list[tuple[str, Assembly, torch.Tensor]] = []
    found = []
    for number, (files, wave) in enumerate(zip(sets, waves, strict=True)):
        views = views_of(wave, memory[room * number :])
        names = {file: _names(files[file]) for file in {span.file for span in wave}}
        for span, view in zip(wave, views, strict=True):
            casts += _fill_span(reader, files[span.file], names[span.file], span, view)
        found.append(Filled(number, wave, views))
    reader.wait()
    for name, leaf, tensor in casts:
        refuse_overflow(name, leaf, tensor)
    return found


def _fill_span(
    reader: LeafReader, planned: PlannedFile, names: Mapping[int, str], span: Span, view: memoryview
) -> Iterator[tuple[str, Assembly, torch.Tensor]]:
    """Ask for the span's tensors; those that lose range, to be looked at when they are there."""
    for number, start, stop, at in contents_of(planned, span):
        leaf, name = Assembly.of(planned.image.tensors[number]), names.get(number, planned.key)
        tensors = read_run(reader, leaf, start, view[at : at + stop - start], name)
        yield from ((name, leaf, tensor) for tensor in tensors if loses_range(leaf))


def read_run(
    reader: LeafReader, leaf: Assembly, begin: int, memory: memoryview, name: str
) -> Iterator[torch.Tensor]:
    """Ask ``reader`` to fill ``memory`` with the row-major tensor's bytes from ``begin`` on, and to verify them.

    Yields the tensors that it is then, each when it was asked for.
    """
    dtype = torch_dtype(leaf.dtype)
    first, last = begin // dtype.itemsize, (begin + len(memory)) // dtype.itemsize
    at = 0
    for box in boxes_of_run(first, last, leaf.shape):
        out = torch.frombuffer(memory, dtype=dtype, count=box.numel, offset=at).view(box.size)
        reader.read_into(leaf.within(box), out, name, compare=True, verified=False)
        at += box.numel * dtype.itemsize
        yield out


def loses_range(leaf: Assembly) -> bool:
    """Whether the leaf's dtype holds less than that of a part."""
    cast, saved = torch_dtype(leaf.dtype), {torch_dtype(part.stub.dtype) for part in leaf.parts}
    return cast.is_floating_point and any(torch.finfo(cast).max < torch.finfo(dtype).max for dtype in saved)


def refuse_overflow(name: str, leaf: Assembly, tensor: torch.Tensor) -> None:
    """Raise DtypeMismatch where a value of the tensor, which ``leaf`` was cast to, became infinite."""
    if bool(tensor.isinf().any()):
        saved = " and ".join(sorted({part.stub.dtype for part in leaf.parts}))
        raise DtypeMismatch(
            f"{name}: cast from {saved} to {str(tensor.dtype).removeprefix('torch.')}, values become infinite; choose "
            "a dtype of more range"
        )


def _names(planned: PlannedFile) -> dict[int, str]:
    """A tensor's name for each storage of the file."""
    return {tensor.storage: tensor.name for tensor in planned.tensors}
