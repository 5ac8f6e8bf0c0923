"""What a rank of a mesh job writes: its boxes of the tensors, of what replicas hold its share of them.

Each rank's plan follows from its own state and its group (core.mesh_groups) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from math import prod
from typing import Any

from nxd_ckpt.core import names
from nxd_ckpt.core.mesh import Layout, Mesh
from nxd_ckpt.core.mesh_groups import MeshGroup
from nxd_ckpt.core.mesh_record import MeshRecord, WholeTensor
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.formats import xser
from nxd_ckpt.formats.tensors import itemsize, iter_tensors
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.live.dtensor import Placed
from nxd_ckpt.live.parameters import form_of
from nxd_ckpt.live.state import State, StateTensor
from nxd_ckpt.save.planned_file import NamedTensor, PlannedFile

WORTH_A_WRITER = 64 * 2**20
"""Bytes of tensors for which one more replica writes: who loads reads the index of each that wrote."""

DIRECTORIES = {"model": names.MODEL_DIR, "optimizer": names.OPTIMIZER_DIR}


@dataclass(frozen=True)
class Held:
    """A tensor as this rank holds it: ``leaf`` is its part, ``placed`` how it lies on the ranks of the group."""

    leaf: Any
    about: StateTensor
    placed: Placed

    @property
    def tie(self) -> Hashable:
        """Equal for names of the same memory."""
        return id(self.leaf) if self.about.tie is None else self.about.tie


@dataclass
class MeshPlan:
    """The plan of the global ``rank`` for the state ``parts``: model and optimizer, by field of SaveState.

    Ranks are places among the ``members`` of the process group that saves, where not all ranks of the job do.

    Raises UnsupportedState for a DTensor on a mesh that the group does not know.
    """

    parts: dict[str, State]
    group: MeshGroup
    rank: int
    members: tuple[int, ...] | None = None
    _layouts: dict[Any, tuple[int, Layout]] = field(default_factory=dict)

    @cached_property
    def held(self) -> dict[str, list[Held]]:
        """Every tensor of each part, in the order of its tree."""
        return {part: [self._held(*found) for found in _described(state)] for part, state in self.parts.items()}

    @cached_property
    def record(self) -> MeshRecord:
        """All whole tensors of the group, and which replica writes each: the same on all of its ranks."""
        tensors = []
        for held in self.held.values():
            replicas = _dealt(held)
            for one, replica in zip(held, replicas, strict=True):
                number = self._numbers[id(one.placed.layout)]
                tensors.append(WholeTensor(one.about.name, form_of(one.leaf)[0], one.placed.shape, number, replica))
        return MeshRecord(tuple(layout for _, layout in self._layouts.values()), tuple(tensors))

    @property
    def digest(self) -> str:
        """Equal on ranks with the same record."""
        return sha256(self.record.text().encode()).hexdigest()[:32]

    @property
    def leads(self) -> bool:
        return self.rank == self.group.ranks[0]

    def files(self) -> Iterator[PlannedFile]:
        """What this rank writes."""
        tensors = iter(self.record.tensors)
        for part, state in self.parts.items():
            mine = [one for one in self.held[part] if _is_mine(one, next(tensors).replica)]
            if mine:
                yield _shard_file(names.shard_file(DIRECTORIES[part], self.rank), mine, part)
            if self.leads:
                key, references = names.structure_file(DIRECTORIES[part], self.rank), xser.references_of(state.tree)
                yield PlannedFile(key, image_of(references), part=part, contents=xser.references_of)

    def _held(self, leaf: Any, about: StateTensor) -> Held:
        placed = about.placed
        if placed is None:
            layout, shape = self._kept(None, lambda: self.group.plain), form_of(leaf)[1]
        else:
            key = id(placed.layout.mesh), placed.layout.placements
            layout, shape = self._kept(key, lambda: self._on_group(about.name, placed)), placed.shape
        coordinate = layout.mesh.coordinate_of(self.rank)
        assert coordinate is not None
        return Held(leaf, about, Placed(layout, shape, coordinate))

    def _kept(self, key: Any, make: Callable[[], Layout]) -> Layout:
        if key not in self._layouts:
            self._layouts[key] = len(self._layouts), make()
        return self._layouts[key][1]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(layout): number for number, layout in self._layouts.values()}

    def _on_group(self, name: str, placed: Placed) -> Layout:
        layout = self.group.layout(mesh_among(self.members, name, placed.layout.mesh), placed.layout.placements)
        if layout is None:
            raise UnsupportedState(
                f"{name} is a DTensor on the mesh of ranks {list(placed.layout.mesh.ranks[:8])}, which is not all of "
                "the job, and no tensor of this Checkpointer's first save was on it, so who else holds the tensor is "
                "not known: save it with a Checkpointer of its own"
            )
        return layout


def mesh_among(members: tuple[int, ...] | None, name: str, mesh: Mesh) -> Mesh:
    """The mesh of the tensor of that name, with its ranks as places among ``members``.

    Raises UnsupportedState for ranks that are not in the process group.
    """
    if members is None:
        return mesh
    own = mesh.within(members)
    if own is None:
        raise UnsupportedState(
            f"{name} is a DTensor on the mesh of ranks {list(mesh.ranks[:8])}, but process_group= has the ranks "
            f"{list(members[:8])}: pass the group of all ranks that hold the tensor"
        )
    return own


def _described(state: State) -> Iterator[tuple[Any, StateTensor]]:
    return ((leaf, state.tensors[path]) for path, leaf in iter_tensors(state.tree))


def _dealt(held: Sequence[Held]) -> list[int]:
    """Which replica writes each tensor: by the bytes of the whole ones, so that all shards of one are alike."""
    found = [0] * len(held)
    by_layout: dict[int, dict[Hashable, list[int]]] = {}
    for number, one in enumerate(held):
        if one.placed.layout.replicas > 1:
            by_layout.setdefault(id(one.placed.layout), {}).setdefault(one.tie, []).append(number)
    for ties in by_layout.values():
        firsts = [held[numbers[0]] for numbers in ties.values()]
        sizes = [prod(one.placed.shape) * itemsize(form_of(one.leaf)[0]) for one in firsts]
        writers = min(firsts[0].placed.layout.replicas, 1 + sum(sizes) // WORTH_A_WRITER)
        replicas = xser.balance(sizes, writers)
        for numbers, replica in zip(ties.values(), replicas, strict=True):
            for number in numbers:
                found[number] = replica
    return found


def _is_mine(one: Held, replica: int) -> bool:
    placed = one.placed
    return bool(placed.pieces) and placed.layout.replica_of(placed.coordinate) == replica


def _shard_file(key: str, mine: Sequence[Held], part: str) -> PlannedFile:
    ties = {id(one.leaf): one.tie for one in mine}
    tree = {one.about.name.partition("/")[2]: one.leaf for one in mine}
    image = image_of(tree, tensor_key=lambda tensor: ties[id(tensor)])
    storage_of = {ties[id(tensor)]: index for index, tensor in enumerate(image.tensors)}
    entries = []
    for one in mine:
        dtype, shape = form_of(one.leaf)
        entries.append(NamedTensor(one.about.name, storage_of[one.tie], dtype, shape, one.placed.pieces))
    return replace(PlannedFile(key, image, tuple(entries)), part=part)
