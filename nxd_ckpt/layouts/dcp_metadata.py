"""Writing ``.metadata`` of a torch DCP directory as torch's writer pickles it, without importing torch's writer.

The import takes seconds, as long as a conversion of gigabytes. So classes with the same fields replace torch's
(``torch.distributed.checkpoint.metadata``), and are renamed in the pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.formats.memory import torch_dtype
from nxd_ckpt.formats.pickling import dumped


class _MemoryFormat:
    """Memory format of contiguous tensors."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (0,)


@dataclass
class _TensorProperties:
    dtype: torch.dtype

    def __getstate__(self) -> tuple[Any, ...]:
        return self.dtype, torch.strided, False, _MemoryFormat(), False


@dataclass
class _ChunkStorageMetadata:
    offsets: torch.Size
    sizes: torch.Size


@dataclass
class _TensorStorageMetadata:
    properties: _TensorProperties
    size: torch.Size
    chunks: list[_ChunkStorageMetadata]


@dataclass
class _BytesStorageMetadata:
    pass


@dataclass(frozen=True)
class _MetadataIndex:
    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(hash=False, compare=False, default=None)


@dataclass
class _StorageInfo:
    relative_path: str
    offset: int
    length: int


@dataclass
class _StorageMeta:
    checkpoint_id: str | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class _Metadata:
    state_dict_metadata: dict[str, Any]
    planner_data: dict[str, Any]
    storage_data: dict[_MetadataIndex, _StorageInfo]
    storage_meta: _StorageMeta
    version: str | None = None


_TORCHS = {
    kind: f"torch.distributed.checkpoint.{name}"
    for kind, name in {
        _MemoryFormat: "metadata _MEM_FORMAT_ENCODING",
        _TensorProperties: "metadata TensorProperties",
        _ChunkStorageMetadata: "metadata ChunkStorageMetadata",
        _TensorStorageMetadata: "metadata TensorStorageMetadata",
        _BytesStorageMetadata: "metadata BytesStorageMetadata",
        _MetadataIndex: "metadata MetadataIndex",
        _StorageInfo: "filesystem _StorageInfo",
        _StorageMeta: "metadata StorageMeta",
        _Metadata: "metadata Metadata",
    }.items()
}


def dump_metadata(chunks: Iterable[DcpChunk]) -> bytes:
    """Return the metadata of a directory of these chunks.

    Values of one name are equal on all ranks; the first counts.
    """
    entries: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    data: dict[_MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        name = chunk.name
        place = _StorageInfo(chunk.file, chunk.start, chunk.nbytes)
        paths.setdefault(name, chunk.path)
        if chunk.dtype is None:
            entries.setdefault(name, _BytesStorageMetadata())
            data.setdefault(_MetadataIndex(name), place)
            continue
        if name not in entries:
            properties = _TensorProperties(torch_dtype(chunk.dtype))
            entries[name] = _TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
        offset = torch.Size(chunk.offset)
        index = _MetadataIndex(name, offset, len(entries[name].chunks))
        if index not in data:
            entries[name].chunks.append(_ChunkStorageMetadata(offset, torch.Size(chunk.size)))
            data[index] = place
    return dumped(_Metadata(entries, paths, data, _StorageMeta()), _TORCHS)
