"""Numbers that tell whether a tensor is healthy, counted window by window: four passes over what lies in the cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import hypot, inf, isfinite, nan, sqrt

import numpy as np
import torch

CHUNK = 2**16
"""Elements that are compared at once: few enough to stay in the processor's cache, as float64 too."""
_SAFE = 2.0**-80
"""From this size on, a float32 sum of squares has lost nothing significant to squares too small for float32."""
_COUNTS, _MEASURES = 4, 3
"""The first numbers of a summary's JSON, and the others."""
_MOST = 2**63 - 1
"""Numbers that a tensor can have."""
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
        self._nonzero += int(np.count_nonzero(x.numpy() != 0))  # torch counts in four times that time
        total = float(x.sum())
        self._sum += total * _SMALLER if isfinite(total) else float((exact(x) * _SMALLER).sum())
        self._norm = hypot(self._norm, _norm(x, max(-low, high)))

    def add_all(self, other: Summary) -> None:
        """The elements of ``other``, too."""
        self._numel, self._nans = self._numel + other._numel, self._nans + other._nans
        self._infs, self._nonzero = self._infs + other._infs, self._nonzero + other._nonzero
        self._sum, self._norm = self._sum + other._sum, hypot(self._norm, other._norm)
        self._absmax = max(self._absmax, other._absmax)

    def to_json(self) -> list[int | float]:
        """Counts, then measures: all that is needed to go on."""
        counts = [self._numel, self._nans, self._infs, self._nonzero]
        return [*counts, self._sum, min(self._norm, sys.float_info.max), self._absmax]

    @staticmethod
    def from_json(numbers: list[int | float]) -> Summary:
        """Raises ValueError or TypeError for what is no summary."""
        counts, measures = numbers[:_COUNTS], numbers[_COUNTS:]
        counted = all(type(count) is int and count >= 0 for count in counts)
        measured = len(measures) == _MEASURES and all(type(one) in (int, float) for one in measures)
        if counted and measured and counts[1] + counts[2] <= counts[3] <= counts[0] <= _MOST:
            total, norm, absmax = map(float, measures)
            if isfinite(total) and 0 <= absmax < inf and 0 <= norm < inf:
                found = Summary()
                found._numel, found._nans, found._infs, found._nonzero = map(int, counts)
                found._sum, found._norm, found._absmax = total, norm, absmax
                return found
        raise ValueError(f"expected counts and measures, found {numbers!r:.80}")

    @property
    def numel(self) -> int:
        """Numbers, a complex element being two."""
        return self._numel

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


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Every number as it is, but for integers beyond 2^53."""
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def fits_single(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize <= 4


def square(x: torch.Tensor) -> float:
    """The sum of squares, of floating-point or complex numbers: infinite or NaN where one of them is."""
    if fits_single(x.dtype):
        found = float(x.to(torch.float32).square().sum())  # in pairs: torch.dot in float32 loses two more digits
        if _SAFE < found < inf:
            return found
    x = exact(x)
    x = torch.view_as_real(x).flatten() if x.is_complex() else x
    return float(torch.dot(x, x))
