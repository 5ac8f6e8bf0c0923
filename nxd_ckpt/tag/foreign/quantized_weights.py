"""Quantized tensors of Hugging Face's files, read as if they were there in plain numbers.

Each has two parts, numbers and scales. Its plain numbers seem to be the content of a file of its own, which is computed
where it is read, in parts of a few MiB.

FP8: ``NAME`` holds the numbers, and ``NAME_scale_inv`` or ``NAME_scale`` one scale for each block: a rectangle of each
matrix, a row, or the whole tensor. Numbers times scales are the plain tensor, of the same shape.

MXFP4, as openai/gpt-oss has it (source: huggingface/transformers v4.57, ``src/transformers/integrations/mxfp4.py``):

==================  ===================================================================
``NAME_blocks``     uint8 (experts, out, groups, 16): the numbers, two in each byte
``NAME_scales``     uint8 (experts, out, groups): one for the 32 numbers of a group
``NAME``            what transformers makes of both: bfloat16 (experts, 32 groups, out)
==================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.formats.low_precision import (
    GROUP,
    GROUP_NBYTES,
    NUMBERS,
    BlockGrid,
    dequantized_fp8,
    dequantized_mxfp4,
)
from nxd_ckpt.formats.tensors import (
    StorageSpan,
    TensorStub,
    allocated,
    byte_view,
    contiguous_stride,
    itemsize,
    torch_dtype,
)
from nxd_ckpt.storage.base import Reader, Storage
from nxd_ckpt.storage.wrapper import StorageWrapper


class PartsReader:
    """Base class of readers of plain numbers: it keeps and closes the readers of the two parts."""

    def __init__(self, numbers: Reader, scales: Reader) -> None:
        self.numbers, self.scales = numbers, scales

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.numbers.close()
        self.scales.close()


_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_SCALES_NBYTES = 16 * 2**20
"""Largest tensor of scales: a reader keeps it. With blocks of 128 x 128 it is that of 2**36 numbers or more."""
_ELEMENTS = 2**20
"""Numbers that are dequantized at once: with scales and results about 15 MiB."""


class Block(NamedTuple):
    """Rows and columns of a matrix that share a scale; None stands for all."""

    rows: int | None
    columns: int | None

    def grid(self, shape: tuple[int, ...]) -> BlockGrid:
        return BlockGrid(shape, self.rows or max(shape[-2], 1), self.columns or max(shape[-1], 1))


@dataclass(frozen=True)
class Fp8Weight:
    """The tensor ``name``, whose ``numbers`` have ``scales`` for blocks of one of ``blocks``.

    It is read as ``dtype``. With ``rounds``, products are rounded to the scales' dtype first, as compressed-tensors
    does.

    Raises:
        MalformedFile: the scales are not those of such blocks.
        UnsupportedState: numbers or scales of another kind.
    """

    name: str
    numbers: TensorStub
    scales: TensorStub
    blocks: tuple[Block, ...]
    dtype: str
    rounds: bool

    def __post_init__(self) -> None:
        shape, scales = self.numbers.shape, self.scales
        about = f"{self.name} is {self.numbers.dtype} {shape}, with scales {scales.dtype} {scales.shape}"
        if self.numbers.dtype not in NUMBERS:
            raise MalformedFile(
                f"{about}; expected FP8 numbers ({' or '.join(NUMBERS)}), because it has scales; the files mix those "
                "of two models, or of two versions of one"
            )
        is_plain = self.numbers.is_contiguous and scales.is_contiguous
        if len(shape) < 2 or scales.dtype not in _SCALES or scales.nbytes > _SCALES_NBYTES or not is_plain:
            raise UnsupportedState(
                f"{about}; expected at least two dimensions, and scales of {', '.join(_SCALES)} of at most "
                f"{_SCALES_NBYTES} bytes. Dequantize such a model with transformers, and save that"
            )
        if not any(map(self._has_scales_for, self._grids)):
            expected = " or ".join(str(grid.scales_shape) for grid in self._grids)
            raise MalformedFile(
                f"{about}; expected scales {expected}, by the blocks that quantization_config says. The files and "
                "config.json are of two models, or the files mix two versions of one"
            )

    @cached_property
    def grid(self) -> BlockGrid:
        return next(filter(self._has_scales_for, self._grids))

    @property
    def _grids(self) -> list[BlockGrid]:
        return [block.grid(self.numbers.shape) for block in self.blocks]

    def _has_scales_for(self, grid: BlockGrid) -> bool:
        shape, expected = self.scales.shape, grid.scales_shape
        return shape == expected or (set(expected) == {1} and shape in ((), (1,)))

    def stub(self, file: str) -> TensorStub:
        shape = self.numbers.shape
        span = StorageSpan(self.name, 0, self.numbers.numel * itemsize(self.dtype), None)
        return TensorStub(file, 0, self.dtype, shape, contiguous_stride(shape), span)

    def reader(self, numbers: Reader, scales: Reader) -> Reader:
        return _Fp8Reader(self, numbers, scales)


class _Run(NamedTuple):
    """Elements ``start`` to before ``stop`` of a weight; their bytes from ``skipped`` on go to ``memory``."""

    start: int
    stop: int
    skipped: int
    memory: memoryview


class _Fp8Reader(PartsReader):
    def __init__(self, weight: Fp8Weight, numbers: Reader, scales: Reader) -> None:
        super().__init__(numbers, scales)
        self._weight = weight
        self._size = itemsize(weight.dtype)

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
        size = self._size
        for offset, memory in ranges:
            end = offset + len(memory)
            for start in range(offset // size, -(-end // size), _ELEMENTS):
                stop = min(start + _ELEMENTS, -(-end // size))
                begin = max(offset, start * size)
                yield _Run(start, stop, begin - start * size, memory[begin - offset : min(end, stop * size) - offset])

    def _read(self, runs: Sequence[_Run]) -> None:
        weight = self._weight
        starts, stops = (torch.tensor([run[at] for run in runs]) for at in (0, 1))
        numbers = allocated((int((stops - starts).sum()),), weight.numbers.dtype)
        memory, at, parts = byte_view(numbers), 0, []
        for run in runs:
            length = run.stop - run.start
            parts.append((weight.numbers.offset + run.start, memory[at : at + length]))
            at += length
        self.numbers.read_ranges(parts)
        rounded = torch_dtype(weight.scales.dtype) if weight.rounds else torch.float32
        places, lengths = weight.grid.segments(starts, stops)
        plain = byte_view(dequantized_fp8(numbers, self._scales[places], lengths, torch_dtype(weight.dtype), rounded))
        at = 0
        for run in runs:
            begin = at * self._size + run.skipped
            run.memory[:] = plain[begin : begin + len(run.memory)]
            at += run.stop - run.start

    @cached_property
    def _scales(self) -> torch.Tensor:
        stub = self._weight.scales
        scales = allocated((stub.numel,), stub.dtype)
        self.scales.read_ranges([(stub.offset, byte_view(scales))])
        return scales.float()


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
        return byte_view(dequantized_mxfp4(blocks, scales))


QuantizedWeight = Fp8Weight | Mxfp4Weight


class DequantizedStorage(StorageWrapper):
    """Storage that seems to hold a file of each added tensor, with its plain numbers."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._weights: dict[str, tuple[QuantizedWeight, str, str]] = {}

    def add(self, key: str, numbers: str, scales: str, weight: QuantizedWeight) -> None:
        """Register ``key`` as the file of ``weight``, whose parts are in the files ``numbers`` and ``scales``."""
        self._weights[key] = weight, numbers, scales

    def open(self, key: str) -> Reader:
        if key not in self._weights:
            return self.inner.open(key)
        weight, numbers, scales = self._weights[key]
        return weight.reader(self.inner.open(numbers), self.inner.open(scales))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, buffer)])
