"""The distance of two tensors, counted window by window; windows of equal bytes are quick."""

from __future__ import annotations

from math import isfinite, isinf, sqrt

import torch

from nxd_ckpt.reshard.summary import CHUNK, exact, fits_single, square


class Tally:
    """The difference of ``a`` and ``b`` so far. NaN equals NaN; NaN on one side only is counted separately.

    Attributes:
        differing: elements that are not equal as numbers, including those that are NaN on one side only.
        nans: elements that are NaN on one side only.
        max_difference: the largest ``|a - b|`` of the other elements; in float32's precision if neither has more.
    """

    def __init__(self) -> None:
        self.differing = self.nans = 0
        self.max_difference = 0.0
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
            elif not self._compare_singles(x, y):
                self._compare(x, y)

    def _compare_singles(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Compare in float32, at half the cost of float64; False if a number is infinite, NaN, or too precise."""
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
    nbytes = a.numel() * a.element_size()
    return torch.equal(*(tensor.view(torch.int64 if nbytes % 8 == 0 else torch.uint8) for tensor in (a, b)))


def _finite_square(x: torch.Tensor) -> float:
    """Return the sum of squares of the finite elements."""
    squares = square(x)
    return squares if isfinite(squares) else square(exact(x).masked_fill(~x.isfinite(), 0))
