"""The results that torch DCP collects on rank 0 of a save, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from nxd_ckpt.errors import MalformedFile, SaveFailed, UnsupportedState
from nxd_ckpt.formats.tensors import dtype_name
from nxd_ckpt.formats.torch_zip import read_tensor, read_tree
from nxd_ckpt.torch_dcp.collected_save import Share
from nxd_ckpt.torch_dcp.dcp_contents import CollectedState, WrittenTensor


def read_value(data: bytes, name: str, trust_pickle: bool) -> Any:
    """Return the value in bytes of ``torch.save``.

    Raises UnsafePickle for more than plain data, UnsupportedState for other bytes.
    """
    memory = memoryview(data)

    def pread(offset: int, nbytes: int) -> bytes:
        return bytes(memory[offset : offset + nbytes])

    def pread_into(offset: int, out: memoryview) -> None:
        out[:] = memory[offset : offset + len(out)]

    try:
        return read_tree(pread, len(data), name, trust_pickle=trust_pickle, leaf=partial(read_tensor, pread_into))
    except MalformedFile as error:
        raise UnsupportedState(f"{name}: the planner returned bytes that are no torch.save file: {error}") from error


def collected(metadata: Metadata, results: Sequence[Sequence[WriteResult]], trust_pickle: bool) -> CollectedState:
    """Return the tensors that all ranks wrote, and the values that they sent.

    Raises SaveFailed unless they are all parts in the metadata.
    """
    ranks: dict[str, set[int]] = {}
    parts: dict[str, dict[tuple[int, ...], Any]] = {}
    for rank, own in enumerate(results):
        for result in own:
            if isinstance(result.storage_data, Share):
                continue
            if result.size_in_bytes:
                ranks.setdefault(result.index.fqn, set()).add(rank)
            parts.setdefault(result.index.fqn, {})[tuple(result.index.offset or ())] = result.storage_data
    written: dict[str, WrittenTensor] = {}
    values: dict[str, Any] = {}
    for name, about in metadata.state_dict_metadata.items():
        own_parts = parts.get(name, {})
        tensor = about if isinstance(about, TensorStorageMetadata) else None
        expected = {()} if tensor is None else {tuple(chunk.offsets) for chunk in tensor.chunks}
        if own_parts.keys() != expected:
            raise SaveFailed(f"{name}: {len(own_parts)} of its {len(expected)} parts were written")
        if tensor is None:
            values[name] = read_value(own_parts[()], name, trust_pickle)
        elif None in own_parts.values():
            dtype, shape = dtype_name(tensor.properties.dtype), tuple(tensor.size)
            written[name] = WrittenTensor(dtype, shape, tuple(sorted(ranks.get(name, ()))))
        else:
            values[name] = _assembled(tensor, own_parts, name)
    paths = metadata.planner_data or {}
    all_paths = {name: tuple(paths.get(name, (name,))) for name in metadata.state_dict_metadata}
    return CollectedState(written, values, all_paths)


def _assembled(about: TensorStorageMetadata, parts: Mapping[tuple[int, ...], bytes], name: str) -> torch.Tensor:
    whole = torch.empty(about.size, dtype=about.properties.dtype)
    for offset, data in parts.items():
        part = read_value(data, name, False)
        whole[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))] = part
    return whole
