"""Readers of quantized weights, which give the plain numbers: computed in parts of a few MiB, see `quantization`.

Weights have 8 bits (FP8) or 4 (MXFP4), and their blocks a scale each. Of MXFP4 32 numbers share a scale: a power of two
with a bias of 127. A number has one bit of sign, two of exponent and one of mantissa. A byte holds two numbers, the
first one in its low half.

Sources: the OCP Microscaling Formats (MX) specification; huggingface/transformers v4.57,
``src/transformers/integrations/mxfp4.py`` (``convert_moe_packed_tensors``), and v5.24,
``src/transformers/integrations/finegrained_fp8.py`` (``Fp8Dequantize``); deepseek-ai/DeepSeek-V3,
``inference/kernel.py`` (``weight_dequant``), by which blocks at the lower and right edge are cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Generic, NamedTuple, TypeVar

import torch

from nxd_ckpt.formats.memory import allocated, byte_view, torch_dtype
from nxd_ckpt.formats.tensors import itemsize
from nxd_ckpt.layouts.quantization import (
    GROUP,
    GROUP_NBYTES,
    MXFP4_DTYPE,
    BlockGrid,
    Fp8Weight,
    Mxfp4Weight,
    QuantizedWeight,
)
from nxd_ckpt.storage.base import Reader


def segments_of(
    grid: BlockGrid, starts: torch.Tensor, stops: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut runs ``start <= index < stop`` of the flattened tensor into segments that are in one block each.

    Runs are int64 tensors, and none is empty. Returns the place of each segment's scale among the flattened scales,
    and the segment's length, run after run.
    """
    height, width = grid.shape[-2:]
    down, across = grid.counts
    first, last = (_segment_at(grid, places) for places in (starts, stops - 1))
    counts = last - first + 1
    skipped = counts.cumsum(0) - counts
    segments = torch.arange(int(counts.sum())) + (first - skipped).repeat_interleave(counts)
    row = segments // across
    column = segments - row * across
    begins = torch.maximum(row * width + column * grid.columns, starts.repeat_interleave(counts))
    ends = row * width + ((column + 1) * grid.columns).clamp(max=width)
    lengths = torch.minimum(ends, stops.repeat_interleave(counts)) - begins
    matrix = row // height
    row = row % height
    return (matrix * down + row // grid.rows) * across + column, lengths


def _segment_at(grid: BlockGrid, places: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the segments, each a row of a block, that hold these elements."""
    width = grid.shape[-1]
    row = places // width
    return row * grid.counts[1] + (places - row * width) // grid.columns


def dequantized_fp8(
    numbers: torch.Tensor, scales: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``numbers`` (FP8) times the scale of the segment that each is in, as ``dtype``.

    Args:
        numbers: numbers of one dimension, segment after segment.
        scales: scales of the segments, float32.
        lengths: numbers in each segment, int64.
        dtype: dtype of the result.
    """
    values = _values(numbers.dtype).index_select(0, numbers.view(torch.uint8).int())  # faster than float()
    if bool((lengths == lengths[0]).all()):
        values.view(len(lengths), -1).mul_(scales.unsqueeze(1))
    else:
        values.mul_(scales.repeat_interleave(lengths))
    return values.to(dtype)


@cache
def _values(dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 value of each byte of an FP8 dtype."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], 1)
"""The two numbers in each byte, by byte."""


def dequantized_mxfp4(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``numbers``, uint8 (groups, 16), times their ``scales``, uint8 (groups,), as bfloat16 (groups, 32)."""
    values = _PAIRS[numbers.int()].flatten(1)
    return torch.ldexp(values, scales.int().unsqueeze(1) - _BIAS).bfloat16()


def reader_of(weight: QuantizedWeight, numbers: Reader, scales: Reader) -> Reader:
    """Return a reader of the plain numbers of ``weight``, by readers of its two parts, which it closes."""
    if isinstance(weight, Fp8Weight):
        return _Fp8Reader(weight, numbers, scales)
    return _Mxfp4Reader(weight, numbers, scales)


_WeightT = TypeVar("_WeightT")


class _PartsReader(Generic[_WeightT]):
    """Base class of readers of a weight's plain numbers: it keeps and closes the readers of the two parts."""

    def __init__(self, weight: _WeightT, numbers: Reader, scales: Reader) -> None:
        self._weight = weight
        self._numbers = numbers
        self._scales = scales

    def close(self) -> None:
        self._numbers.close()
        self._scales.close()


_ELEMENTS = 2**20
"""Numbers that are dequantized at once: with scales and results about 15 MiB."""


class _Run(NamedTuple):
    """Elements ``start`` to before ``stop`` of a weight; their bytes from ``skipped`` on go to ``memory``."""

    start: int
    stop: int
    skipped: int
    memory: memoryview


class _Fp8Reader(_PartsReader[Fp8Weight]):
    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        group: list[_Run] = []
        count = 0
        for run in self._runs(ranges):
            length = run.stop - run.start
            if group and count + length > _ELEMENTS:
                self._read(group)
                group = []
                count = 0
            group.append(run)
            count += length
        if group:
            self._read(group)

    def _runs(self, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[_Run]:
        """Yield the ranges as runs of at most `_ELEMENTS`."""
        size = itemsize(self._weight.dtype)
        for offset, memory in ranges:
            end = offset + len(memory)
            for start in range(offset // size, -(-end // size), _ELEMENTS):
                stop = min(start + _ELEMENTS, -(-end // size))
                begin = max(offset, start * size)
                yield _Run(start, stop, begin - start * size, memory[begin - offset : min(end, stop * size) - offset])

    def _read(self, runs: Sequence[_Run]) -> None:
        weight = self._weight
        size = itemsize(self._weight.dtype)
        starts, stops = (torch.tensor([run[at] for run in runs]) for at in (0, 1))
        numbers = allocated((int((stops - starts).sum()),), weight.numbers.dtype)
        memory = byte_view(numbers)
        at = 0
        parts = []
        for run in runs:
            length = run.stop - run.start
            parts.append((weight.numbers.offset + run.start, memory[at : at + length]))
            at += length
        self._numbers.read_ranges(parts)
        places, lengths = segments_of(weight.grid, starts, stops)
        plain = byte_view(dequantized_fp8(numbers, self._factors[places], lengths, torch_dtype(weight.dtype)))
        at = 0
        for run in runs:
            begin = at * size + run.skipped
            run.memory[:] = plain[begin : begin + len(run.memory)]
            at += run.stop - run.start

    @cached_property
    def _factors(self) -> torch.Tensor:
        stub = self._weight.scales
        scales = allocated((stub.numel,), stub.dtype)
        self._scales.read_ranges([(stub.offset, byte_view(scales))])
        return scales.float()


_GROUPS = 2**15
"""Groups that are dequantized at once: some MiB."""


class _Mxfp4Reader(_PartsReader[Mxfp4Weight]):
    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        size = GROUP * itemsize(MXFP4_DTYPE)
        for offset, memory in ranges:
            end = offset + len(memory)
            for first in range(offset // size, -(-end // size), _GROUPS):
                last = min(first + _GROUPS, -(-end // size))
                begin = max(offset, first * size)
                stop = min(end, last * size)
                numbers = self._dequantized(first, last)
                memory[begin - offset : stop - offset] = numbers[begin - first * size : stop - first * size]

    def _dequantized(self, first: int, last: int) -> memoryview:
        """Return the numbers of the groups from ``first`` to before ``last``."""
        blocks = torch.empty((last - first, GROUP_NBYTES), dtype=torch.uint8)
        scales = torch.empty(last - first, dtype=torch.uint8)
        self._numbers.read_ranges([(self._weight.numbers.offset + first * GROUP_NBYTES, byte_view(blocks))])
        self._scales.read_ranges([(self._weight.scales.offset + first, byte_view(scales))])
        return byte_view(dequantized_mxfp4(blocks, scales))
