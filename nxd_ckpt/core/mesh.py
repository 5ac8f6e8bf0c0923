"""Device meshes: the boxes of a global tensor on each rank, from the mesh and the tensor's placements.

This is the algebra of torch's DTensor. A mesh is an array of global ranks. A tensor has one placement for each mesh
dimension: replicated or sharded. Placements apply from left to right. Shards are those of ``torch.chunk``:
``ceil(size / parts)`` elements each, the last ones have fewer or none. A strided shard (torch's ``_StridedShard``, from
FSDP2 over tensor parallelism) chunks twice: into ``split`` pieces, then each piece into as many parts as the mesh
dimension has ranks; rank i holds the i-th part of every piece, in order. So along each dimension of the tensor a rank
holds runs of indices, and its local tensor consists of the boxes that these runs span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.section import blocks_in

Coordinate = tuple[int, ...]
"""A rank's place in a mesh: an index for each dimension."""

_Runs = tuple[tuple[int, int], ...]
"""Indices along one dimension of a tensor, ascending: (first, number) of each run."""


@dataclass(frozen=True)
class Mesh:
    """An array of global ``ranks`` (row-major) of ``shape``. ``names`` has each dimension's name, or ""."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property  # used for each tensor
    def is_ascending(self) -> bool:
        """True if ranks ascend along each dimension."""
        stride = len(self.ranks)
        for size in self.shape:
            block, stride = stride, stride // size
            neighbours = ((place, place + stride) for place in range(len(self.ranks)) if place % block + stride < block)
            if any(self.ranks[place] > self.ranks[after] for place, after in neighbours):
                return False
        return True

    def within(self, members: Sequence[int]) -> Mesh | None:
        """Return the mesh with each rank replaced by its index in ``members``; None if a rank is no member."""
        place_of = {rank: place for place, rank in enumerate(members)}
        if not place_of.keys() >= set(self.ranks):
            return None
        return Mesh(self.names, self.shape, tuple(place_of[rank] for rank in self.ranks))

    def coordinate_of(self, rank: int) -> Coordinate | None:
        """Return the coordinate of a global rank; None if it is not in this mesh."""
        place = self._places.get(rank)
        return None if place is None else unravelled(place, self.shape)

    def rank_at(self, coordinate: Coordinate) -> int:
        return self.ranks[ravelled(coordinate, self.shape)]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def describe(self) -> str:
        """Return ``fsdp=2 tp=4``."""
        dimensions = zip(self.names, self.shape, strict=True)
        return " ".join(f"{name or f'dim{dim}'}={size}" for dim, (name, size) in enumerate(dimensions))


@dataclass(frozen=True)
class Shard:
    """A placement: sharded along the tensor's dimension ``dim``; strided if ``split`` (``split_factor``) is above 1."""

    dim: int
    split: int = 1


Placement = Shard | None
"""A placement on one dimension of a mesh; None is replicated."""


