"""Conversion of weights of 8 bits (FP8), or of 4 (MXFP4), whose blocks have a scale each, to wider numbers.

Of MXFP4 32 numbers share a scale: a power of two with a bias of 127. A number has one bit of sign, two of exponent and
one of mantissa. A byte holds two numbers, the first one in its low half.

Sources: the OCP Microscaling Formats (MX) specification; huggingface/transformers v4.57,
``src/transformers/integrations/mxfp4.py`` (``convert_moe_packed_tensors``), and v5.24,
``src/transformers/integrations/finegrained_fp8.py`` (``Fp8Dequantize``); compressed-tensors v0.20,
``quantization/lifecycle/forward_helpers.py``; deepseek-ai/DeepSeek-V3, ``inference/kernel.py`` (``weight_dequant``), by
which blocks at the lower and right edge are cut off.
"""

from __future__ import annotations

from functools import cache

import torch

from nxd_ckpt.formats.block_grid import BlockGrid


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
    matrix, row = row // height, row % height
    return (matrix * down + row // grid.rows) * across + column, lengths


def _segment_at(grid: BlockGrid, places: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the segments, each a row of a block, that hold these elements."""
    width = grid.shape[-1]
    row = places // width
    return row * grid.counts[1] + (places - row * width) // grid.columns


def dequantized_fp8(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    lengths: torch.Tensor,
    dtype: torch.dtype,
    rounded: torch.dtype,
) -> torch.Tensor:
    """Return ``numbers`` (FP8) times the scale of the segment that each is in, as ``dtype``.

    Args:
        numbers: numbers of one dimension, segment after segment.
        scales: scales of the segments, float32.
        lengths: numbers in each segment, int64.
        dtype: dtype of the result.
        rounded: dtype that products, which are float32, are rounded to before.
    """
    values = _values(numbers.dtype).index_select(0, numbers.view(torch.uint8).int())  # faster than float()
    if bool((lengths == lengths[0]).all()):
        values.view(len(lengths), -1).mul_(scales.unsqueeze(1))
    else:
        values.mul_(scales.repeat_interleave(lengths))
    return values.to(rounded).to(dtype)


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
