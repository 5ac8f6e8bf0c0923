"""Boxes: rectangles of a global tensor. Their overlap is the algebra of resharding.

A box is an offset and a size per dimension, in elements. A 0-dimensional tensor has one box, ``Box((), ())``, of one
element. Boxes are half open: they cover ``offset <= index < offset + size`` in every dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from nxd_ckpt.errors import InvalidArgument


@dataclass(frozen=True, order=True)
class Box:
    """A rectangle: ``offset`` and ``size`` per dimension, in elements of the global tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """Return the box of a whole tensor."""
        size = tuple(shape)
        return Box((0,) * len(size), size)

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None if there is none (an empty box overlaps nothing)."""
        offset = []
        size = []
        for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True):
            start = max(a, b)
            extent = min(a + n, b + m) - start
            if extent <= 0:
                return None
            offset.append(start)
            size.append(extent)
        return Box(tuple(offset), tuple(size))

    def contains(self, other: Box) -> bool:
        """Return whether all of ``other`` is inside this box."""
        return other.numel == 0 or all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )

    def shifted(self, origin: tuple[int, ...]) -> Box:
        """Return this box in coordinates whose zero is at ``origin``."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin, strict=True)), self.size)

    def moved(self, by: tuple[int, ...]) -> Box:
        """Return this box, moved by ``by``."""
        return Box(tuple(a + b for a, b in zip(self.offset, by, strict=True)), self.size)

    def narrowed(self, dim: int, start: int, length: int) -> Box:
        """Return the part ``start <= index < start + length`` along ``dim``, counted from this box's offset."""
        offset = list(self.offset)
        size = list(self.size)
        offset[dim] += start
        size[dim] = length
        return Box(tuple(offset), tuple(size))

    def permuted(self, order: tuple[int, ...]) -> Box:
        """Return this box after the tensor's dimensions are permuted into ``order``."""
        return Box(tuple(self.offset[dim] for dim in order), tuple(self.size[dim] for dim in order))

    def without(self, dim: int) -> Box:
        """Return this box without the dimension ``dim``."""
        return Box(self.offset[:dim] + self.offset[dim + 1 :], self.size[:dim] + self.size[dim + 1 :])

    def with_dim(self, dim: int) -> Box:
        """Return this box with one more dimension at ``dim``, of a single element."""
        return Box((*self.offset[:dim], 0, *self.offset[dim:]), (*self.size[:dim], 1, *self.size[dim:]))

    def minus(self, other: Box) -> list[Box]:
        """Return this box without ``other``, as at most two disjoint boxes per dimension."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        if common == self:  # nearly always, and for each of thousands of experts
            return []
        rest = self
        parts = []
        for dim, size in enumerate(common.size):
            start = common.offset[dim] - rest.offset[dim]
            end = start + size
            if start > 0:
                parts.append(rest.narrowed(dim, 0, start))
            if end < rest.size[dim]:
                parts.append(rest.narrowed(dim, end, rest.size[dim] - end))
            rest = rest.narrowed(dim, start, size)
        return parts

    def __str__(self) -> str:
        """Return ``[0:4, 2:3]``, the index of the box in the tensor."""
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.size, strict=True)) + "]"


def box_of(index: Box | slice | tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Return the box that ``index`` selects in a tensor of ``shape``; dimensions without a slice are selected whole.

    Raises:
        InvalidArgument: too many slices, a slice with a step, not a slice, or a box outside the tensor.
    """
    if isinstance(index, Box):
        fits = len(index.offset) == len(index.size) == len(shape) and min((*index.offset, *index.size), default=0) >= 0
        if not fits or any(a + n > size for a, n, size in zip(index.offset, index.size, shape, strict=True)):
            raise InvalidArgument(f"box {index} is not inside a tensor of shape {list(shape)}")
        return index
    slices = index if isinstance(index, tuple) else (index,)
    if len(slices) > len(shape):
        raise InvalidArgument(f"{len(slices)} slices for a tensor of shape {list(shape)}")
    offset = [0] * len(shape)
    size = list(shape)
    for dim, item in enumerate(slices):
        if not isinstance(item, slice) or item.step not in (None, 1):
            raise InvalidArgument(
                f"dimension {dim}: expected a slice without a step, such as slice(0, 4), found {item!r}"
            )
        start, stop, _ = item.indices(shape[dim])
        offset[dim] = start
        size[dim] = max(0, stop - start)
    return Box(tuple(offset), tuple(size))


_MAX_CUT_DIMENSIONS = 12
"""Largest number of dimensions that a tensor may be cut along; a box has 2**12 corners then."""


def is_tiling(whole: Box, boxes: Sequence[Box]) -> bool:
    """Return whether ``boxes`` cover ``whole`` exactly, each element once.

    Each corner of a box has the sign +1 if an even number of its coordinates are ends, otherwise -1. Corners cancel
    out where boxes meet. The corners of the whole remain if and only if each element is in exactly one box. So boxes
    need not be compared in pairs.

    Raises:
        InvalidArgument: the boxes are cut along more dimensions than are supported.
    """
    filled = [box for box in boxes if box.numel]
    if filled == [whole]:  # the usual case
        return True
    if not all(whole.contains(box) for box in filled):
        return False
    cut = [dim for dim, size in enumerate(whole.size) if any(box.size[dim] != size for box in filled)]
    if len(cut) > _MAX_CUT_DIMENSIONS:
        raise InvalidArgument(f"a tensor is cut along {len(cut)} dimensions, at most {_MAX_CUT_DIMENSIONS} are read")
    corners: Counter[tuple[int, ...]] = Counter()
    for box, weight in [*((box, 1) for box in filled), *([(whole, -1)] if whole.numel else [])]:
        for ends in product(*(((box.offset[dim], 1), (box.offset[dim] + box.size[dim], -1)) for dim in cut)):
            corners[tuple(place for place, _ in ends)] += weight * prod(sign for _, sign in ends)
    return not any(corners.values())


def boxes_of_run(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the elements ``start <= index < stop`` of a row-major tensor of ``shape`` as boxes, ascending.

    Each box is one run of elements. There are at most ``2 * len(shape) + 1`` of them.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows: first <= index < last
    if first > last:  # within one row
        yield from _in_row(last, boxes_of_run(start - last * row, stop - last * row, shape[1:]))
        return
    if start < first * row:
        yield from _in_row(first - 1, boxes_of_run(start - (first - 1) * row, row, shape[1:]))
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(last, boxes_of_run(0, stop - last * row, shape[1:]))


def _in_row(row: int, boxes: Iterable[Box]) -> Iterator[Box]:
    return (Box((row, *box.offset), (1, *box.size)) for box in boxes)
