"""The plan of the files of a torch DCP directory; every entry is a ``torch.save`` file. Touches no file.

A large tensor has its own file, as with ``single_file_per_rank=False`` of torch's writer. Values and small tensors
share files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nxd_ckpt.core.dcp_chunks import DcpChunk
from nxd_ckpt.formats.torch_zip_writer import JoinedImage
from nxd_ckpt.reshard.dcp_state import DcpState, DcpTensor
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile

_SMALL = 2**20
"""Size in bytes below which a tensor shares a file with others."""

_TOGETHER = 32 * 2**20
"""Approximate bytes of a shared file."""


class _Entry(NamedTuple):
    """An entry at ``position`` of the state dict: a value, or a leaf that stands for a tensor of ``nbytes`` bytes."""

    position: int
    value: Any
    chunk: DcpChunk
    nbytes: int = 0


def plan_files(state: DcpState) -> list[PlannedFile]:
    """Return the files of ``state``, each with its chunks in the directory's metadata.

    Raises the errors of `DcpState.leaf`, and UnsafePickle for values that cannot be pickled.
    """
    entries = [_Entry(position, value, DcpChunk(path)) for position, (path, value) in enumerate(state.values.values())]
    for position, (name, tensor) in enumerate(state.tensors.items(), len(entries)):
        entries.append(_Entry(position, state.leaf(name), _chunk(tensor), tensor.nbytes))
    large = ([entry] for entry in entries if entry.nbytes >= _SMALL)
    groups = [*_grouped(entry for entry in entries if entry.nbytes < _SMALL), *large]
    return [_file(f"__0_{number}.distcp", group) for number, group in enumerate(groups)]


def _chunk(tensor: DcpTensor) -> DcpChunk:
    return DcpChunk(tensor.path, tensor.dtype, tensor.shape, (0,) * len(tensor.shape), tensor.shape)


def _grouped(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Yield groups of neighbours of about `_TOGETHER` bytes."""
    group: list[_Entry] = []
    nbytes = 0
    for entry in entries:
        group.append(entry)
        nbytes += entry.nbytes
        if nbytes >= _TOGETHER:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _file(key: str, entries: Sequence[_Entry]) -> PlannedFile:
    image = JoinedImage.of([entry.value for entry in entries])
    named = {id(entry.value): entry.chunk for entry in entries if entry.chunk.dtype is not None}
    tensors = tuple(
        NamedTensor(chunk.name, number, chunk.dtype or "", chunk.shape, None)
        for number, leaf in enumerate(image.tensors)
        if (chunk := named.get(id(leaf))) is not None
    )
    chunks = tuple((entry.position, entry.chunk._replace(file=key)) for entry in entries)
    return PlannedFile(key, image, tensors, chunks=chunks)

