"""Reading torch zip files: everything in them, from few reads, and nothing that is not verified."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.errors import CheckpointError, DigestMismatch, InvalidArgument, MalformedFile, UnsupportedState
from nxd_ckpt.formats.crc32 import BLOCK
from nxd_ckpt.formats.stored_tensors import read_into, read_tensor
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.formats.torch_zip import read_directory, read_tree
from tests.formats.helpers import (
    DTYPES,
    comparable,
    loaded,
    pread_into_of,
    pread_of,
    saved,
    tight_bytes,
    torch_file,
    trees,
)

pytestmark = pytest.mark.both


@given(trees())
def test_what_torch_saved_is_read_bit_for_bit(tree: Any) -> None:
    """Structure, types and tensors of any file of torch.save come back: views, empty, 0-dim and NaN included."""
    assert comparable(tree) == comparable(loaded(saved(tree)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read(dtype: torch.dtype) -> None:
    """Dtypes with a legacy storage class and without one."""
    tensor = torch.arange(24).view(torch.uint8).clone().view(4, -1)
    tensor = (tensor & 1 if dtype is torch.bool else tensor).contiguous().view(dtype)
    assert comparable({"t": tensor}) == comparable(loaded(saved({"t": tensor})))


def test_every_golden_file_is_read_as_torch_reads_it(golden: Path) -> None:
    """All files that NxD wrote give, tensor by tensor and value by value, what torch.load gives."""
    checked = 0
    for file in sorted(golden.rglob("*.pt")):
        data = file.read_bytes()
        if b"torch_xla.utils.serialization" in data:
            continue  # torch.load needs torch-xla for these: test_xser reads them
        expected = torch.load(io.BytesIO(data), weights_only=True)
        assert comparable(expected) == comparable(loaded(data)), file
        checked += 1
    assert checked > 1000


def test_ties_share_their_record() -> None:
    """Tensors that share a storage in the file are stubs of one record."""
    base = torch.arange(10.0)
    tree = read_tree(pread_of(data := saved([base, base[4:]])), len(data), "file.pt")
    assert tree[0].storage == tree[1].storage
    assert 16 == tree[1].offset - tree[0].offset


def test_a_view_of_a_larger_storage_is_read_alone_and_verified_whole() -> None:
    """Only a tensor's own elements reach memory; the digest covers the storage around it."""
    base = torch.arange(4 * BLOCK, dtype=torch.uint8)
    view = base[BLOCK + 5 : 3 * BLOCK : 7]
    data = saved({"view": view})
    stub = read_tree(pread_of(data), len(data), "file.pt")["view"]
    assert comparable(view) == comparable(read_tensor(pread_into_of(data), stub))
    damaged = bytearray(data)
    damaged[stub.storage.offset] ^= 1  # outside the view
    unverified = torch.empty_like(view)
    read_into(pread_into_of(bytes(damaged)), stub, unverified, verify=False)
    assert comparable(view) == comparable(unverified)
    with pytest.raises(DigestMismatch, match=r"file\.pt, record 'data/0'"):
        read_tensor(pread_into_of(bytes(damaged)), stub)


def test_memory_is_filled_in_place() -> None:
    """read_into writes tight, row-major bytes to tensors and to plain memory, of exactly the right size."""
    tensor = torch.arange(6.0).view(2, 3).t()
    data = saved(tensor)
    stub = read_tree(pread_of(data), len(data), "file.pt")
    out, memory = torch.empty(3, 2), bytearray(24)
    read_into(pread_into_of(data), stub, out)
    read_into(pread_into_of(data), stub, memoryview(memory))
    assert tight_bytes(tensor) == tight_bytes(out) == bytes(memory)
    with pytest.raises(InvalidArgument, match="expected 24 bytes"):
        read_into(pread_into_of(data), stub, memoryview(bytearray(23)))


