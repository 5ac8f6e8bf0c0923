"""Reader of torch zip files, as ``torch.save`` writes them, from any storage, without executing their pickle.

The structure is read first, as a tree of `TensorStub`. Tensors are then read one by one, directly into their memory,
and verified by the digests in the container.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nxd_ckpt.core import limits
from nxd_ckpt.core.limits import check_count, shown
from nxd_ckpt.core.parsing import parsing
from nxd_ckpt.errors import DigestMismatch, InvalidArgument, UnsupportedState
from nxd_ckpt.formats.crc32 import BLOCK, crc32
from nxd_ckpt.formats.tensors import (
    StorageSpan,
    TensorStub,
    allocated,
    byte_view,
)
from nxd_ckpt.formats.unpickle import Leaf, unpickle
from nxd_ckpt.formats.zip_directory import Pread, Record, malformed, read_records, remembering

PreadInto = Callable[[int, memoryview], None]
"""(offset, memory) -> None: fill ``memory`` with the file's bytes from ``offset``, or raise."""

_SMALL_FILE = 256 * 2**10
_BYTE_ORDER = 16


def read_directory(pread: Pread, size: int, file: str, begins: Sequence[int] = ()) -> dict[str, Record]:
    """Return the records of a torch zip file of ``size`` bytes, by name within the archive ("data.pkl", "data/0").

    ``file`` names it in errors; ``begins`` goes to `read_records`. Raises MalformedFile.
    """
    records = read_records(pread, size, file, begins)
    archives, directory = set[str](), dict[str, Record]()
    for record in records:
        archive, _, name = record.name.partition("/")
        archives.add(archive)
        directory[name] = record
    if len(archives) != 1 or "data.pkl" not in directory:
        raise malformed(file, f"expected one archive with a data.pkl, found {sorted(archives)[:5]}")
    return directory


def read_tree(
    pread: Pread,
    size: int,
    file: str,
    *,
    trust_pickle: bool = False,
    leaf: Leaf = lambda stub: stub,
    begins: Sequence[int] = (),
    dtensors: bool = False,
) -> Any:
    """Return the file's contents, with ``leaf(stub)`` (by default the TensorStub itself) for each tensor.

    ``file`` is the key in stubs; ``begins`` are known offsets of tensors (see `read_records`); ``dtensors`` goes to
    `unpickle`. With ``trust_pickle=True`` any class is unpickled; for objects with tensors inside, which no tree walk
    reaches, ``leaf`` must read them (`read_tensor`). Raises MalformedFile, DigestMismatch for a changed pickle,
    UnsafePickle, UnsupportedState for big-endian files.
    """
    with parsing(file, "a torch file"):
        if size <= _SMALL_FILE:
            pread = remembering(pread, 0, pread(0, size))
        directory = read_directory(pread, size, file, begins)
        order = directory.get("byteorder")
        if order is not None and _contents(pread, order, file, _BYTE_ORDER) != b"little":
            raise UnsupportedState(f"{file}: written on a big-endian machine; save it again on a little-endian one")
        storages = {
            name.removeprefix("data/"): StorageSpan(name, record.offset, record.nbytes, record.crc32)
            for name, record in directory.items()
            if name.startswith("data/")
        }
        pickled = _contents(pread, directory["data.pkl"], file, limits.PICKLE_NBYTES)
        return unpickle(pickled, file, storages, trust_pickle=trust_pickle, leaf=leaf, dtensors=dtensors)


def _contents(pread: Pread, record: Record, file: str, limit: int) -> bytes:
    check_count(record.nbytes, limit, f"{file}: bytes of its record {shown(record.name)}")
    data = pread(record.offset, record.nbytes)
    if len(data) != record.nbytes:
        raise malformed(file, f"record {record.name!r} has {len(data)} bytes, expected {record.nbytes}")
    _check(crc32(data), record.crc32, file, record.name)
    return data


def _check(actual: int, expected: int | None, file: str, record: str) -> None:
    if expected is not None and actual != expected:
        raise DigestMismatch(
            f"{file}, record {record!r}: expected CRC-32 {expected:08x}, found {actual:08x}. "
            "The bytes changed since they were written: restore the file, or load another tag"
        )


def read_tensor(pread_into: PreadInto, stub: TensorStub) -> torch.Tensor:
    """Read the tensor of ``stub`` into a new contiguous CPU tensor. Raises DigestMismatch like `read_into`."""
    tensor = allocated(stub.shape, stub.dtype)
    read_into(pread_into, stub, tensor)
    return tensor


def read_into(pread_into: PreadInto, stub: TensorStub, out: memoryview | torch.Tensor, verify: bool = True) -> None:
    """Fill ``out`` with the elements of the tensor of ``stub``, row-major.

    ``out`` is a contiguous CPU tensor or memory of ``stub.nbytes`` bytes. With ``verify`` the whole storage record that
    the tensor is a view of is read, in blocks of bounded memory, and compared with its CRC-32, if it has one. Raises
    DigestMismatch; the contents of ``out`` are undefined then.
    """
    memory = byte_view(out) if isinstance(out, torch.Tensor) else out.cast("B")
    if len(memory) != stub.nbytes:
        raise InvalidArgument(
            f"{stub.file}: memory of {len(memory)} bytes for a tensor {stub.dtype} {stub.shape}, "
            f"expected {stub.nbytes} bytes"
        )
    if stub.is_contiguous:
        _read_span(pread_into, stub, memory, verify)
        return
    elements = 1 + sum((n - 1) * step for n, step in zip(stub.shape, stub.stride, strict=True))
    span = allocated((elements,), stub.dtype)
    _read_span(pread_into, stub, byte_view(span), verify)
    tight = span.as_strided(stub.shape, stub.stride).contiguous()
    memory[:] = byte_view(tight)


def _read_span(pread_into: PreadInto, stub: TensorStub, memory: memoryview, verify: bool) -> None:
    """Fill ``memory`` from the tensor's first byte on, and verify the tensor's storage."""
    storage = stub.storage
    if not verify or storage.crc32 is None:
        pread_into(stub.offset, memory)
        return
    crc = 0
    for offset, block in _blocks(storage.offset, stub.offset, memory, storage.offset + storage.nbytes):
        pread_into(offset, block)
        crc = crc32(block, crc)
    _check(crc, storage.crc32, stub.file, storage.record)


def _blocks(begin: int, middle: int, memory: memoryview, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield blocks that cover [begin, end) of a file: ``memory`` from ``middle`` on, reused scratch around it."""
    after = middle + len(memory)
    outside = max(middle - begin, end - after)
    scratch = memoryview(bytearray(min(BLOCK, outside)))
    for offset in range(begin, middle, BLOCK):
        yield offset, scratch[: min(BLOCK, middle - offset)]
    for offset in range(0, len(memory), BLOCK):
        yield middle + offset, memory[offset : offset + BLOCK]
    for offset in range(after, end, BLOCK):
        yield offset, scratch[: min(BLOCK, end - offset)]
