"""Device meshes: which boxes of a global tensor each rank holds, by the mesh and the tensor's placements alone.

The algebra is that of torch's DTensor. A mesh is an array of global ranks. A tensor has one placement for each
dimension of the mesh: it is replicated along it, or sharded. Placements are taken from left to right. A shard is one of
``torch.chunk``'s: ``ceil(size / parts)`` elements, the last shards have fewer or none. A strided shard (torch's
``_StridedShard``, of FSDP2 over tensor parallelism) chunks twice: into ``split`` pieces, then each of those into as
many parts as the mesh dimension has ranks; rank i holds the i-th part of each piece, one after the other. So what a
rank holds along one dimension of the tensor are runs of indices, and its local tensor is made of the boxes that these
span.
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
"""A rank's place in a mesh, an index for each dimension."""

_Runs = tuple[tuple[int, int], ...]
"""Indices along one dimension of a tensor, ascending: (first, number) of each run."""


@dataclass(frozen=True)
class Mesh:
    """The global ``ranks`` (row-major), as an array of ``shape``. Its dimensions have ``names``, or "" for one."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property  # asked of each tensor
    def is_ascending(self) -> bool:
        """Whether ranks ascend along each dimension."""
        stride = len(self.ranks)
        for size in self.shape:
            block, stride = stride, stride // size
            later = ((place, place + stride) for place in range(len(self.ranks)) if place % block + stride < block)
            if any(self.ranks[one] > self.ranks[other] for one, other in later):
                return False
        return True

    def within(self, members: Sequence[int]) -> Mesh | None:
        """The mesh with the ranks' places among ``members`` for the ranks; None where one of them is no member."""
        place_of = {rank: place for place, rank in enumerate(members)}
        if not place_of.keys() >= set(self.ranks):
            return None
        return Mesh(self.names, self.shape, tuple(place_of[rank] for rank in self.ranks))

    def coordinate_of(self, rank: int) -> Coordinate | None:
        """Where the global rank is; None if it is not in this mesh."""
        place = self._places.get(rank)
        return None if place is None else unravelled(place, self.shape)

    def rank_at(self, coordinate: Coordinate) -> int:
        return self.ranks[ravelled(coordinate, self.shape)]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def describe(self) -> str:
        """``fsdp=2 tp=4``."""
        named = zip(self.names, self.shape, strict=True)
        return " ".join(f"{name or f'dim{dim}'}={size}" for dim, (name, size) in enumerate(named))


@dataclass(frozen=True)
class Shard:
    """A placement: the tensor is sharded along its dimension ``dim``; strided for ``split`` > 1 (``split_factor``)."""

    dim: int
    split: int = 1


