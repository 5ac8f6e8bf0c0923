"""Writer of file images whose tensors come from other files: verified, in bounded memory, reading ahead.

It writes all kinds of conversion output: torch files, safetensors and torch DCP's files.
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
from nxd_ckpt.formats.memory import byte_view, torch_dtype
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.saving.planned_file import PlannedFile, Wave, end_of, plan_waves, views_of
from nxd_ckpt.saving.writing import WRITERS, FileWriter
from nxd_ckpt.storage.arena import PAGE, Arena
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.transfer import prefetched
from nxd_ckpt.tag.reading import LeafReader

WAVE = 32 * 2**20
"""Bytes that are read at once, while as many are written; enough for any disk, and for a digest of every block."""

TOGETHER = WAVE // CRC_BLOCK
"""Largest number of sets of files that are filled side by side; each gets at least a block at a time."""

_Cast = tuple[str, Assembly, torch.Tensor]
"""The name of a tensor that is cast to a smaller range, the assembly of a part of it, and that part's values."""


def write_images(
    reader: LeafReader,
    storage: Storage,
    folder: str,
    sets: Sequence[Sequence[PlannedFile]],
    progress: Callable[[int], None],
    beside: int = TOGETHER,
) -> list[FileWriter]:
    """Write sets of files below ``folder``, durably; return each set's writer, which has the digests.

    Tensors of the images are live, or stand-ins for tensors that ``reader`` reads. Neighbouring sets are filled side by
    side, ``beside`` at a time and at most `TOGETHER`, so that parts of a tensor in several of them are read once.
    ``progress`` is called with the bytes of each chunk that was written; an error that it raises stops the writing.

    Raises:
        DigestMismatch: bytes changed since they were saved; the message names the tensor.
        DtypeMismatch: a value is too large for the dtype that it is cast to.
    """
    with ThreadPoolExecutor(WRITERS, "nxd_ckpt-writer") as threads:
        writers = [FileWriter(storage, folder, files, progress, threads, closes_later=True) for files in sets]
        try:
            for filled in _filled(reader, sets, min(beside, len(sets))):
                for number, wave, views in filled:
                    writers[number].write(wave, views)
            for writer in writers:
                writer.finish()
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
    return writers


_Waves = Sequence[tuple[int, Wave]]
"""Waves that are filled at once, each of the set of files with that number."""
_Filled = Sequence[tuple[int, Wave, list[memoryview]]]
"""Waves that are filled, each with the number of its set and the memory of its spans."""


def _filled(reader: LeafReader, sets: Sequence[Sequence[PlannedFile]], beside: int) -> Iterator[_Filled]:
    """Yield wave after wave of all sets of files. Everything is verified once the last one has been asked for."""
    room = WAVE // beside // CRC_BLOCK * CRC_BLOCK + PAGE  # one more page, for spans that do not begin on one
    waves: list[_Waves] = []
    for first in range(0, len(sets), beside):
        waves_by_set = [plan_waves(files, room) for files in sets[first : first + beside]]
        waves += [list(enumerate(each, first)) for each in zip_longest(*waves_by_set, fillvalue=Wave())]
    yield from prefetched(waves, partial(_fill, reader, sets, room), room * beside)
    reader.finish()


def _fill(
    reader: LeafReader, sets: Sequence[Sequence[PlannedFile]], room: int, waves: _Waves, arena: Arena
) -> _Filled:
    memory = arena.reserve(max(room * place + end_of(wave) for place, (_, wave) in enumerate(waves)))
    filled = [(number, wave, views_of(wave, memory[room * place :])) for place, (number, wave) in enumerate(waves)]
    casts: list[_Cast] = []
    for set_number, wave, views in filled:
        for span, view in zip(wave, views, strict=True):
            planned = sets[set_number][span.file]
            for number, start, stop, at in span.tensors(planned.image):
                tensor = planned.image.tensors[number]
                mine = view[at : at + stop - start]
                if isinstance(tensor, torch.Tensor):
                    mine[:] = byte_view(tensor)[start:stop]
                else:
                    casts += _read(reader, Assembly.of(tensor), start, mine, planned.names.get(number, planned.key))
    reader.wait()
    for cast in casts:
        _refuse_overflow(*cast)
    return filled


def _read(reader: LeafReader, leaf: Assembly, begin: int, memory: memoryview, name: str) -> Iterator[_Cast]:
    """Ask for a run of the leaf's bytes; yield parts that lose range, which must be checked after reading."""
    parts = list(read_run(reader, leaf, begin, memory, name))
    yield from ((name, part, tensor) for part, tensor in parts if _loses_range(part))


def read_run(
    reader: LeafReader, leaf: Assembly, begin: int, memory: memoryview, name: str
) -> Iterator[tuple[Assembly, torch.Tensor]]:
    """Ask ``reader`` to fill ``memory`` with the row-major tensor's bytes from ``begin`` on, verified.

    Yields parts of the leaf, each with its tensor in that memory, after it has been asked for.
    """
    leaf, dtype = leaf.base, torch_dtype(leaf.dtype)
    first = begin // dtype.itemsize
    last = (begin + len(memory)) // dtype.itemsize
    at = 0
    for box in boxes_of_run(first, last, leaf.shape):
        out = torch.frombuffer(memory, dtype=dtype, count=box.numel, offset=at).view(box.size)
        part = leaf.within(box)
        reader.read_into(part, out, name, compare=True, verified=False)
        at += box.numel * dtype.itemsize
        yield part, out


def _loses_range(leaf: Assembly) -> bool:
    """Return whether the leaf's dtype has a smaller range than that of a part."""
    cast = torch_dtype(leaf.dtype)
    saved = {torch_dtype(fragment.stub.dtype) for fragment in leaf.fragments}
    return cast.is_floating_point and any(torch.finfo(cast).max < torch.finfo(dtype).max for dtype in saved - {cast})


def _refuse_overflow(name: str, leaf: Assembly, tensor: torch.Tensor) -> None:
    """Raise DtypeMismatch if a value became infinite when ``leaf`` was cast."""
    if bool(tensor.isinf().any()):
        saved = " and ".join(sorted({fragment.stub.dtype for fragment in leaf.fragments}))
        raise DtypeMismatch(
            f"{name}: values become infinite when cast from {saved} to {str(tensor.dtype).removeprefix('torch.')}; "
            "choose a dtype of more range"
        )