@dataclass(frozen=True)
class Layout:
    """A tensor's layout on a mesh: one placement for each of the mesh's dimensions.

    Ranks that differ only along replicated dimensions hold equal parts. They are *replicas*, numbered in row-major
    order of these dimensions.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]

    @cached_property
    def replicas(self) -> int:
        """The number of ranks that hold equal parts."""
        return prod(self._replicated)

    def replica_of(self, coordinate: Coordinate) -> int:
        """Return the number of the rank at ``coordinate`` among its replicas."""
        own = [index for index, placement in zip(coordinate, self.placements, strict=True) if placement is None]
        return ravelled(own, self._replicated)

    def rank_of(self, coordinate: Coordinate, replica: int) -> int:
        """Return the global rank of replica ``replica`` of the rank at ``coordinate``."""
        own = iter(unravelled(replica, self._replicated))
        placed = zip(coordinate, self.placements, strict=True)
        return self.mesh.rank_at(tuple(next(own) if placement is None else index for index, placement in placed))

    def pieces(self, shape: tuple[int, ...], coordinate: Coordinate) -> tuple[Piece, ...]:
        """Return the pieces of a tensor of ``shape`` on the rank at ``coordinate``; empty if its part is empty."""
        return _pieces(shape, self.mesh.shape, self.placements, coordinate)

    def local_shape(self, shape: tuple[int, ...], coordinate: Coordinate) -> tuple[int, ...]:
        """Return the shape of the local tensor on the rank at ``coordinate``."""
        runs = _runs(shape, self.mesh.shape, self.placements, coordinate)
        return tuple(sum(number for _, number in own) for own in runs)

    def holders(self, shape: tuple[int, ...], wanted: Box) -> tuple[Coordinate, ...]:
        """Return the coordinates that hold parts of ``wanted``, a box of a tensor of ``shape``; only the first replica.

        The work is proportional to the answer, not to the number of ranks, except along strided shards.
        """
        return _holders(shape, self.mesh.shape, self.placements, wanted)

    @cached_property
    def _replicated(self) -> tuple[int, ...]:
        sizes = zip(self.mesh.shape, self.placements, strict=True)
        return tuple(size for size, placement in sizes if placement is None)


def ravelled(coordinate: Iterable[int], shape: Iterable[int]) -> int:
    """Return the place of ``coordinate`` in a row-major array of ``shape``."""
    place = 0
    for index, size in zip(coordinate, shape, strict=True):
        place = place * size + index
    return place


def unravelled(place: int, shape: Sequence[int]) -> Coordinate:
    """Return the coordinate of a place in a row-major array of ``shape``."""
    coordinate = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


@lru_cache(maxsize=4096)  # a model has many tensors, but few shapes
def _pieces(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...], coordinate: Coordinate
) -> tuple[Piece, ...]:
    return tuple(_products(_runs(shape, sizes, placements, coordinate)))


def _runs(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...], coordinate: Coordinate
) -> list[_Runs]:
    runs: list[_Runs] = [((0, size),) if size else () for size in shape]
    for size, placement, index in zip(sizes, placements, coordinate, strict=True):
        if placement is not None:
            runs[placement.dim] = _shard(runs[placement.dim], placement.split, size, index)
    return runs


def _products(runs: Sequence[_Runs]) -> Iterator[Piece]:
    """Yield the boxes that the runs span, with their places in the local tensor."""
    placed = [list(_placed(own)) for own in runs]
    for combination in product(*placed):
        local, first, size = zip(*combination, strict=True) if combination else ((), (), ())
        yield Piece(Box(tuple(local), tuple(size)), Box(tuple(first), tuple(size)))


def _placed(runs: _Runs) -> Iterator[tuple[int, int, int]]:
    """Yield (place in the local tensor, first index, number) of each run."""
    local = 0
    for first, number in runs:
        yield local, first, number
        local += number


def _shard(runs: _Runs, split: int, parts: int, index: int) -> _Runs:
    """Return the runs of rank ``index`` of ``parts``."""
    if split == 1:
        return _chunk(runs, parts, index)
    shard: list[tuple[int, int]] = []
    for piece in range(split):
        for first, number in _chunk(_chunk(runs, split, piece), parts, index):
            if shard and sum(shard[-1]) == first:
                shard[-1] = shard[-1][0], shard[-1][1] + number
            else:
                shard.append((first, number))
    return tuple(shard)


def _chunk(runs: _Runs, parts: int, index: int) -> _Runs:
    size = -(-sum(number for _, number in runs) // parts)
    start, stop = index * size, (index + 1) * size
    chunk = []
    for local, first, number in _placed(runs):
        begin, end = max(start, local), min(stop, local + number)
        if begin < end:
            chunk.append((first + begin - local, end - begin))
    return tuple(chunk)


@lru_cache(maxsize=4096)
def _holders(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...], wanted: Box
) -> tuple[Coordinate, ...]:
    whole: list[_Runs] = [((0, size),) if size else () for size in shape]
    parts: list[tuple[Coordinate, list[_Runs]]] = [((), whole)] if wanted.numel and prod(shape) else []
    for size, placement in zip(sizes, placements, strict=True):
        if placement is None:
            parts = [((*coordinate, 0), runs) for coordinate, runs in parts]
        else:
            parts = [
                ((*coordinate, index), [*runs[: placement.dim], own, *runs[placement.dim + 1 :]])
                for coordinate, runs in parts
                for index, own in _parts_in(runs[placement.dim], placement, size, wanted)
            ]
    return tuple(coordinate for coordinate, _ in parts)


def _parts_in(runs: _Runs, shard: Shard, parts: int, wanted: Box) -> Iterator[tuple[int, _Runs]]:
    """Yield the parts of ``runs`` that overlap ``wanted``, each with its number."""
    start, length = wanted.offset[shard.dim], wanted.size[shard.dim]
    candidates = range(parts)
    if shard.split == 1 and len(runs) == 1:
        first, number = runs[0]
        candidates = blocks_in(start - first, length, -(-number // parts), parts)
    for index in candidates:
        own = _shard(runs, shard.split, parts, index)
        if any(first < start + length and start < first + number for first, number in own):
            yield index, own
