"""Counts and sums of a tensor's values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor; a complex element counts as two numbers.

    Attributes:
        numel: how many numbers it has.
        nans, infs: how many are NaN, and infinite. The fields below cover finite numbers only.
        zeros: how many are 0.
        mean: their mean; NaN if there is no finite number.
        norm: the root of the sum of squares, at most the largest float64.
        absmax: the largest absolute value.
    """

    numel: int
    nans: int
    infs: int
    zeros: int
    mean: float
    norm: float
    absmax: float

    @property
    def finite(self) -> int:
        """How many numbers are neither NaN nor infinite."""
        return self.numel - self.nans - self.infs

    @property
    def zero_share(self) -> float:
        """The share of zeros, from 0 to 1; 0 for an empty tensor."""
        return self.zeros / self.numel if self.numel else 0.0
