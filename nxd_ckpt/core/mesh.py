"""Device meshes: the boxes of a global tensor on each rank, from the mesh and the tensor's placements.

This is the algebra of torch's DTensor. A mesh is an array of global ranks. A tensor has one placement for each mesh
dimension: replicated or sharded. Placements apply from left to right. Shards are those of ``torch.chunk``:
``ceil(size / parts)`` elements each, the last ones have fewer or none. A strided shard (torch's ``_StridedShard``, from
FSDP2 over tensor parallelism) chunks twice: into ``split`` pieces, then each piece into as many parts as the mesh
dimension has ranks; rank i holds the i-th part of every piece, in order. So along each dimension of the tensor a rank
holds runs of indices, and its local tensor consists of the boxes that these runs span.

A mesh need not span the job: pipeline stages hold other tensors, and FSDP over two ranks of each of four
tensor-parallel groups uses four meshes. So ranks whose states are alike (names, dtypes, shapes, placements) are a
*group*. Meshes at the same place of these states are stacked into one, over whose first dimension everything is
replicated. Each rank then derives from its group alone which ranks write what. The first rank of each group writes the
group's tensors, whole ones with the ranks that wrote their parts, into its index (docs/format.md describes the JSON).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.limits import RANKS, checked, checked_text, integers
from nxd_ckpt.core.partition import Piece, blocks_in

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
            block = stride
            stride = stride // size
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

    def of_stack(self, rank: int) -> Mesh | None:
        """Return the mesh with the rank, in a stack of meshes over the first dimension; None if it is in none."""
        place = self._places.get(rank)
        size = prod(self.shape[1:])
        if place is None or len(self.shape) < 2:
            return None
        first = place // size * size
        return Mesh(self.names[1:], self.shape[1:], self.ranks[first : first + size])

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
        return _local_shape(shape, self.mesh.shape, self.placements, coordinate)

    def holders(self, shape: tuple[int, ...], box: Box) -> tuple[Coordinate, ...]:
        """Return the coordinates that hold parts of ``box`` of a tensor of ``shape``; only the first replica.

        The work is proportional to the answer, not to the number of ranks, except along strided shards.
        """
        return _holders(shape, self.mesh.shape, self.placements, box)

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


@lru_cache(maxsize=4096)
def _local_shape(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...], coordinate: Coordinate
) -> tuple[int, ...]:
    return tuple(sum(number for _, number in own) for own in _runs(shape, sizes, placements, coordinate))


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
    start = index * size
    stop = (index + 1) * size
    chunk = []
    for local, first, number in _placed(runs):
        begin = max(start, local)
        end = min(stop, local + number)
        if begin < end:
            chunk.append((first + begin - local, end - begin))
    return tuple(chunk)


@lru_cache(maxsize=4096)
def _holders(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Placement, ...], box: Box
) -> tuple[Coordinate, ...]:
    whole: list[_Runs] = [((0, size),) if size else () for size in shape]
    parts: list[tuple[Coordinate, list[_Runs]]] = [((), whole)] if box.numel and prod(shape) else []
    for size, placement in zip(sizes, placements, strict=True):
        if placement is None:
            parts = [((*coordinate, 0), runs) for coordinate, runs in parts]
        else:
            parts = [
                ((*coordinate, index), [*runs[: placement.dim], own, *runs[placement.dim + 1 :]])
                for coordinate, runs in parts
                for index, own in _parts_in(runs[placement.dim], placement, size, box)
            ]
    return tuple(coordinate for coordinate, _ in parts)


def _parts_in(runs: _Runs, shard: Shard, parts: int, box: Box) -> Iterator[tuple[int, _Runs]]:
    """Yield the parts of ``runs`` that overlap ``box``, each with its number."""
    start = box.offset[shard.dim]
    length = box.size[shard.dim]
    candidates = range(parts)
    if shard.split == 1 and len(runs) == 1:
        first, number = runs[0]
        candidates = blocks_in(start - first, length, -(-number // parts), parts)
    for index in candidates:
        own = _shard(runs, shard.split, parts, index)
        if any(first < start + length and start < first + number for first, number in own):
            yield index, own


class WholeTensor(NamedTuple):
    """One whole tensor of a mesh job.

    ``layout`` is the number of one of the record's layouts; of replicas, the ``replica``-th rank wrote the part. If it
    is None, the parts are in the indexes of ``ranks``, cut in any way.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: int | None
    replica: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class MeshRecord:
    """The ``tensors`` of a group of ranks: first the model's, then the optimizer's, each in the order of its state."""

    layouts: tuple[Layout, ...]
    tensors: tuple[WholeTensor, ...]

    def writers(self, tensor: WholeTensor, box: Box) -> Iterator[int]:
        """Yield the global ranks that wrote parts of ``box`` of one of the tensors, and possibly others."""
        if tensor.layout is None:
            yield from tensor.ranks
            return
        layout = self.layouts[tensor.layout]
        for coordinate in layout.holders(tensor.shape, box):
            yield layout.rank_of(coordinate, tensor.replica)

    def to_json(self) -> dict[str, Any]:
        """Return the record's JSON, as plain values."""
        meshes = list(dict.fromkeys(layout.mesh for layout in self.layouts))
        layouts = [[meshes.index(each.mesh), list(map(_placement_fields, each.placements))] for each in self.layouts]
        tensors = [
            [each.name, each.dtype, each.shape, None, each.ranks]
            if each.layout is None
            else [each.name, each.dtype, each.shape, each.layout, each.replica]
            for each in self.tensors
        ]
        return {"meshes": [mesh_fields(mesh) for mesh in meshes], "layouts": layouts, "tensors": tensors}

    @staticmethod
    def from_json(fields: Any) -> MeshRecord:
        """Parse the record's JSON. Raises KeyError, TypeError or ValueError if it is invalid."""
        meshes = [mesh_of(mesh) for mesh in checked(list, fields["meshes"])]
        layouts = tuple(_layout(layout, meshes) for layout in checked(list, fields["layouts"]))
        return MeshRecord(layouts, tuple(_tensor(tensor, layouts) for tensor in checked(list, fields["tensors"])))


