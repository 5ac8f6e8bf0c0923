"""Numbers that tell whether a tensor is healthy, counted window by window: four passes over what lies in the cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import hypot, isfinite, nan, sqrt

import torch

from nxd_ckpt.runtime.compare.tally import CHUNK, exact, fits_single, square

_SMALLER = 2.0**-64
"""Sums are kept smaller by this factor: no tensor of float64 makes them overflow."""


@dataclass(frozen=True)
class TensorStatistics:
    """One tensor in numbers.

    Attributes:
        numel: its numbers; a complex element is two of them.
        nans, infs: those that are NaN, or infinite. All below is of the others, the finite ones.
        zeros: those that are 0.
        mean: NaN where there is no finite number.
        norm: the root of the sum of squares; the largest float64 where it is larger than that.
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
        """Numbers that are neither NaN nor infinite."""
        return self.numel - self.nans - self.infs

    @property
    def zero_share(self) -> float:
        """The share of zeros, from 0 to 1; 0 for an empty tensor."""
        return self.zeros / self.numel if self.numel else 0.0

    @property
    def rms(self) -> float:
        """The root of the mean square; 0 where there is no finite number."""
        return self.norm / sqrt(self.finite) if self.finite else 0.0


class Summary:
    """What is known of a tensor so far."""

    def __init__(self) -> None:
        self._numel = self._nans = self._infs = self._nonzero = 0
        self._sum = self._norm = self._absmax = 0.0

    def add(self, values: torch.Tensor) -> None:
        """The next elements: contiguous, of one dimension."""
        for chunk in torch.split(values, CHUNK):
            self._add(chunk)

    def _add(self, chunk: torch.Tensor) -> None:
        x = chunk.to(torch.float32) if fits_single(chunk.dtype) else exact(chunk)
        x = torch.view_as_real(x).flatten() if x.is_complex() else x
        self._numel += x.numel()
        low, high = (float(end) for end in torch.aminmax(x))
        if not (isfinite(low) and isfinite(high)):  # a NaN makes both NaN
            self._nans += int(x.isnan().sum())
            self._infs += int(x.isinf().sum())
            self._nonzero += int((~x.isfinite()).sum())
            x = x[x.isfinite()]
            if not x.numel():
                return
            low, high = (float(end) for end in torch.aminmax(x))
        self._absmax = max(self._absmax, -low, high)
        self._nonzero += int(torch.count_nonzero(x))
        total = float(x.sum())
        self._sum += total * _SMALLER if isfinite(total) else float((exact(x) * _SMALLER).sum())
        self._norm = hypot(self._norm, _norm(x, max(-low, high)))

    @property
    def statistics(self) -> TensorStatistics:
        finite = self._numel - self._nans - self._infs
        return TensorStatistics(
            self._numel,
            self._nans,
            self._infs,
            self._numel - self._nonzero,
            self._mean(finite) if finite else nan,
            min(self._norm, sys.float_info.max),
            self._absmax,
        )

    def _mean(self, finite: int) -> float:
        mean = self._sum / finite / _SMALLER
        return max(-self._absmax, min(self._absmax, mean))  # rounding may take it beyond them, and to infinity


def _norm(x: torch.Tensor, absmax: float) -> float:
    """Of finite numbers, also where their squares overflow."""
    squares = square(x)
    return sqrt(squares) if isfinite(squares) else absmax * sqrt(square(exact(x) / absmax))
