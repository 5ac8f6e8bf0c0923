"""Files laid out before their tensors are there: read by everyone, covered to the last byte."""

import argparse
import io
import shutil
import subprocess
import zipfile
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given

from nxd_ckpt.errors import UnsafePickle, UnsupportedState
from nxd_ckpt.formats import zip_directory
from nxd_ckpt.formats.crc32 import crc32
from nxd_ckpt.formats.memory import byte_view
from nxd_ckpt.formats.tensors import TensorStub, iter_tensors
from nxd_ckpt.formats.torch_zip import read_directory, read_tree
from nxd_ckpt.formats.torch_zip_writer import ZipImage, image_of
from tests.formats.helpers import comparable, literals_of, loaded, pread_of, rendered, saved, trees

pytestmark = pytest.mark.both


def pread_sparse(image: ZipImage) -> Callable[[int, int], bytes]:
    """Reads of an image's file whose tensors are all zeros, with wrong digests, without making them."""
    literals = literals_of(image, [1] * len(image.storages))
    offsets = [offset for offset, _ in literals]

    def pread(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        for begin, literal in literals[max(0, bisect_right(offsets, offset) - 1) :]:
            if begin >= offset + nbytes:
                break
            low, high = max(begin, offset), min(begin + len(literal), offset + nbytes)
            if low < high:
                data[low - offset : high - offset] = literal[low - begin : high - begin]
        return bytes(data)

    return pread


@given(trees())
def test_written_files_are_read_bit_for_bit(tree: Any) -> None:
    """What is written is read by torch.load and by us as it was; zip tools find every digest right."""
    data = rendered(image_of(tree))
    expected = comparable(tree)
    assert expected == comparable(torch.load(io.BytesIO(data), weights_only=False))
    assert expected == comparable(loaded(data))
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None


def test_every_reader_accepts_a_file(tmp_path: Path) -> None:
    """torch.load safe, unsafe and memory-mapped, and the unzip command."""
    tree = {
        "large": torch.randn(200, 300),
        "bf16": torch.randn(7).bfloat16(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "step": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "betas": (0.9, 0.95),
    }
    path = tmp_path / "file.pt"
    path.write_bytes(rendered(image_of(tree)))
    for options in ({"weights_only": True}, {"weights_only": False}, {"mmap": True}):
        assert comparable(tree) == comparable(torch.load(path, **cast(Any, options)))
    if shutil.which("unzip"):
        assert 0 == subprocess.run(["unzip", "-tq", str(path)], check=False, capture_output=True).returncode


def test_tensors_lie_where_direct_io_and_mmap_want_them() -> None:
    """Records of 64 KiB and more begin at multiples of 4,096 bytes, others at multiples of 64."""
    sizes = [1, 65535, 65536, 3, 100_000, 0, 64]
    storages = image_of([torch.zeros(size, dtype=torch.uint8) for size in sizes]).storages
    assert sizes == [storage.nbytes for storage in storages]
    assert [0] * 7 == [s.offset % (4096 if s.nbytes >= 65536 else 64) for s in storages]
    assert sorted(s.offset for s in storages) == [s.offset for s in storages]


def test_ties_are_stored_once() -> None:
    """Tensors with one key share a record; equal ones without it do not; the default key is identity."""
    weight = torch.arange(4.0)
    alias = weight.view(4)
    tree = {"a": weight, "b": weight, "c": alias}
    assert 2 == len(image_of(tree).storages)
    by_memory = image_of(tree, tensor_key=lambda tensor: tensor.data_ptr())
    assert 1 == len(by_memory.storages)
    found = torch.load(io.BytesIO(rendered(by_memory)))
    assert found["a"].data_ptr() == found["b"].data_ptr() == found["c"].data_ptr()
    assert comparable(tree) == comparable(found)


def test_one_key_for_other_shapes_does_not_share() -> None:
    """A view of other shape with the same key has its own, tight record."""
    weight = torch.arange(4.0)
    image = image_of([weight, weight[:2]], tensor_key=lambda tensor: tensor.data_ptr())
    assert [16, 8] == [storage.nbytes for storage in image.storages]


def test_parameters_become_plain_tensors() -> None:
    found = torch.load(io.BytesIO(rendered(image_of({"w": torch.nn.Parameter(torch.ones(2))}))))
    assert (torch.Tensor, False) == (type(found["w"]), found["w"].requires_grad)


def test_loaded_tensors_share_no_hooks() -> None:
    """A hook registered on one loaded tensor is not on its neighbour."""
    a, b = torch.load(io.BytesIO(rendered(image_of([torch.ones(1), torch.ones(1)]))))
    a.requires_grad_().register_hook(lambda grad: grad * 2)
    b.requires_grad_().sum().backward()
    assert 1 == b.grad.item()


def test_tensors_anywhere_in_an_object_are_placed() -> None:
    """User content may hold tensors in namespaces; a file may hold none at all."""
    tree = {"args": argparse.Namespace(mean=torch.ones(3)), "epoch": 3}
    assert comparable(tree) == comparable(loaded(rendered(image_of(tree))))
    assert {"epoch": 3} == loaded(rendered(image_of({"epoch": 3})))
    assert [] == image_of({"epoch": 3}).storages


def test_stubs_are_written_like_tensors() -> None:
    """A file's structure can be written to another file, tensors following later."""
    source = saved({"w": torch.arange(6).view(2, 3).t(), "f8": torch.ones(3).to(torch.float8_e5m2)})
    tree = read_tree(pread_of(source), len(source), "file.pt")
    image = image_of(tree)
    assert [TensorStub, TensorStub] == [type(tensor) for tensor in image.tensors]
    copy = read_tree(pread_sparse(image), image.nbytes, "copy.pt")
    assert [(48, (3, 2), (2, 1)), (3, (3,), (1,))] == [
        (stub.nbytes, stub.shape, stub.stride) for _, stub in iter_tensors(copy)
    ]


@pytest.mark.parametrize(
    "sizes",
    [[2**32 - 2, 5], [2**32 - 1, 5], [2**32, 5], [2**33 + 1, 2**20, 7], [2**31, 2**31, 2**31, 9]],
    ids=["just below", "at the mark", "4 GiB", "8 GiB", "offsets only"],
)
def test_files_past_4_gib_keep_their_layout(sizes: list[int]) -> None:
    """Sizes and offsets of more than 32 bits are found again by our reader and by zipfile."""
    image = image_of([torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes])
    pread = pread_sparse(image)
    records = read_directory(pread, image.nbytes, "file.pt")
    names = [f"data/{number}" for number in range(len(sizes))]
    found = [(records[name].offset, records[name].nbytes) for name in names]
    assert [(storage.offset, storage.nbytes) for storage in image.storages] == found
    assert sizes == [stub.nbytes for _, stub in iter_tensors(read_tree(pread, image.nbytes, "file.pt"))]
    infos = {info.filename: info for info in zipfile.ZipFile(SparseFile(pread, image.nbytes)).infolist()}
    assert sizes == [infos[f"archive/{name}"].file_size for name in names]


class SparseFile(io.RawIOBase):
    """A seekable file over a pread."""

    def __init__(self, pread: Callable[[int, int], bytes], size: int) -> None:
        self._pread, self._size, self._at = pread, size, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = self._size - self._at if size < 0 else min(size, self._size - self._at)
        data = self._pread(self._at, size)
        self._at += size
        return data


@pytest.mark.once
def test_more_records_than_16_bits_count_are_read_by_torch() -> None:
    """torch.load understands the 64-bit end mark that a file of more than 65,535 records gets."""
    image = image_of({"t": torch.ones(2)})
    records = list(image._records)
    contents = [bytes(byte_view(image.tensors[0])), *image._contents]
    for index in range(66_000):
        records.append(zip_directory.place(f"archive/{index}", 0, records[-1].end, 64))
    contents += [b""] * 66_000
    crcs = [crc32(content) for content in contents]
    parts = map(zip_directory.local_header, records, crcs)
    data = b"".join(header + content for header, content in zip(parts, contents, strict=True))
    directory = zip_directory.directory(records, crcs)
    assert zip_directory.directory_nbytes(records) == len(directory)
    assert [1, 1] == torch.load(io.BytesIO(data + directory))["t"].tolist()
    size = len(data) + len(directory)
    assert 66_004 == len(read_directory(pread_of(data + directory), size, "file.pt"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    ],
    ids=["coo", "csr", "nested"],
)
@pytest.mark.filterwarnings("ignore")
def test_unusual_tensors_are_refused(make: Callable[[], torch.Tensor]) -> None:
    """What is not one block of bytes is refused by kind, before anything is written."""
    with pytest.raises(UnsupportedState, match="layout"):
        image_of({"t": make()})


def test_what_cannot_be_pickled_is_named() -> None:
    """A lambda or an open file in the state is our error, with the cause."""
    with pytest.raises(UnsafePickle, match="lambda"):
        image_of({"f": lambda: 0})
