"""Digests of live tensors: computed by the threads that read, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from nxd_ckpt.formats.copying import copy_values
from nxd_ckpt.formats.crc32 import BLOCK, block_crcs, combine_blocks, crc32
from nxd_ckpt.formats.tensors import allocated, byte_view, dtype_name
from nxd_ckpt.live.dtensor import local_of
from nxd_ckpt.live.torch_xla import to_cpu
from nxd_ckpt.tag.reading import LeafReader

SMALL = 2**16
"""Bytes of a tensor on a device that is always compared: a transfer of many such takes no time."""

_TOGETHER = 64 * 2**20
"""Bytes of tensors that come from a device in one transfer."""

_AT_ONCE = 500
"""Maximum number of tiny tensors in one task."""


class _Tensor(NamedTuple):
    """A tensor, and the digest of each of its blocks; ``take`` gets that of all of them."""

    name: str
    nbytes: int
    crcs: list[int]
    take: Callable[[int], None]


class LiveDigests:
    """Digests of the row-major bytes of tensors, on the host and on devices, on the threads of ``reader``.

    Of those on a device only small ones, unless ``everything`` is to be compared: each costs a transfer.
    """

    def __init__(self, reader: LeafReader, everything: bool) -> None:
        self._reader, self._everything = reader, everything
        self._tensors: list[_Tensor] = []
        self._tiny: list[tuple[_Tensor, memoryview]] = []
        self._tiny_nbytes = 0
        self._on_device: list[tuple[_Tensor, torch.Tensor]] = []
        self._on_device_nbytes = 0

    def add(self, name: str, tensor: torch.Tensor, take: Callable[[int], None]) -> None:
        """Call ``take`` in `finish` with the CRC-32 of this rank's part of the tensor."""
        local = local_of(tensor).detach()
        item = _Tensor(name, local.nbytes, [], take)
        if local.device.type == "cpu":
            self._tensors.append(item)
            self._add_on_host(item, local)
        elif self._everything or item.nbytes <= SMALL:
            self._tensors.append(item)
            if self._on_device_nbytes + item.nbytes > _TOGETHER:
                self._transfer()
            self._on_device.append((item, local))
            self._on_device_nbytes += item.nbytes

    def finish(self) -> None:
        """Compute all digests, and hand them over in the order of the tensors."""
        self._transfer()
        self._compute_tiny()
        self._reader.finish()
        tensors, self._tensors = self._tensors, []
        for item in tensors:
            item.take(combine_blocks(item.crcs, item.nbytes))

    def _add_on_host(self, item: _Tensor, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            self._reader.call(item.name, partial(_digest_copy, item.crcs, tensor))
            return
        memory = byte_view(tensor)
        if item.nbytes <= BLOCK:
            item.crcs.append(0)
            self._tiny.append((item, memory))
            self._tiny_nbytes += item.nbytes
            if self._tiny_nbytes >= BLOCK or len(self._tiny) >= _AT_ONCE:
                self._compute_tiny()
            return
        item.crcs.extend([0] * -(-item.nbytes // BLOCK))
        for number in range(len(item.crcs)):
            block = memory[number * BLOCK : (number + 1) * BLOCK]
            self._reader.call(item.name, partial(_digest, item.crcs, number, block))

    def _compute_tiny(self) -> None:
        tiny, self._tiny, self._tiny_nbytes = self._tiny, [], 0
        if tiny:
            self._reader.call(tiny[0][0].name, partial(_digest_each, tiny))

    def _transfer(self) -> None:
        waiting, self._on_device, self._on_device_nbytes = self._on_device, [], 0
        for (item, _), value in zip(waiting, to_cpu([tensor for _, tensor in waiting]), strict=True):
            _digest_copy(item.crcs, value)


def _digest(crcs: list[int], number: int, block: memoryview) -> None:
    crcs[number] = crc32(block)


def _digest_each(tiny: list[tuple[_Tensor, memoryview]]) -> None:
    for item, memory in tiny:
        item.crcs[0] = crc32(memory)


def _digest_copy(crcs: list[int], tensor: torch.Tensor) -> None:
    dense = allocated(tuple(tensor.shape), dtype_name(tensor.dtype))
    copy_values(dense, tensor)
    crcs += block_crcs(byte_view(dense)) or [0]