def mesh_fields(mesh: Mesh) -> dict[str, Any]:
    """Return the JSON of a mesh, as plain values."""
    in_order = mesh.ranks == tuple(range(len(mesh.ranks)))
    return {"names": list(mesh.names), "shape": list(mesh.shape), "ranks": None if in_order else list(mesh.ranks)}


def mesh_of(fields: Any) -> Mesh:
    """Parse a mesh's JSON. Raises KeyError, TypeError or ValueError if it is invalid."""
    names = tuple(map(checked_text, fields["names"]))
    shape = tuple(integers(fields["shape"]))
    size = prod(shape)
    if len(names) != len(shape) or not 0 < size <= RANKS:
        raise ValueError(f"a mesh of shape {shape} with {len(names)} names")
    ranks = tuple(range(size)) if fields["ranks"] is None else tuple(integers(fields["ranks"], size))
    if len(set(ranks)) != size:
        raise ValueError(f"a mesh of {size} ranks lists some of them twice")
    return Mesh(names, shape, ranks)


def _placement_fields(placement: Placement) -> list[int] | None:
    if placement is None:
        return None
    return [placement.dim] if placement.split == 1 else [placement.dim, placement.split]


def _layout(fields: Any, meshes: list[Mesh]) -> Layout:
    number, placements = checked(list, fields)
    mesh = meshes[integers([number])[0]]
    if len(placements) != len(mesh.shape):
        raise ValueError(f"{len(placements)} placements on a mesh of {len(mesh.shape)} dimensions")
    return Layout(mesh, tuple(None if each is None else Shard(*_numbers_of(each)) for each in placements))


def _numbers_of(placement: Any) -> list[int]:
    dim, *split = integers(checked(list, placement))
    if len(split) > 1 or not all(0 < factor <= RANKS for factor in split):
        raise ValueError(f"expected a dimension and at most a split factor, found {placement!r:.80}")
    return [dim, *split]


def _tensor(fields: Any, layouts: tuple[Layout, ...]) -> WholeTensor:
    name, dtype, sizes, layout, where = checked(list, fields)
    name = checked_text(name)
    dtype = checked(str, dtype)
    shape = tuple(integers(sizes))
    if layout is None:
        return WholeTensor(name, dtype, shape, None, 0, tuple(integers(checked(list, where))))
    integers([layout, where])
    own = layouts[layout]
    if where >= own.replicas:
        raise ValueError(f"{name}: replica {where} of {own.replicas}")
    if any(placement is not None and placement.dim >= len(shape) for placement in own.placements):
        raise ValueError(f"{name}: of shape {shape}, sharded along a dimension that it does not have")
    return WholeTensor(name, dtype, shape, layout, where)


class MeshPlace(NamedTuple):
    """One of a rank's meshes, as sent to other ranks: a digest of its ranks, and the rank's place in it (row-major).

    Only the first rank of a mesh sends ``ranks``.
    """

    digest: str
    names: Sequence[str]
    shape: Sequence[int]
    place: int
    ranks: Sequence[int] | None = None


