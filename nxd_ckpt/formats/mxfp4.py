"""Conversion of MXFP4 to bfloat16: numbers of 4 bits, 32 of which share a scale.

Source: huggingface/transformers v4.57, ``src/transformers/integrations/mxfp4.py`` (``convert_moe_packed_tensors``), and
the OCP Microscaling Formats (MX) specification: a number has one bit of sign, two of exponent and one of mantissa, a
scale is a power of two with a bias of 127. A byte holds two numbers, the first one in its low half.
"""

from __future__ import annotations

import torch

GROUP = 32
"""Numbers that share a scale."""
GROUP_NBYTES = GROUP // 2

_BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], dtype=torch.bfloat16)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], 1)
"""The two numbers in each byte, by byte."""


def dequantized(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``numbers``, uint8 (groups, 16), times their ``scales``, uint8 (groups,), as bfloat16 (groups, 32)."""
    values = _PAIRS[numbers.int()].flatten(1)
    return torch.ldexp(values, scales.int().unsqueeze(1) - _BIAS).bfloat16()