Placement = Shard | None
"""None: replicated."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh: one placement for each of the mesh's dimensions.

    Ranks that differ only along dimensions that it is replicated over hold the same: they are *replicas*, numbered in
    row-major order of these dimensions.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]

    @cached_property
    def replicas(self) -> int:
        """How many ranks hold the same."""
        return prod(self._replicated)

    def replica_of(self, coordinate: Coordinate) -> int:
        """The number of the rank at ``coordinate`` among those that hold the same."""
        own = [index for index, placement in zip(coordinate, self.placements, strict=True) if placement is None]
        return ravelled(own, self._replicated)

    def rank_of(self, coordinate: Coordinate, replica: int) -> int:
        """The global rank of that replica of what the rank at ``coordinate`` holds."""
        own = iter(unravelled(replica, self._replicated))
        placed = zip(coordinate, self.placements, strict=True)
        return self.mesh.rank_at(tuple(next(own) if placement is None else index for index, placement in placed))

    def pieces(self, shape: tuple[int, ...], coordinate: Coordinate) -> tuple[Piece, ...]:
        """What the rank at ``coordinate`` holds of a tensor of ``shape``; nothing where its part is empty."""
        return _pieces(shape, self.mesh.shape, self.placements, coordinate)

    def local_shape(self, shape: tuple[int, ...], coordinate: Coordinate) -> tuple[int, ...]:
        """The shape of the local tensor of the rank at ``coordinate``."""
        runs = _runs(shape, self.mesh.shape, self.placements, coordinate)
        return tuple(sum(number for _, number in own) for own in runs)

    def holders(self, shape: tuple[int, ...], wanted: Box) -> tuple[Coordinate, ...]:
        """The coordinates that hold parts of ``wanted``, a box of a tensor of ``shape``: of replicas the first.

        The work is proportional to the answer, and not to the number of ranks, but along strided shards.
        """
        return _holders(shape, self.mesh.shape, self.placements, wanted)

    @cached_property
    def _replicated(self) -> tuple[int, ...]:
        sizes = zip(self.mesh.shape, self.placements, strict=True)
        return tuple(size for size, placement in sizes if placement is None)


def ravelled(coordinate: Iterable[int], shape: Iterable[int]) -> int:
    """The place of ``coordinate`` in a row-major array of ``shape``."""
    place = 0
    for index, size in zip(coordinate, shape, strict=True):
        place = place * size + index
    return place


def unravelled(place: int, shape: Sequence[int]) -> Coordinate:
    """The coordinate of that place in a row-major array of ``shape``."""
    coordinate = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


@lru_cache(maxsize=4096)  # a model has many tensors, of few shapes
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
    """The boxes that runs along each dimension span, and where they lie in the tensor that is made of them."""
    placed = [list(_placed(own)) for own in runs]
    for combination in product(*placed):
        local, first, size = zip(*combination, strict=True) if combination else ((), (), ())
        yield Piece(Box(tuple(local), tuple(size)), Box(tuple(first), tuple(size)))


def _placed(runs: _Runs) -> Iterator[tuple[int, int, int]]:
    """(place in the local tensor, first index, number) of each run."""
    local = 0
    for first, number in runs:
        yield local, first, number
        local += number


def _shard(runs: _Runs, split: int, parts: int, index: int) -> _Runs:
    """What rank ``index`` of ``parts`` holds of ``runs``."""
    if split == 1:
        return _chunk(runs, parts, index)
    found: list[tuple[int, int]] = []
    for piece in range(split):
        for first, number in _chunk(_chunk(runs, split, piece), parts, index):
            if found and sum(found[-1]) == first:
                found[-1] = found[-1][0], found[-1][1] + number
            else:
                found.append((first, number))
    return tuple(found)


def _chunk(runs: _Runs, parts: int, index: int) -> _Runs:
    size = -(-sum(number for _, number in runs) // parts)
    start, stop = index * size, (index + 1) * size
    found = []
    for local, first, number in _placed(runs):
        begin, end = max(start, local), min(stop, local + number)
        if begin < end:
            found.append((first + begin - local, end - begin))
    return tuple(found)


@lru_cache(maxsize=4096)
def _holders(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...], wanted: Box
) -> tuple[Coordinate, ...]:
    whole: list[_Runs] = [((0, size),) if size else () for size in shape]
    found: list[tuple[Coordinate, list[_Runs]]] = [((), whole)] if wanted.numel and prod(shape) else []
    for size, placement in zip(sizes, placements, strict=True):
        if placement is None:
            found = [((*coordinate, 0), runs) for coordinate, runs in found]
        else:
            found = [
                ((*coordinate, index), [*runs[: placement.dim], own, *runs[placement.dim + 1 :]])
                for coordinate, runs in found
                for index, own in _parts_in(runs[placement.dim], placement, size, wanted)
            ]
    return tuple(coordinate for coordinate, _ in found)


def _parts_in(runs: _Runs, shard: Shard, parts: int, wanted: Box) -> Iterator[tuple[int, _Runs]]:
    """The parts of ``runs`` that reach into ``wanted``, each with its number."""
    start, length = wanted.offset[shard.dim], wanted.size[shard.dim]
    candidates = range(parts)
    if shard.split == 1 and len(runs) == 1:
        first, number = runs[0]
        candidates = blocks_in(start - first, length, -(-number // parts), parts)
    for index in candidates:
        own = _shard(runs, shard.split, parts, index)
        if any(first < start + length and start < first + number for first, number in own):
            yield index, own
