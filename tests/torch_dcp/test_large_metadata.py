"""What torch DCP writes of large jobs is read, however many objects it has: it has bytes for each of them."""

import pickle
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nxd_ckpt.layouts import torch_dcp
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.torch_dcp import METADATA, DcpFiles, read_metadata
from nxd_ckpt.testing.storage import MemoryStorage

COUNT = 2000


def _tensor(*offsets: int) -> TensorStorageMetadata:
    """Of one element a chunk: nothing that is written of it could be shorter."""
    chunks = [ChunkStorageMetadata(torch.Size([offset]), torch.Size([1])) for offset in offsets]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([len(offsets)]), chunks)


def _values() -> Metadata:
    names = [f"k{index}" for index in range(COUNT)]
    places = {MetadataIndex(name): _StorageInfo("__0_0.distcp", 0, 1) for name in names}
    return Metadata({name: BytesStorageMetadata() for name in names}, {name: (name,) for name in names}, places)


def _tensors() -> Metadata:
    names = [f"k{index}" for index in range(COUNT)]
    places = {MetadataIndex(name, torch.Size([0]), 0): _StorageInfo("__0_0.distcp", 0, 1) for name in names}
    return Metadata({name: _tensor(0) for name in names}, {name: ("k", name) for name in names}, places)


def _chunks() -> Metadata:
    places = {
        MetadataIndex("k", torch.Size([index]), index): _StorageInfo("__0_0.distcp", 0, 1) for index in range(COUNT)
    }
    return Metadata({"k": _tensor(*range(COUNT))}, {"k": ("k",)}, places)


@pytest.mark.parametrize("metadata", [_values(), _tensors(), _chunks()], ids=["values", "tensors", "chunks"])
def test_metadata_may_have_any_number_of_entries(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes alone allow its objects, up to a few, so no number of entries is too large."""
    monkeypatch.setattr(torch_dcp, "_Machine", partial(torch_dcp._Machine, objects=100))
    storage = MemoryStorage("large metadata")
    storage.write("__0_0.distcp", b"x")
    storage.write(METADATA, pickle.dumps(metadata))
    found = read_metadata(TagFiles(storage, ""), DcpFiles())
    assert COUNT == sum(map(len, found.entries.values()))
