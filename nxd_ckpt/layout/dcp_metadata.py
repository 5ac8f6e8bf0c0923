"""Writing ``.metadata`` of a torch DCP directory, as torch's own writer pickles it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch

from nxd_ckpt.core.dcp_chunks import DcpChunk
from nxd_ckpt.formats.tensors import torch_dtype


def dump_metadata(chunks: Iterable[DcpChunk]) -> bytes:
    """The metadata of a directory of these chunks. Of values of one name the first counts: all ranks have the same."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    data: dict[Any, Any] = {}
    for chunk in chunks:
        name, place = chunk.name, _StorageInfo(chunk.file, chunk.start, chunk.nbytes)
        paths.setdefault(name, chunk.path)
        if chunk.dtype is None:
            entries.setdefault(name, BytesStorageMetadata())
            data.setdefault(MetadataIndex(name), place)
            continue
        if name not in entries:
            properties = TensorProperties(dtype=torch_dtype(chunk.dtype))
            entries[name] = TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
        offset = torch.Size(chunk.offset)
        index = MetadataIndex(name, offset, len(entries[name].chunks))
        if index not in data:
            entries[name].chunks.append(ChunkStorageMetadata(offset, torch.Size(chunk.size)))
            data[index] = place
    return pickle.dumps(Metadata(entries, planner_data=paths, storage_data=data, storage_meta=StorageMeta()))
