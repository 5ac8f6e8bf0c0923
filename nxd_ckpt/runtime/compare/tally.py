"""How far two tensors are apart, counted window by window: equal ones cost a look at their bytes."""

from __future__ import annotations

from math import inf, isfinite, isinf, sqrt

import torch

CHUNK = 2**16
"""Elements that are compared at once: few enough to stay in the processor's cache, as float64 too."""
_SAFE = 2.0**-80
"""From this size on, a float32 sum of squares has lost nothing significant to squares too small for float32."""


class Tally:
    """What is known of ``a`` and ``b`` so far. NaN in the same place is equal; NaN in only one is counted separately.

    Attributes:
        differing: elements that are not equal as numbers, including those that are NaN on one side only.
        nans: the latter.
        max_difference: the largest ``|a - b|`` of the others; to float32's precision where neither has more.
    """

    def __init__(self) -> None:
        self.differing = self.nans = 0
        self.max_difference = 0.0
        self._difference = self._norm = 0.0  # squared

    @property
    def relative_norm(self) -> float:
        """``||a - b|| / ||a||``; infinite where ``a`` is zero and ``b`` is not."""
        if self._difference == 0:
            return 0.0
        if self._norm == 0 or isinf(self._difference):
            return float("inf")
        return sqrt(self._difference / self._norm)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """The next elements of both: contiguous, of one dimension and equal length; dtypes may differ."""
        for one, other in zip(torch.split(a, CHUNK), torch.split(b, CHUNK), strict=True):
            if one.dtype == other.dtype and same_bytes(one, other):
                self._norm += _finite_square(one)
            elif not self._compare_singles(one, other):
                self._compare(one, other)

    def _compare_singles(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Compare ordinary numbers, at half the cost of float64; False if one is infinite, NaN, or too precise."""
        if not (fits_single(a.dtype) and fits_single(b.dtype)):
            return False
        x, y = a.to(torch.float32), b.to(torch.float32)
        distance = torch.sub(x, y).abs_()
        largest = float(distance.amax())
        if not isfinite(largest):
            return False
        self.differing += int(torch.count_nonzero(distance.view(torch.int32)))  # counted faster; no zero is negative
        self.max_difference = max(self.max_difference, largest)
        self._difference += square(distance)
        self._norm += square(x)
        return True

    def _compare(self, a: torch.Tensor, b: torch.Tensor) -> None:
        x, y = exact(a), exact(b)
        distance = (x - y).abs()
        if a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64):  # float64 rounds them: what is lost is small
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
    nbytes = a.numel() * a.element_size()
    return torch.equal(*(one.view(torch.int64 if nbytes % 8 == 0 else torch.uint8) for one in (a, b)))


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


def _finite_square(x: torch.Tensor) -> float:
    """The same of the finite elements alone."""
    found = square(x)
    return found if isfinite(found) else square(exact(x).masked_fill(~x.isfinite(), 0))
