"""Tensors of Hugging Face's files that were quantized to 4 bits (MXFP4), read in bfloat16.

==================  ===================================================================
``NAME_blocks``     uint8 (experts, out, groups, 16): the numbers, two in each byte
``NAME_scales``     uint8 (experts, out, groups): one for the 32 numbers of a group
``NAME``            what transformers makes of both: bfloat16 (experts, 32 groups, out)
==================  ===================================================================

Source: huggingface/transformers v4.57, ``src/transformers/integrations/mxfp4.py``. openai/gpt-oss has such files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.mxfp4 import GROUP, GROUP_NBYTES, dequantized
from nxd_ckpt.formats.tensors import StorageSpan, TensorStub, byte_view, itemsize
from nxd_ckpt.storage.base import Reader
from nxd_ckpt.tag.foreign.quantized import PartsReader

BLOCKS, SCALES = "_blocks", "_scales"
_DTYPE = "bfloat16"
_GROUPS = 2**15
"""Groups that are dequantized at once: some MiB."""


@dataclass(frozen=True)
class Mxfp4Weight:
    """The tensor ``name``. Raises MalformedFile if its two parts do not match."""

    name: str
    numbers: TensorStub
    scales: TensorStub

    def __post_init__(self) -> None:
        *rows, nbytes = self.numbers.shape or (0,)
        fits = len(rows) == 3 and nbytes == GROUP_NBYTES and self.scales.shape == tuple(rows)
        if not fits or {self.numbers.dtype, self.scales.dtype} != {"uint8"}:
            raise MalformedFile(
                f"{self.name}{BLOCKS} is {self.numbers.dtype} {self.numbers.shape} and {self.name}{SCALES} "
                f"{self.scales.dtype} {self.scales.shape}; expected MXFP4, uint8 (experts, out, groups, "
                f"{GROUP_NBYTES}) and uint8 (experts, out, groups). Make bfloat16 weights of "
                "other kinds with transformers, and save those"
            )

    def stub(self, file: str) -> TensorStub:
        """Return the stub of the dequantized tensor in ``file``, where experts and outputs come before inputs."""
        experts, out, groups, _ = self.numbers.shape
        inner = groups * GROUP
        nbytes = prod((experts, out, inner)) * itemsize(_DTYPE)
        span = StorageSpan(self.name, 0, nbytes, None)
        return TensorStub(file, 0, _DTYPE, (experts, inner, out), (out * inner, 1, inner), span)

    def reader(self, numbers: Reader, scales: Reader) -> Reader:
        return _Mxfp4Reader(self, numbers, scales)


class _Mxfp4Reader(PartsReader):
    def __init__(self, weight: Mxfp4Weight, numbers: Reader, scales: Reader) -> None:
        super().__init__(numbers, scales)
        self._weight = weight

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        size = GROUP * itemsize(_DTYPE)
        for offset, memory in ranges:
            end = offset + len(memory)
            for first in range(offset // size, -(-end // size), _GROUPS):
                last = min(first + _GROUPS, -(-end // size))
                begin, stop = max(offset, first * size), min(end, last * size)
                numbers = self._dequantized(first, last)
                memory[begin - offset : stop - offset] = numbers[begin - first * size : stop - first * size]

    def _dequantized(self, first: int, last: int) -> memoryview:
        """Return the numbers of the groups from ``first`` to before ``last``."""
        blocks = torch.empty((last - first, GROUP_NBYTES), dtype=torch.uint8)
        scales = torch.empty(last - first, dtype=torch.uint8)
        self.numbers.read_ranges([(self._weight.numbers.offset + first * GROUP_NBYTES, byte_view(blocks))])
        self.scales.read_ranges([(self._weight.scales.offset + first, byte_view(scales))])
        return byte_view(dequantized(blocks, scales))