def test_reads_of_a_verified_tensor_are_bounded() -> None:
    """However large the storage, no single read asks for more than a block."""
    tensor = torch.arange(3 * BLOCK // 8 + 10)
    data = saved(tensor)
    sizes = []

    def pread_into(offset: int, memory: memoryview) -> None:
        sizes.append(len(memory))
        memory[:] = data[offset : offset + len(memory)]

    read_tensor(pread_into, read_tree(pread_of(data), len(data), "file.pt"))
    assert [BLOCK, BLOCK, BLOCK, 80] == sizes


@pytest.mark.once
@pytest.mark.parametrize(("tensors", "nbytes", "expected"), [(100, 40, 1), (2000, 4000, 60), (3, 10**6, 7)])
def test_the_structure_takes_few_reads(tensors: int, nbytes: int, expected: int) -> None:
    """A small file is one read; headers of small records share reads; a large record costs one more."""
    data = saved([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(tensors)])
    reads = []

    def pread(offset: int, size: int) -> bytes:
        reads.append(size)
        return data[offset : offset + size]

    assert tensors == len(list(iter_tensors(read_tree(pread, len(data), "file.pt"))))
    assert len(reads) <= expected
    assert sum(reads) <= len(data) + 2**17


def test_a_missing_digest_verifies_nothing() -> None:
    """A file whose writer left digests out (0) is read, and not called verified."""
    data = bytearray(saved(torch.arange(5.0)))
    record = read_directory(pread_of(bytes(data)), len(data), "f")["data/0"]
    digest = struct.pack("<I", record.crc32 or 0)
    data = data.replace(digest, bytes(4))
    stub = read_tree(pread_of(bytes(data)), len(data), "f")
    assert stub.storage.crc32 is None
    assert [0, 1, 2, 3, 4] == read_tensor(pread_into_of(bytes(data)), stub).tolist()


def test_a_changed_pickle_is_noticed() -> None:
    """data.pkl is held against its own digest before anything of it is read."""
    data = saved({"learning_rate": 1})
    with pytest.raises(DigestMismatch, match=r"data\.pkl"):
        loaded(data.replace(b"learning_rate", b"learning_rata"))


def test_big_endian_files_are_refused() -> None:
    data = saved(torch.ones(1))
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    with pytest.raises(UnsupportedState, match="big-endian"):
        loaded(file.getvalue())


def test_files_of_old_torch_say_how_to_save_again() -> None:
    with pytest.raises(MalformedFile, match=r"torch\.save\(torch\.load\(path\), path\)"):
        loaded(saved(torch.ones(1), _use_new_zipfile_serialization=False))


@pytest.mark.once
@given(st.data())
def test_a_flipped_byte_is_noticed_or_harmless(data: st.DataObject) -> None:
    """Damage anywhere raises our errors or changes nothing that is read (padding, dates)."""
    tree = {"a": torch.arange(40.0), "b": [1, 2]}
    damaged = bytearray(saved(tree))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = loaded(bytes(damaged))
    except CheckpointError:
        return
    assert comparable(tree) == comparable(found)


def compressed() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
    return file.getvalue()


def with_end(data: bytes, **changes: int) -> bytes:
    """``data`` with fields of its end mark changed."""
    names = ("disk", "first", "here", "count", "nbytes", "offset", "comment")
    at = data.rindex(b"PK\x05\x06") + 4
    fields = dict(zip(names, struct.unpack_from("<4H2IH", data, at), strict=True)) | changes
    return data[:at] + struct.pack("<4H2IH", *fields.values()) + data[at + 18 :]


def overlapping() -> bytes:
    """Two directory entries of one header (a record read as two)."""
    data = torch_file(b"\x80\x02N.", **{"0": b"x", "1": b"x"})
    first, second = (data.rindex(name) for name in (b"archive/data/0", b"archive/data/1"))
    return data[: second - 4] + data[first - 4 : first] + data[second:]


NONE = torch_file(b"\x80\x02N.")
MALFORMED = {
    "empty": (b"", "0 bytes"),
    "text": (b"<html>not found</html>", "an HTML page"),
    "zeros": (bytes(4096), "expected a torch zip file"),
    "bytes after the end": (NONE + b"x", "1 bytes follow"),
    "a prefix": (b"x" + NONE, "does not end where it should"),
    "no pickle": (torch_file(b"").replace(b"data.pkl", b"data.pkx"), r"data\.pkl"),
    "compressed": (compressed(), "compressed"),
    "a directory elsewhere": (with_end(NONE, offset=5), "does not end where it should"),
    "more entries than there are": (with_end(NONE, here=2, count=2), "breaks off after 1 of 2"),
    "fewer entries than there are": (with_end(NONE, here=0, count=0), "0 entries"),
    "several disks": (with_end(NONE, disk=1), "split archive"),
    "a header that says otherwise": (NONE.replace(b"archive/data.pkl", b"archive/data.pkx", 1), "differ"),
    "overlapping records": (overlapping(), "overlap|differ"),
    "a record twice": (torch_file(b"", **{"0": b"x", "1": b"x"}).replace(b"data/1", b"data/0"), "twice"),
}


@pytest.mark.parametrize(("data", "what"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files_are_named_with_what_is_wrong(data: bytes, what: str) -> None:
    with pytest.raises(MalformedFile, match=rf"(?s)file\.pt.*({what})"):
        loaded(data)
