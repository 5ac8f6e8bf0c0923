"""Tensors of torch zip files, read one by one, directly into their memory, and verified by the digests in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.crc32 import BLOCK, crc32
from nxd_ckpt.formats.memory import allocated, byte_view, strided
from nxd_ckpt.formats.strides import stored_stride
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.formats.torch_zip import check_digest

PreadInto = Callable[[int, memoryview], None]
"""(offset, memory) -> None: fill ``memory`` with the file's bytes from ``offset``, or raise."""


def read_tensor(pread_into: PreadInto, stub: TensorStub) -> torch.Tensor:
    """Read the tensor of ``stub`` into a new contiguous CPU tensor. Raises DigestMismatch like `read_into`."""
    tensor = allocated(stub.shape, stub.dtype)
    read_into(pread_into, stub, tensor)
    return tensor


def read_strided(pread_into: PreadInto, stub: TensorStub) -> torch.Tensor:
    """Do the same, in memory of the stride that the tensor had when it was saved."""
    return strided(read_tensor(pread_into, stub), stored_stride(stub))


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
    check_digest(crc, storage.crc32, stub.file, storage.record)


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
