"""The groups of a mesh job: ranks that hold the same tensors in the same way, on meshes of their own. Pure.

A job is all of its ranks, and no mesh need be all of them: pipeline stages hold other tensors, and what FSDP shards
over two ranks of each of four tensor-parallel groups is on four meshes. So ranks whose states are alike (names, dtypes,
shapes, placements) are a *group*. Its meshes that stand at the same place of these states are stacked into one, whose
first dimension everything is replicated over. Who writes what then follows for each rank alone, from its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from nxd_ckpt.core.mesh import Layout, Mesh, Placement
from nxd_ckpt.core.mesh_record import mesh_fields, mesh_of


class MeshPlace(NamedTuple):
    """One of a rank's meshes, as it tells the others: a digest of its ranks, and the rank's place in it (row-major).

    ``ranks`` are only in the word of the first of them.
    """

    digest: str
    names: Sequence[str]
    shape: Sequence[int]
    place: int
    ranks: Sequence[int] | None = None


class MeshWord(NamedTuple):
    """What a rank says of its state: a digest of all of it but the ranks of its meshes, and those."""

    structure: str
    meshes: Sequence[MeshPlace]


@dataclass(frozen=True)
class MeshGroup:
    """Ranks, ascending, that hold the same tensors, and the stacked meshes that these lie on."""

    ranks: tuple[int, ...]
    meshes: tuple[Mesh, ...] = ()

    @property
    def plain(self) -> Layout:
        """Of tensors that lie on no mesh: each rank holds them whole."""
        return Layout(Mesh(("",), (len(self.ranks),), self.ranks), (None,))

    def layout(self, mesh: Mesh, placements: tuple[Placement, ...]) -> Layout | None:
        """Of tensors on a rank's own ``mesh``: that on the stacked one. None where the group does not know it."""
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
    """The mesh of ``rank`` has ranks that hold other tensors, or not in its way; ``other`` is one of them, if known."""

    def __init__(self, rank: int, other: int | None) -> None:
        super().__init__(rank, other)
        self.rank, self.other = rank, other


def groups_of(words: Sequence[MeshWord]) -> list[MeshGroup]:
    """The groups of a job, in the order of their first ranks, from the words of all ranks.

    Raises:
        OutsideOfGroup: a mesh is not all in one group.
    """
    members: dict[tuple[Any, ...], list[int]] = {}
    for rank, word in enumerate(words):
        shapes = tuple((tuple(mesh.names), tuple(mesh.shape)) for mesh in word.meshes)
        members.setdefault((word.structure, shapes), []).append(rank)
    return [
        MeshGroup(tuple(ranks), tuple(_joined(words, ranks, number) for number in range(len(shapes))))
        for (_, shapes), ranks in members.items()
    ]


def _joined(words: Sequence[MeshWord], ranks: Sequence[int], number: int) -> Mesh:
    """The meshes at place ``number`` of the words of a group's ``ranks``, stacked."""
    found: dict[str, dict[int, int]] = {}
    for rank in ranks:
        mesh = words[rank].meshes[number]
        found.setdefault(mesh.digest, {})[mesh.place] = rank
    stack = []
    for digest, places in found.items():
        rank = next(iter(places.values()))
        names, shape = words[rank].meshes[number].names, tuple(words[rank].meshes[number].shape)
        own = tuple(rank for _, rank in sorted(places.items()))
        said = words[own[0]].meshes[number].ranks
        if len(places) != prod(shape) or said is None or tuple(said) != own:
            strangers = (
                other
                for other, word in enumerate(words)
                if other not in ranks and any(mesh.digest == digest for mesh in word.meshes)
            )
            raise OutsideOfGroup(rank, next(strangers, None))
        stack.append(Mesh(tuple(names), shape, own))
    return _stacked(stack)


def _stacked(meshes: Sequence[Mesh]) -> Mesh:
    first = meshes[0]
    ranks = tuple(rank for mesh in meshes for rank in mesh.ranks)
    return Mesh(("", *first.names), (len(meshes), *first.shape), ranks)
