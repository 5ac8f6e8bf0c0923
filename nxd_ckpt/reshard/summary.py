"""Statistics that show whether a tensor is healthy, and the distance of two tensors, in chunks that fit a cache."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from math import hypot, inf, isfinite, isinf, nan, sqrt
from typing import Any

import numpy as np
import torch

from nxd_ckpt.reshard.tensor_statistics import TensorStatistics

CHUNK = 2**16
"""Elements that are compared at once; few enough to fit the processor's cache, also as float64."""
PART = 2**20
"""Elements that are counted at once.

Few enough to fit the processor's outer cache, also while they become float32; many enough that threads seldom wait for
Python's lock. Equal parts give equal last digits.
"""
_ROW = 2**10
"""Squares that are summed in float32; rows are summed in float64. The relative error of a norm is below 1e-6."""
_SAFE = 2.0**-80
"""From this size on, squares too small for float32 do not matter to a float32 sum of squares."""
_SMALLER = 2.0**-64
"""Factor by which sums are scaled down, so that no float64 tensor makes them overflow."""


class Summary:
    """The statistics of a tensor's elements so far."""

    def __init__(self) -> None:
        self._numel = self._nans = self._infs = self._nonzero = 0
        self._sum = self._norm = self._absmax = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Add the next elements: contiguous, of one dimension."""
        with np.errstate(over="ignore", invalid="ignore"):
            for chunk in torch.split(values, PART):
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
        self._nonzero += int(np.count_nonzero(x.numpy() != 0))  # torch takes four times as long
        self._add_measures(x, max(-low, high))

    def _add_measures(self, x: torch.Tensor, absmax: float) -> None:
        """Of finite numbers."""
        self._absmax = max(self._absmax, absmax)
        total = float(x.sum())
        self._sum += total * _SMALLER if isfinite(total) else float((exact(x) * _SMALLER).sum())
        self._norm = hypot(self._norm, _norm(x, absmax))

    def add_all(self, other: Summary) -> None:
        """Add the elements of ``other``."""
        self._numel += other._numel
        self._nans += other._nans
        self._infs += other._infs
        self._nonzero += other._nonzero
        self._sum, self._norm = self._sum + other._sum, hypot(self._norm, other._norm)
        self._absmax = max(self._absmax, other._absmax)

    @staticmethod
    def of(values: torch.Tensor) -> Summary:
        """Return the summary of a part of a tensor, on any thread, to be added by `add_all`."""
        summary = Summary()
        summary.add(values)
        return summary

    @staticmethod
    def of_all(summaries: Iterable[Summary]) -> Summary:
        """Return the summary of all their elements."""
        whole = Summary()
        for summary in summaries:
            whole.add_all(summary)
        return whole

    @property
    def numel(self) -> int:
        """How many numbers there are; a complex element is two."""
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
        return max(-self._absmax, min(self._absmax, mean))  # rounding may exceed the bounds, or give infinity


def _norm(x: torch.Tensor, absmax: float) -> float:
    """Of finite numbers, also where their squares overflow."""
    squares = square(x)
    return sqrt(squares) if isfinite(squares) else absmax * sqrt(square(exact(x) / absmax))


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in double precision, exact except for integers beyond 2^53."""
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def fits_single(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize <= 4


def square(x: torch.Tensor) -> float:
    """Return the sum of squares of floating-point or complex numbers; infinite or NaN if an element is."""
    if fits_single(x.dtype):
        with np.errstate(over="ignore", invalid="ignore"):
            squares = _square_by_rows(x.to(torch.float32).numpy().reshape(-1))
        if _SAFE < squares < inf:
            return squares
    x = exact(x)
    x = torch.view_as_real(x).flatten() if x.is_complex() else x
    return float(torch.dot(x, x))


def _square_by_rows(numbers: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    """Return the sum of squares, added row by row; one sum over all numbers in float32 would lose two more digits."""
    whole = len(numbers) // _ROW * _ROW
    squares = np.matmul(numbers[:whole].reshape(-1, 1, _ROW), numbers[:whole].reshape(-1, _ROW, 1))
    total = float(squares.sum(dtype=np.float64))
    if whole < len(numbers):
        rest = numbers[whole:].astype(np.float64)
        total += float(np.dot(rest, rest))
    return total


class Tally:
    """The difference of ``a`` and ``b`` so far. NaN equals NaN; NaN on one side only is counted separately.

    Attributes:
        differing: elements that are not equal as numbers, including those that are NaN on one side only.
        nans: elements that are NaN on one side only.
        max_difference: the largest ``|a - b|`` of the other elements.
    """

    def __init__(self) -> None:
        self.differing: int = 0
        self.nans: int = 0
        self.max_difference: float = 0.0
        self._difference = self._norm = 0.0  # squared

    @property
    def relative_norm(self) -> float:
        """``||a - b|| / ||a||``; infinite if ``a`` is zero and ``b`` is not."""
        if self._difference == 0:
            return 0.0
        if self._norm == 0 or isinf(self._difference):
            return float("inf")
        return sqrt(self._difference / self._norm)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the next elements of both: contiguous, of one dimension and equal length; dtypes may differ."""
        for x, y in zip(torch.split(a, CHUNK), torch.split(b, CHUNK), strict=True):
            if x.dtype == y.dtype and same_bytes(x, y):
                self._norm += _finite_square(x)
            else:
                self._compare(x, y)

    def _compare(self, a: torch.Tensor, b: torch.Tensor) -> None:
        x = exact(a)
        y = exact(b)
        distance = (x - y).abs()
        if a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64):  # float64 rounds large ones
            near = (a.view(torch.int64) - b.view(torch.int64)).abs().to(torch.float64)
            distance = torch.where(distance == 0, near, distance)
        largest = float(distance.max())
        if isfinite(largest):
            self.differing += int(torch.count_nonzero(distance))
        else:
            nan = x.isnan() | y.isnan()
            self.nans += (alone := int((x.isnan() ^ y.isnan()).sum()))
            distance = distance.masked_fill(nan | (x == y), 0)
            largest = float(distance.max())
            self.differing += alone + int(torch.count_nonzero(distance))
        self.max_difference = max(self.max_difference, largest)
        self._difference += square(distance)
        self._norm += _finite_square(x)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors of one dtype and length have equal bytes."""
    ends = (end for each in (a, b) for end in (each.nbytes, each.storage_offset() * each.element_size()))
    words = torch.uint8 if any(end % 8 for end in ends) else torch.int64
    return torch.equal(a.view(words), b.view(words))


def _finite_square(x: torch.Tensor) -> float:
    """Return the sum of squares of the finite elements."""
    squares = square(x)
    return squares if isfinite(squares) else square(exact(x).masked_fill(~x.isfinite(), 0))


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""A stand-in for an absent value."""


def equal_values(a: Any, b: Any) -> bool:
    """Return whether two leaves are equal; NaN equals NaN, and numbers of different types are compared by value."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        # A copy: a tensor of one element is contiguous with any stride, and a conjugate view has no bytes of its own.
        x, y = (each.flatten().clone(memory_format=torch.contiguous_format) for each in (a, b))
        tally = Tally()
        if not same_bytes(x, y):
            tally.add(x, y)
        return not tally.differing
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    if hasattr(a, "__array__") or hasattr(b, "__array__"):  # a NumPy array has no single truth value
        return type(a) is type(b) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return bool(a == b) or (a != a and b != b)
