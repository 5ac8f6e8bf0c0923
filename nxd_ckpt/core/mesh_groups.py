"""Groups of a mesh job: ranks that hold the same tensors in the same way, on their own meshes. Pure.

A mesh need not span the job: pipeline stages hold other tensors, and FSDP over two ranks of each of four
tensor-parallel groups uses four meshes. So ranks whose states are alike (names, dtypes, shapes, placements) are a
*group*. Meshes at the same place of these states are stacked into one, over whose first dimension everything is
replicated. Each rank then derives from its group alone which ranks write what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from nxd_ckpt.core.mesh import Layout, Mesh, Placement
from nxd_ckpt.core.mesh_record import mesh_fields, mesh_of


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
        self.rank, self.other = rank, other


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


def _joined(structures: Sequence[RankStructure], ranks: Sequence[int], number: int) -> Mesh:
    """Stack the meshes ``number`` of a group's ``ranks``."""
    places_by_digest: dict[str, dict[int, int]] = {}
    for rank in ranks:
        mesh = structures[rank].meshes[number]
        places_by_digest.setdefault(mesh.digest, {})[mesh.place] = rank
    stack = []
    for digest, places in places_by_digest.items():
        rank = next(iter(places.values()))
        names, shape = structures[rank].meshes[number].names, tuple(structures[rank].meshes[number].shape)
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
