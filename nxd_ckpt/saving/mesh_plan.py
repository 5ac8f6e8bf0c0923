"""Files that a rank of a mesh job writes: its boxes of the tensors, and its share of those that replicas hold.

Each rank's plan follows from its own state and its group (core.mesh) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Any

from nxd_ckpt.core import document, names
from nxd_ckpt.core.mesh import Layout, Mesh, MeshGroup, MeshRecord, Placed, WholeTensor
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.formats import xser
from nxd_ckpt.formats.state import State, StateTensor
from nxd_ckpt.formats.tensors import form_of, iter_tensors, nbytes_of
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.live.dtensor import described_layout
from nxd_ckpt.live.state_names import is_in
from nxd_ckpt.saving.planned_file import NamedLeaf, PlannedFile, file_of
from nxd_ckpt.saving.replicas import Replica

WORTH_A_WRITER = 64 * 2**20
"""Bytes of tensors for which one more replica writes: a load reads the index of each rank that wrote."""

Form = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""

DIRECTORIES = {"model": names.MODEL_DIR, "optimizer": names.OPTIMIZER_DIR}


@dataclass(frozen=True)
class LocalTensor:
    """A tensor of this rank: ``leaf`` is its part, ``placed`` the layout on the ranks of the group."""

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

    Ranks are places among the ``members`` of the process group that saves, if it is not the whole job. ``agreed`` are
    name, dtype and shape of the tensors that all ranks hold, None for all: of other plain ones the first rank writes
    its own.

    Raises UnsupportedState for a DTensor on a mesh that the group does not know.
    """

    parts: dict[str, State]
    group: MeshGroup
    rank: int
    members: tuple[int, ...] | None = None
    agreed: Collection[Form] | None = None
    _layouts: dict[Any, Layout] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> dict[str, list[LocalTensor]]:
        """Every tensor of each part, in the order of its tree."""
        return {
            part: [self._local_tensor(leaf, state.tensors[path]) for path, leaf in iter_tensors(state.tree)]
            for part, state in self.parts.items()
        }

    @cached_property
    def record(self) -> MeshRecord:
        """All whole tensors of the group, and the replica that writes each: the same on all of its ranks."""
        tensors = []
        for local in self.tensors.values():
            replicas = iter(_assign_replicas([tensor for tensor in local if not self._may_differ(tensor)]))
            for tensor in local:
                number = self._numbers[id(tensor.placed.layout)]
                dtype = form_of(tensor.leaf)[0]
                writes = 0 if self._may_differ(tensor) else next(replicas)
                tensors.append(WholeTensor(tensor.about.name, dtype, tensor.placed.shape, number, writes))
        return MeshRecord(self._ordered_layouts, tuple(tensors))

    @property
    def digest(self) -> str:
        """Equal on ranks with the same record, apart from tensors that may differ, or plain ones that one rank writes.
        """
        about = chain.from_iterable(self.tensors.values())
        tensors = list(zip(self.record.tensors, about, strict=True))
        plain = [whole for whole, tensor in tensors if tensor.about.placed is None and not self._may_differ(tensor)]
        shared = plain if any(whole.replica for whole in plain) else []
        placed = [whole for whole, tensor in tensors if tensor.about.placed is not None]
        record = MeshRecord(self._placed_layouts, (*placed, *shared))
        return sha256(document.plain(record.to_json()).encode()).hexdigest()[:32]

    @property
    def leads(self) -> bool:
        return self.rank == self.group.ranks[0]

    def files(self) -> Iterator[PlannedFile]:
        """Yield the files that this rank writes."""
        tensors = iter(self.record.tensors)
        for part, state in self.parts.items():
            mine = [tensor for tensor in self.tensors[part] if _is_mine(tensor, next(tensors).replica)]
            if mine:
                yield _shard_file(names.shard_file(DIRECTORIES[part], self.rank), mine, part)
            if self.leads:
                key = names.structure_file(DIRECTORIES[part], self.rank)
                references = xser.references_of(state.tree)
                yield PlannedFile(key, image_of(references, records=True), part=part, contents=xser.references_of)

    def copies(self) -> Iterator[Replica]:
        """Yield the tensors that other ranks hold too, without their places in files."""
        tensors = iter(self.record.tensors)
        for part, local in self.tensors.items():
            for number, (tensor, whole) in enumerate(zip(local, tensors, strict=False)):
                layout = tensor.placed.layout
                at = tensor.placed.coordinate
                own = tensor.about.placed
                if layout.replicas > 1 and (own is None or tensor.placed.pieces):
                    mesh = None if own is None else described_layout(own.layout)
                    what = part if own is None else f"{part} {self._numbers[id(layout)]}"
                    name = tensor.about.name
                    writes = layout.rank_of(at, whole.replica)
                    yield Replica.of(part, number, name, tensor.leaf, writes, what, mesh=mesh)

    def _may_differ(self, tensor: LocalTensor) -> bool:
        """Return whether other ranks of the mesh may hold another tensor: of an optimizer any plain one."""
        about = tensor.about
        form = about.name, form_of(tensor.leaf)[0], tensor.placed.shape
        is_agreed = self.agreed is None or form in self.agreed
        return about.placed is None and (is_in("optimizer", about.name) or not is_agreed)

    def _local_tensor(self, leaf: Any, about: StateTensor) -> LocalTensor:
        placed = about.placed
        if placed is None:
            layout = self._cached_layout(None, lambda: self.group.plain)
            shape = form_of(leaf)[1]
        else:
            key = id(placed.layout.mesh), placed.layout.placements
            layout = self._cached_layout(key, lambda: self._on_group(about.name, placed))
            shape = placed.shape
        coordinate = layout.mesh.coordinate_of(self.rank)
        assert coordinate is not None
        return LocalTensor(leaf, about, Placed(layout, shape, coordinate))

    def _cached_layout(self, key: Any, make: Callable[[], Layout]) -> Layout:
        if key not in self._layouts:
            self._layouts[key] = make()
        return self._layouts[key]

    @cached_property
    def _ordered_layouts(self) -> tuple[Layout, ...]:
        """The layouts, last that of plain tensors, which not all ranks need have."""
        return (*self._placed_layouts, *(layout for key, layout in self._layouts.items() if key is None))

    @property
    def _placed_layouts(self) -> tuple[Layout, ...]:
        return tuple(layout for key, layout in self._layouts.items() if key is not None)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(layout): number for number, layout in enumerate(self._ordered_layouts)}

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
    """Return the mesh of the tensor of that name, with its ranks as places among ``members``.

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


def _assign_replicas(tensors: Sequence[LocalTensor]) -> list[int]:
    """Return the replica that writes each tensor: by the bytes of the whole ones, so that all shards of one agree."""
    replica_of = [0] * len(tensors)
    by_layout: dict[int, dict[Hashable, list[int]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.placed.layout.replicas > 1:
            by_layout.setdefault(id(tensor.placed.layout), {}).setdefault(tensor.tie, []).append(number)
    for ties in by_layout.values():
        firsts = [tensors[numbers[0]] for numbers in ties.values()]
        sizes = [nbytes_of(form_of(tensor.leaf)[0], tensor.placed.shape) for tensor in firsts]
        writers = min(firsts[0].placed.layout.replicas, 1 + sum(sizes) // WORTH_A_WRITER)
        replicas = xser.balance(sizes, writers)
        for numbers, replica in zip(ties.values(), replicas, strict=True):
            for number in numbers:
                replica_of[number] = replica
    return replica_of


def _is_mine(tensor: LocalTensor, replica: int) -> bool:
    placed = tensor.placed
    return bool(placed.pieces) and placed.layout.replica_of(placed.coordinate) == replica


def _shard_file(key: str, mine: Sequence[LocalTensor], part: str) -> PlannedFile:
    tree = {tensor.about.name.partition("/")[2]: tensor.leaf for tensor in mine}
    leaves = [NamedLeaf(tensor.leaf, tensor.tie, tensor.about.name, tensor.placed.pieces) for tensor in mine]
    return replace(file_of(key, tree, leaves), part=part)