class RankStructure(NamedTuple):
    """A rank's state as sent to other ranks: a digest of all but its meshes' ranks, and the meshes."""

    structure: str
    meshes: Sequence[MeshPlace]


@dataclass(frozen=True)
class MeshGroup:
    """Ranks, ascending, that hold the same tensors, and the stacked meshes of these tensors."""

    ranks: tuple[int, ...]
    meshes: tuple[Mesh, ...] = ()

    @property
    def plain(self) -> Layout:
        """Layout of tensors that are on no mesh: each rank holds them whole."""
        return Layout(Mesh(("",), (len(self.ranks),), self.ranks), (None,))

    def layout(self, mesh: Mesh, placements: tuple[Placement, ...]) -> Layout | None:
        """Return the layout on the stacked mesh of tensors on a rank's own ``mesh``.

        None if the group does not have it.
        """
        for stacked in self.meshes:
            first = stacked.coordinate_of(mesh.ranks[0])
            if first is None or stacked.shape[1:] != mesh.shape:
                continue
            start = first[0] * len(mesh.ranks)
            if stacked.ranks[start : start + len(mesh.ranks)] == mesh.ranks:
                return Layout(stacked, (None, *placements))
        return Layout(_stacked([mesh]), (None, *placements)) if set(mesh.ranks) == set(self.ranks) else None

    def to_json(self) -> dict[str, Any]:
        return {"ranks": list(self.ranks), "meshes": [mesh_fields(mesh) for mesh in self.meshes]}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> MeshGroup:
        return MeshGroup(tuple(fields["ranks"]), tuple(mesh_of(mesh) for mesh in fields["meshes"]))


class OutsideOfGroup(Exception):
    """A mesh of ``rank`` includes ranks outside of its group; ``other`` is one of them, if known."""

    def __init__(self, rank: int, other: int | None) -> None:
        super().__init__(rank, other)
        self.rank: int = rank
        self.other: int | None = other


def groups_of(structures: Sequence[RankStructure]) -> list[MeshGroup]:
    """Return the groups of a job, in the order of their first ranks, from the structures of all ranks.

    Raises:
        OutsideOfGroup: a mesh is not all in one group.
    """
    members: dict[tuple[Any, ...], list[int]] = {}
    for rank, each in enumerate(structures):
        shapes = tuple((tuple(mesh.names), tuple(mesh.shape)) for mesh in each.meshes)
        members.setdefault((each.structure, shapes), []).append(rank)
    return [
        MeshGroup(tuple(ranks), tuple(_joined(structures, ranks, number) for number in range(len(shapes))))
        for (_, shapes), ranks in members.items()
    ]


def leaders_of(groups: Sequence[MeshGroup] | None) -> dict[int, int] | None:
    """Return the first rank of the group of each rank of a mesh job; None without one."""
    return None if groups is None else {rank: group.ranks[0] for group in groups for rank in group.ranks}


def _joined(structures: Sequence[RankStructure], ranks: Sequence[int], number: int) -> Mesh:
    """Stack the meshes ``number`` of a group's ``ranks``."""
    places_by_digest: dict[str, dict[int, int]] = {}
    for rank in ranks:
        mesh = structures[rank].meshes[number]
        places_by_digest.setdefault(mesh.digest, {})[mesh.place] = rank
    stack = []
    for digest, places in places_by_digest.items():
        rank = next(iter(places.values()))
        names = structures[rank].meshes[number].names
        shape = tuple(structures[rank].meshes[number].shape)
        own = tuple(rank for _, rank in sorted(places.items()))
        listed = structures[own[0]].meshes[number].ranks
        if len(places) != prod(shape) or listed is None or tuple(listed) != own:
            outsiders = (
                other
                for other, each in enumerate(structures)
                if other not in ranks and any(mesh.digest == digest for mesh in each.meshes)
            )
            raise OutsideOfGroup(rank, next(outsiders, None))
        stack.append(Mesh(tuple(names), shape, own))
    return _stacked(stack)


def _stacked(meshes: Sequence[Mesh]) -> Mesh:
    first = meshes[0]
    ranks = tuple(rank for mesh in meshes for rank in mesh.ranks)
    return Mesh(("", *first.names), (len(meshes), *first.shape), ranks)


@dataclass(frozen=True)
class Placed:
    """The position of a tensor of ``shape`` on a mesh, seen by the rank at ``coordinate``."""

    layout: Layout
    shape: tuple[int, ...]
    coordinate: Coordinate

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The boxes of the tensor that make up this rank's local one."""
        return self.layout.pieces(self.shape, self.coordinate)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.layout.local_shape(self.shape, self.coordinate)
