"""Packed Hugging Face tensors, which hold several *parts*, and the slice of each part. Pure.

In rules, parts have names like tensors in the files. So one rule serves models whose files hold q, k and v apart, and
models whose files hold them in a single tensor; NxD may keep them either way.

A part is a slice of its tensor, in NumPy's notation ``tensor[expert, start:end]`` or ``tensor[:, first::step]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nxd_ckpt.core.name_patterns import Numbers, Pattern
from nxd_ckpt.errors import ShapeMismatch
from nxd_ckpt.hugging_face.sizes import Sizes


@dataclass(frozen=True)
class Packed:
    """A tensor in Hugging Face's files, by pattern, and its parts.

    Attributes:
        hf: pattern of its name.
        parts: patterns of the parts' names.
        heads: for each part "query" or "kv" if it has the rows of such heads; None for an equal share of the rest.
        dim: the dimension along which parts lie; None if there is one part, or one for each number.
        alternating: True if parts alternate along ``dim``, element by element, instead of following each other.
        stacked: the placeholder that only parts have; its numbers are indices of the tensor's first dimension.
        flat: True if numbers have no dimension of their own, but equal shares of the rows.
    """

    hf: Pattern
    parts: tuple[Pattern, ...]
    heads: tuple[str | None, ...]
    dim: int | None = None
    alternating: bool = False
    stacked: str | None = None
    flat: bool = False

    def names(self, numbers: Numbers, sizes: Sizes) -> list[str]:
        """Return the names of the parts of the tensor with these numbers, in order."""
        return [part.fill(each) for each in sizes.stack(self.stacked, numbers) for part in self.parts]

    def holder(self, part: str) -> str | None:
        """Return the tensor that holds the part of this name; None if there is none."""
        matches = (pattern.match(part) for pattern in self.parts)
        return next((self.hf.fill(numbers) for numbers in matches if numbers is not None), None)

    def slices(self, name: str, shape: tuple[int, ...], sizes: Sizes) -> dict[str, PartSlice]:
        """Return the slices of the parts of the tensor ``name``, by part.

        Raises:
            ShapeMismatch: a tensor of this shape cannot have these parts.
            InvalidArgument: config.json does not say how many parts there are.
        """
        numbers = self.hf.match(name) or {}
        least = max(0 if self.dim is None else self.dim + 1, int(self.stacked is not None))
        if len(shape) < least:
            raise ShapeMismatch(f"{name} has shape {shape}, but its parts need at least {least} dimensions")
        count = len(sizes.stack(self.stacked, numbers))
        if self.stacked is not None and (shape[0] % count if self.flat else shape[0] != count):
            raise ShapeMismatch(
                f"{name} has shape {shape}, but by config.json it should hold {count} parts; pass "
                "the model's own config.json"
            )
        slices_ = [
            part
            for index in range(count)
            for part in self._along_dim(self._indexed(shape, index if self.stacked else None, count), name, sizes)
        ]
        return dict(zip(self.names(numbers, sizes), slices_, strict=True))

    def shape(self, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of the tensor whose parts, in order, have these shapes."""
        first = list(parts[0])
        stack = 1 if self.stacked is None else len(parts) // len(self.parts)
        if self.stacked is not None and not self.flat:
            first = [stack, *first]
        elif self.flat:
            first[0] *= stack
        if self.dim is not None:
            own = self.dim - (self.stacked is not None and not self.flat)
            first[self.dim] = sum(shape[own] for shape in parts[: len(self.parts)])
        return tuple(first)

    def _indexed(self, shape: tuple[int, ...], index: int | None, count: int) -> PartSlice:
        whole = PartSlice((0,) * len(shape), shape)
        if index is None:
            return whole
        if self.flat:
            rows = shape[0] // count
            return whole.narrowed(0, index * rows, rows)
        return PartSlice((index, *whole.start[1:]), (1, *shape[1:]), indexed=True)

    def _along_dim(self, whole: PartSlice, name: str, sizes: Sizes) -> Iterator[PartSlice]:
        dim = self.dim
        count = len(self.parts)
        if dim is None:
            yield whole
            return
        size = whole.size[dim]
        lengths = [None if kind is None else _rows(kind, sizes) for kind in self.heads]
        left = size - sum(length or 0 for length in lengths)
        share, rest = divmod(left, lengths.count(None)) if None in lengths else (0, left)
        if rest or left < 0:
            parts = ", ".join(part.text for part in self.parts)
            raise ShapeMismatch(
                f"{name}: {size} elements along dimension {dim} do not fit the parts {parts}; pass the model's own "
                "config.json"
            )
        start = 0
        for number in range(count):
            length = lengths[number]
            length = share if length is None else length
            yield whole.narrowed(dim, number, length, count) if self.alternating else whole.narrowed(dim, start, length)
            start += length


@dataclass(frozen=True)
class PartSlice:
    """``size`` elements in each dimension of the tensor, from ``start`` on; along ``dim`` every ``step``-th one.

    With ``indexed`` the part has no first dimension.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    indexed: bool = False
    dim: int = 0
    step: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.size[1:] if self.indexed else self.size

    def narrowed(self, dim: int, start: int, length: int, step: int = 1) -> PartSlice:
        """Return ``length`` elements along ``dim``, counted from this slice's start."""
        starts = list(self.start)
        sizes = list(self.size)
        starts[dim] += start
        sizes[dim] = length
        return PartSlice(tuple(starts), tuple(sizes), self.indexed, dim, step)


def _rows(kind: str, sizes: Sizes) -> int:
    return sizes.get("head_dim") * sizes.get("heads" if kind == "query" else "kv_heads")
