"""Filling images of files with what other files hold, and writing them: verified, in bounded memory, reading ahead.

Whatever a conversion makes, torch files, safetensors or torch DCP's, is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest

import torch

from nxd_ckpt.core.box import boxes_of_run
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import DtypeMismatch
from nxd_ckpt.formats.tensors import Assembly, byte_view, torch_dtype
from nxd_ckpt.output.prefetch import prefetched
from nxd_ckpt.save.planned_file import PlannedFile
from nxd_ckpt.save.waves import Wave, end_of, plan_waves, views_of
from nxd_ckpt.save.writing import WRITERS, FileWriter
from nxd_ckpt.storage.arena import PAGE, Arena
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.reading import LeafReader

WAVE = 32 * 2**20
"""Bytes that are read at once, while as many are written: enough for any disk, and for a digest of every block."""

TOGETHER = WAVE // CRC_BLOCK
"""How many sets of files are filled side by side, at most: each gets at least a block at a time."""

_Cast = tuple[str, Assembly, torch.Tensor]
"""The name of a tensor that loses range, what it is made of, and a part of it."""


def write_images(
    reader: LeafReader,
    storage: Storage,
    folder: str,
    sets: Sequence[Sequence[PlannedFile]],
    progress: Callable[[int], None],
) -> list[FileWriter]:
    """Write sets of files below ``folder``, durably: of each set the writer, which knows the digests.

    Tensors of the images are live ones, or stand for those that ``reader`` reads. At most :data:`TOGETHER` sets are
    filled side by side, so that what several of them hold of a tensor is read once. ``progress`` is called with
    the bytes of each chunk that was written; what it raises stops the writing.

    Raises:
        DigestMismatch: what is read is not what was saved; names the tensor.
        DtypeMismatch: a value is too large for the dtype that it is cast to.
    """
    with ThreadPoolExecutor(WRITERS, "nxd_ckpt-writer") as threads:
        writers = [FileWriter(storage, folder, files, progress, threads) for files in sets]
        try:
            for waves, memories in _filled(reader, sets):
                for writer, wave, views in zip(writers, waves, memories, strict=True):
                    writer.write(wave, views)
            for writer in writers:
                writer.finish()
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
    return writers


_Filled = tuple[Sequence[Wave], Sequence[list[memoryview]]]
"""A wave of each set of files, and the memory of its spans."""


def _filled(reader: LeafReader, sets: Sequence[Sequence[PlannedFile]]) -> Iterator[_Filled]:
    """Wave after wave of all sets of files. All is verified when the last one has been asked for."""
    room = WAVE // len(sets) // CRC_BLOCK * CRC_BLOCK + PAGE  # a page more, for spans that do not begin on one
    every = [plan_waves(files, room) for files in sets]
    waves = list(zip_longest(*every, fillvalue=Wave()))
    yield from prefetched(waves, partial(_fill, reader, sets, room), room * len(sets))
    reader.finish()


def _fill(
    reader: LeafReader, sets: Sequence[Sequence[PlannedFile]], room: int, waves: Sequence[Wave], arena: Arena
) -> _Filled:
    memory = arena.reserve(max(room * number + end_of(wave) for number, wave in enumerate(waves)))
    memories = [views_of(wave, memory[room * number :]) for number, wave in enumerate(waves)]
    casts: list[_Cast] = []
    for files, wave, views in zip(sets, waves, memories, strict=True):
        for span, view in zip(wave, views, strict=True):
            planned = files[span.file]
            for number, start, stop, at in span.tensors(planned.image):
                tensor, mine = planned.image.tensors[number], view[at : at + stop - start]
                if isinstance(tensor, torch.Tensor):
                    mine[:] = byte_view(tensor)[start:stop]
                else:
                    casts += _read(reader, Assembly.of(tensor), start, mine, planned.names.get(number, planned.key))
    reader.wait()
    for cast in casts:
        _refuse_overflow(*cast)
    return waves, memories


def _read(reader: LeafReader, leaf: Assembly, begin: int, memory: memoryview, name: str) -> Iterator[_Cast]:
    """Ask for a run of the leaf's bytes. Yields what loses range: it is to be checked once it has been read."""
    tensors = list(read_run(reader, leaf, begin, memory, name))
    yield from ((name, leaf, tensor) for tensor in tensors if _loses_range(leaf))


def read_run(
    reader: LeafReader, leaf: Assembly, begin: int, memory: memoryview, name: str
) -> Iterator[torch.Tensor]:
    """Ask ``reader`` to fill ``memory`` with the row-major tensor's bytes from ``begin`` on, and to verify them.

    Yields the tensors that the memory will hold, each once it has been asked for.
    """
    dtype = torch_dtype(leaf.dtype)
    first, last = begin // dtype.itemsize, (begin + len(memory)) // dtype.itemsize
    at = 0
    for box in boxes_of_run(first, last, leaf.shape):
        out = torch.frombuffer(memory, dtype=dtype, count=box.numel, offset=at).view(box.size)
        reader.read_into(leaf.within(box), out, name, compare=True, verified=False)
        at += box.numel * dtype.itemsize
        yield out


def _loses_range(leaf: Assembly) -> bool:
    """Whether the leaf's dtype holds less than that of a part."""
    cast, saved = torch_dtype(leaf.dtype), {torch_dtype(fragment.stub.dtype) for fragment in leaf.fragments}
    return cast.is_floating_point and any(torch.finfo(cast).max < torch.finfo(dtype).max for dtype in saved - {cast})


def _refuse_overflow(name: str, leaf: Assembly, tensor: torch.Tensor) -> None:
    """Raise DtypeMismatch where a value of the tensor, which ``leaf`` was cast to, became infinite."""
    if bool(tensor.isinf().any()):
        saved = " and ".join(sorted({fragment.stub.dtype for fragment in leaf.fragments}))
        raise DtypeMismatch(
            f"{name}: cast from {saved} to {str(tensor.dtype).removeprefix('torch.')}, values become infinite; choose "
            "a dtype of more range"
        )
