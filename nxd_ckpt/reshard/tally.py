"""How far two tensors are apart, counted window by window: equal ones cost a look at their bytes."""

from __future__ import annotations

from math import isfinite, isinf, sqrt

import torch

from nxd_ckpt.reshard.summary import CHUNK, exact, fits_single, square


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


def _finite_square(x: torch.Tensor) -> float:
    """The same of the finite elements alone."""
    found = square(x)
    return found if isfinite(found) else square(exact(x).masked_fill(~x.isfinite(), 0))
