"""Digests of live tensors, in bounded memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from nxd_ckpt.formats.crc32 import BLOCK, block_crcs, combine_blocks, crc32
from nxd_ckpt.formats.memory import allocated, byte_view, copy_values
from nxd_ckpt.formats.tensors import dtype_name
from nxd_ckpt.live.torch_xla import to_cpu
from nxd_ckpt.tag.reading import LeafReader

SMALL = 2**16
"""Bytes of a tensor that takes no time: even on a device it is always compared."""

_AT_ONCE = 2**20
"""Bytes of a tensor on the host whose digest takes less time than handing it to another thread."""

_TOGETHER = 64 * 2**20
"""Bytes of tensors that come from a device in one transfer."""


class _Tensor(NamedTuple):
    """A tensor, and the digest of each of its blocks; ``take`` gets that of all of them."""

    nbytes: int
    crcs: list[int]
    take: Callable[[int], None]


class LiveDigests:
    """Digests of the row-major bytes of tensors, on the host and on devices.

    They are computed on the threads of ``reader``. Of tensors on a device only small ones are, unless ``everything``
    is to be compared: each costs a transfer.
    """

    def __init__(self, reader: LeafReader, everything: bool) -> None:
        self._reader, self._everything = reader, everything
        self._tensors: list[_Tensor] = []
        self._blocks: list[tuple[list[int], int, memoryview]] = []
        self._blocks_nbytes = 0
        self._on_device: list[tuple[_Tensor, torch.Tensor]] = []
        self._on_device_nbytes = 0

    def add(self, name: str, tensor: torch.Tensor, take: Callable[[int], None]) -> None:
        """Call ``take``, by the time that `finish` returns, with the CRC-32 of a tensor that is no DTensor."""
        nbytes = tensor.nbytes
        if not tensor.is_cpu:
            if self._everything or nbytes <= SMALL:
                self._add_on_device(_Tensor(nbytes, [], take), tensor)
        elif not _is_dense(tensor):
            item = self._added(_Tensor(nbytes, [], take))
            self._reader.call(name, partial(_digest_copy, item.crcs, tensor.detach()))
        else:
            self._add_blocks(name, self._added(_Tensor(nbytes, [0] * -(-nbytes // BLOCK), take)), byte_view(tensor))

    def finish(self) -> None:
        """Compute all digests, and hand them over."""
        self._transfer()
        self._compute("the last tensors")
        self._reader.finish()
        tensors, self._tensors = self._tensors, []
        for item in tensors:
            item.take(combine_blocks(item.crcs, item.nbytes))

    def _added(self, item: _Tensor) -> _Tensor:
        self._tensors.append(item)
        return item

    def _add_blocks(self, name: str, item: _Tensor, memory: memoryview) -> None:
        for number in range(len(item.crcs)):
            block = memory[number * BLOCK : (number + 1) * BLOCK]
            self._blocks.append((item.crcs, number, block))
            self._blocks_nbytes += len(block)
            if self._blocks_nbytes >= BLOCK:
                self._compute(name)

    def _compute(self, name: str) -> None:
        blocks, self._blocks, self._blocks_nbytes = self._blocks, [], 0
        if blocks:
            self._reader.call(name, partial(_digest, blocks))

    def _add_on_device(self, item: _Tensor, tensor: torch.Tensor) -> None:
        if self._on_device_nbytes + item.nbytes > _TOGETHER:
            self._transfer()
        self._on_device.append((self._added(item), tensor))
        self._on_device_nbytes += item.nbytes

    def _transfer(self) -> None:
        waiting, self._on_device, self._on_device_nbytes = self._on_device, [], 0
        for (item, _), value in zip(waiting, to_cpu([tensor.detach() for _, tensor in waiting]), strict=True):
            _digest_copy(item.crcs, value)


def digest_at_once(tensor: torch.Tensor) -> int | None:
    """Return the CRC-32 of a tensor on the host; None for one that another thread should read, or that is not dense."""
    nbytes = tensor.nbytes
    if nbytes > _AT_ONCE or not tensor.is_cpu or not _is_dense(tensor):
        return None
    # Half of a small tensor's time would be to make a view that keeps it alive.
    return crc32((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor on the host has its row-major bytes."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _digest(blocks: list[tuple[list[int], int, memoryview]]) -> None:
    for crcs, number, block in blocks:
        crcs[number] = crc32(block)


def _digest_copy(crcs: list[int], tensor: torch.Tensor) -> None:
    dense = allocated(tuple(tensor.shape), dtype_name(tensor.dtype))
    copy_values(dense, tensor)
    crcs += block_crcs(byte_view(dense)) or [0]
