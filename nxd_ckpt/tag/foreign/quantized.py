"""Tensors of Hugging Face's files that were quantized to 4 bits (MXFP4), read as if they were there in bfloat16.

==================  ===================================================================
``NAME_blocks``     uint8 (experts, out, groups, 16): the numbers, two in each byte
``NAME_scales``     uint8 (experts, out, groups): one for the 32 numbers of a group
``NAME``            what transformers makes of both: bfloat16 (experts, 32 groups, out)
==================  ===================================================================

Source: huggingface/transformers v4.57, ``src/transformers/integrations/mxfp4.py``. openai/gpt-oss has such files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import prod

import torch

from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.mxfp4 import GROUP, GROUP_NBYTES, dequantized
from nxd_ckpt.formats.tensors import StorageSpan, TensorStub, byte_view, itemsize
from nxd_ckpt.storage.base import Reader, Storage
from nxd_ckpt.storage.wrapper import StorageWrapper

BLOCKS, SCALES = "_blocks", "_scales"
_DTYPE = "bfloat16"
_GROUPS = 2**15
"""Groups that are dequantized at once: some MiB."""


def quantized_names(names: Collection[str]) -> set[str]:
    """Return the tensors that files with these ``names`` hold as numbers and scales."""
    stems = (name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS))
    return {stem for stem in stems if f"{stem}{SCALES}" in names}


@dataclass(frozen=True)
class Quantized:
    """The tensor ``name``. Raises MalformedFile if its two parts do not match."""

    name: str
    blocks: TensorStub
    scales: TensorStub

    def __post_init__(self) -> None:
        *rows, nbytes = self.blocks.shape or (0,)
        fits = len(rows) == 3 and nbytes == GROUP_NBYTES and self.scales.shape == tuple(rows)
        if not fits or {self.blocks.dtype, self.scales.dtype} != {"uint8"}:
            raise MalformedFile(
                f"{self.name}{BLOCKS} is {self.blocks.dtype} {self.blocks.shape} and {self.name}{SCALES} "
                f"{self.scales.dtype} {self.scales.shape}; expected MXFP4, uint8 (experts, out, groups, "
                f"{GROUP_NBYTES}) and uint8 (experts, out, groups). Make bfloat16 weights of "
                "other kinds with transformers, and save those"
            )

    def stub(self, file: str) -> TensorStub:
        """Return the stub of the dequantized tensor in ``file``, where experts and outputs come before inputs."""
        experts, out, groups, _ = self.blocks.shape
        inner = groups * GROUP
        nbytes = prod((experts, out, inner)) * itemsize(_DTYPE)
        span = StorageSpan(self.name, 0, nbytes, None)
        return TensorStub(file, 0, _DTYPE, (experts, inner, out), (out * inner, 1, inner), span)


class DequantizedStorage(StorageWrapper):
    """Storage that seems to hold a file of each added tensor, with its numbers in bfloat16."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._tensors: dict[str, tuple[Quantized, str, str]] = {}

    def add(self, key: str, blocks: str, scales: str, tensor: Quantized) -> None:
        """Register ``key`` as the file of ``tensor``, whose parts are in the files ``blocks`` and ``scales``."""
        self._tensors[key] = tensor, blocks, scales

    def open(self, key: str) -> Reader:
        return _Dequantizing(self.inner, *self._tensors[key]) if key in self._tensors else self.inner.open(key)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, buffer)])


class _Dequantizing:
    """Reader of one tensor's numbers as bytes of a file."""

    def __init__(self, storage: Storage, tensor: Quantized, blocks: str, scales: str) -> None:
        self._tensor = tensor
        self._blocks, self._scales = storage.open(blocks), storage.open(scales)

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        size = GROUP * itemsize(_DTYPE)
        for offset, memory in ranges:
            end = offset + len(memory)
            for first in range(offset // size, -(-end // size), _GROUPS):
                last = min(first + _GROUPS, -(-end // size))
                begin, stop = max(offset, first * size), min(end, last * size)
                numbers = self._numbers(first, last)
                memory[begin - offset : stop - offset] = numbers[begin - first * size : stop - first * size]

    def _numbers(self, first: int, last: int) -> memoryview:
        """Return the numbers of the groups from ``first`` to before ``last``."""
        blocks = torch.empty((last - first, GROUP_NBYTES), dtype=torch.uint8)
        scales = torch.empty(last - first, dtype=torch.uint8)
        self._blocks.read_ranges([(self._tensor.blocks.offset + first * GROUP_NBYTES, byte_view(blocks))])
        self._scales.read_ranges([(self._tensor.scales.offset + first, byte_view(scales))])
        return byte_view(dequantized(blocks, scales))

    def close(self) -> None:
        self._blocks.close()
        self._scales.close()
