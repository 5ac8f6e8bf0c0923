"""Readers of quantized weights, which give the plain numbers: computed in parts of a few MiB, see `quantization`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch

from nxd_ckpt.formats.block_grid import GROUP, GROUP_NBYTES
from nxd_ckpt.formats.low_precision import dequantized_fp8, dequantized_mxfp4, segments_of
from nxd_ckpt.formats.memory import allocated, byte_view, torch_dtype
from nxd_ckpt.formats.tensors import itemsize
from nxd_ckpt.storage.base import Reader
from nxd_ckpt.tag.foreign.quantization import MXFP4_DTYPE, Fp8Weight, Mxfp4Weight, QuantizedWeight


def reader_of(weight: QuantizedWeight, numbers: Reader, scales: Reader) -> Reader:
    """Return a reader of the plain numbers of ``weight``, by readers of its two parts, which it closes."""
    if isinstance(weight, Fp8Weight):
        return _Fp8Reader(weight, numbers, scales)
    return _Mxfp4Reader(weight, numbers, scales)


_WeightT = TypeVar("_WeightT")


class _PartsReader(Generic[_WeightT]):
    """Base class of readers of a weight's plain numbers: it keeps and closes the readers of the two parts."""

    def __init__(self, weight: _WeightT, numbers: Reader, scales: Reader) -> None:
        self._weight, self._numbers, self._scales = weight, numbers, scales

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
                group, count = [], 0
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
        weight, size = self._weight, itemsize(self._weight.dtype)
        starts, stops = (torch.tensor([run[at] for run in runs]) for at in (0, 1))
        numbers = allocated((int((stops - starts).sum()),), weight.numbers.dtype)
        memory, at, parts = byte_view(numbers), 0, []
        for run in runs:
            length = run.stop - run.start
            parts.append((weight.numbers.offset + run.start, memory[at : at + length]))
            at += length
        self._numbers.read_ranges(parts)
        rounded = torch_dtype(weight.scales.dtype) if weight.rounds else torch.float32
        places, lengths = segments_of(weight.grid, starts, stops)
        plain = byte_view(dequantized_fp8(numbers, self._factors[places], lengths, torch_dtype(weight.dtype), rounded))
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
                begin, stop = max(offset, first * size), min(end, last * size)
                numbers = self._dequantized(first, last)
                memory[begin - offset : stop - offset] = numbers[begin - first * size : stop - first * size]

    def _dequantized(self, first: int, last: int) -> memoryview:
        """Return the numbers of the groups from ``first`` to before ``last``."""
        blocks = torch.empty((last - first, GROUP_NBYTES), dtype=torch.uint8)
        scales = torch.empty(last - first, dtype=torch.uint8)
        self._numbers.read_ranges([(self._weight.numbers.offset + first * GROUP_NBYTES, byte_view(blocks))])
        self._scales.read_ranges([(self._weight.scales.offset + first, byte_view(scales))])
        return byte_view(dequantized_mxfp4(blocks, scales))
