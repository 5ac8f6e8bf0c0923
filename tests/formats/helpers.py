"""What the tests of formats share: files in memory, comparable trees, and random ones."""

import io
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from nxd_ckpt.formats.crc32 import block_crcs, crc32
from nxd_ckpt.formats.image import Image
from nxd_ckpt.formats.memory import byte_view
from nxd_ckpt.formats.stored_tensors import read_tensor
from nxd_ckpt.formats.tensors import dtype_name, map_tensors
from nxd_ckpt.formats.torch_zip import read_tree


def pread_of(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, nbytes: data[offset : offset + nbytes]


def pread_into_of(data: bytes) -> Callable[[int, memoryview], None]:
    def pread_into(offset: int, memory: memoryview) -> None:
        memory[:] = data[offset : offset + len(memory)]

    return pread_into


def saved(tree: Any, **options: Any) -> bytes:
    """The file that torch.save writes."""
    file = io.BytesIO()
    torch.save(tree, file, **options)
    return file.getvalue()


def rendered(image: Image) -> bytes:
    """The file of an image whose tensors are on the CPU. Every byte is written exactly once."""
    data, written = bytearray(image.nbytes), bytearray(image.nbytes)
    contents = [tight_bytes(tensor) for tensor in image.tensors]
    crcs = list(map(crc32, contents))
    parts = [(storage.offset, content) for storage, content in zip(image.storages, contents, strict=True)]
    blocks = [block_crcs(memoryview(content)) for content in contents]
    for offset, part in [*parts, *literals_of(image, crcs), (0, image.head(blocks))]:
        place = slice(offset, offset + len(part))
        data[place], written[place] = part, bytes(byte + 1 for byte in written[place])
    assert written == b"\x01" * image.nbytes
    return bytes(data)


def literals_of(image: Image, crcs: list[int]) -> list[tuple[int, bytes]]:
    """(offset, bytes) of everything in an image's file that is neither a tensor nor its head, by offset."""
    headers = [image.header(index, crcs) for index in range(len(crcs))]
    return [*headers, (image.tensor_nbytes, image.tail(crcs))]


def loaded(data: bytes) -> Any:
    """What our reader makes of a file, tensors included."""
    tree = read_tree(pread_of(data), len(data), "file.pt")
    return map_tensors(tree, lambda stub: read_tensor(pread_into_of(data), stub))


def torch_file(pickled: bytes, **records: bytes) -> bytes:
    """A torch zip file around a pickle, and storages by key."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, content in records.items():
            archive.writestr(f"archive/data/{key}", content)
    return file.getvalue()


def tight_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(byte_view(tensor.detach().contiguous()))


def comparable(tree: Any) -> Any:
    """``tree`` with (dtype, shape, bytes) for its tensors: equal only if bit for bit the same, NaN included."""
    return map_tensors(tree, lambda t: (dtype_name(t.dtype), tuple(t.shape), tight_bytes(t)))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16,
    torch.uint32, torch.uint64,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any dtype and shape (0-dim and empty ones too), some of them views with holes."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    raw = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    tensor = torch.empty(shape, dtype=dtype)
    byte_view(tensor)[:] = raw
    view = draw(st.sampled_from(["whole", "transposed", "strided", "tail"]))
    if view == "transposed" and tensor.dim() >= 2:
        return tensor.transpose(0, 1)
    if view == "strided" and tensor.dim() >= 1:
        return tensor[::2]
    if view == "tail" and tensor.dim() >= 1:
        return tensor[1:]
    return tensor


def trees() -> st.SearchStrategy[Any]:
    """Nested dicts, lists and tuples of tensors and plain values."""
    keys = st.text(max_size=4) | st.integers(0, 5)
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
    leaves = tensors() | scalars | st.binary(max_size=4)
    return st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(keys, inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
        ),
        max_leaves=8,
    )
