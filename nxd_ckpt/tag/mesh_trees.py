"""Trees of a tag that a mesh job saved: whole tensors whose parts are looked up on demand.

A tensor's parts follow from its layout and from the indexes of the ranks that wrote them (`core.mesh`): reading
a box needs the indexes of those ranks only, and none of their files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nxd_ckpt.core import names
from nxd_ckpt.core.box import Box, is_tiling
from nxd_ckpt.core.manifest import RankIndex, TensorEntry
from nxd_ckpt.core.mesh import Layout, Mesh, MeshRecord, WholeTensor
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.formats.crc32 import digest_of_value
from nxd_ckpt.formats.optimizer_trees import options_of, restore_types
from nxd_ckpt.formats.strides import noted
from nxd_ckpt.formats.tensors import (
    Assembly,
    DeferredAssembly,
    Fragment,
    TensorReference,
    TensorStub,
    by_digest,
    digest_of,
    iter_leaves,
    map_tensors,
)
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.tag.verification import Entries, stub_of

_PREFIXES = {names.MODEL_DIR: "model/", names.OPTIMIZER_DIR: "optim/"}


@dataclass(frozen=True)
class MeshTrees:
    """Trees of the tag ``where``, whose indexes ``index`` returns by global rank.

    ``verify`` compares a file with its rank's index, ``verify_size`` only its size. Tensor entries that are read are
    added to ``entries``. ``own`` is a rank that loads, and the names of its model: if its group saved this model, it
    takes what that saved.
    """

    where: str
    files: TagFiles
    leaders: Sequence[int]
    index: Callable[[int], RankIndex]
    verify: Callable[[str, int], None]
    verify_size: Callable[[str, int], None]
    entries: Entries
    own: tuple[int, Collection[str]] | None = None
    _written: dict[int, Mapping[str, Sequence[TensorEntry]]] = field(default_factory=dict)
    _sized: set[str] = field(default_factory=set)

    def model(self) -> dict[str, Any]:
        """Return the model's state dict; where several groups have a name, the own one wins, else the first."""
        tree: dict[str, Any] = {}
        for leader in self._ordered:
            tree = {**self._tree(names.MODEL_DIR, leader), **tree} if tree else self._tree(names.MODEL_DIR, leader)
        return tree

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state dict, with parameters numbered in the order of `optimizer_names`."""
        trees = [restore_types(self._tree(names.OPTIMIZER_DIR, leader)) for leader in self._ordered]
        if len(trees) == 1:
            return trees[0]
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for group, (options, states) in enumerate(self._groups(trees)):
            first = sum(len(before["params"]) for before in groups[:group])
            state |= {first + number: entries for number, (_, entries) in enumerate(states) if entries}
            groups.append({**options, "params": list(range(first, first + len(states)))})
        for tree in reversed(trees):
            state |= {key: value for key, value in tree["state"].items() if isinstance(key, str)}
        return {"state": state, "param_groups": groups}

    def with_shards(self, own: dict[str, Any], rank: int) -> dict[str, Any]:
        """Return an optimizer that is all the global ``rank``'s own, with its DTensors in place of references."""
        leader = next(leader for leader in self.leaders if self._holds(leader, rank))
        layouts = self._record(leader).layouts
        shards = [
            tensor
            for tensor in self._tensors(names.OPTIMIZER_DIR, leader)
            if tensor.layout is not None and len(layouts[tensor.layout].mesh.shape) > 1
        ]
        return self._followed(own, shards, leader, "the rank's own optimizer")

    def optimizer_names(self) -> list[str] | None:
        """Return the parameter behind each index of the optimizer's state; None if the tag does not record it."""
        if len(self.leaders) == 1:
            recorded = self.index(self.leaders[0]).optimizer_names
            return None if recorded is None else list(recorded)
        trees = [self._tree(names.OPTIMIZER_DIR, leader) for leader in self._ordered]
        return [name for _, states in self._groups(trees) for name, _ in states]

    def meshes(self) -> list[Mesh]:
        """Return the meshes of its DTensors; the first dimension counts equal meshes."""
        layouts = (layout for leader in self.leaders for layout in self._record(leader).layouts)
        return list(dict.fromkeys(layout.mesh for layout in layouts if len(layout.mesh.shape) > 1))

    def meshes_of(self, rank: int, part: str) -> set[Mesh]:
        """Return the meshes that the global ``rank`` was in, of the tensors whose names begin with ``part``."""
        meshes = {layout.mesh for layout in self.layouts(part).values()}
        return {own for mesh in meshes if (own := mesh.of_stack(rank)) is not None}

    def layouts(self, part: str) -> dict[str, Layout]:
        """Return the layouts of the tensors whose names begin with ``part``, by the rest of the name.

        Those that were cut in any way have none.
        """
        return {
            tensor.name.removeprefix(part): record.layouts[tensor.layout]
            for record in map(self._record, reversed(self._ordered))
            for tensor in record.tensors
            if tensor.layout is not None and tensor.name.startswith(part)
        }

    def plain_entries(self) -> Iterator[tuple[str, str]]:
        """Yield parameter and the rest of the name of an optimizer's plain tensors, of parameters that are DTensors."""
        plain: list[tuple[str, str]] = []
        placed = set()
        for name, layout in self.layouts("").items():
            part, _, rest = name.partition("/")
            parameter, _, entry = (rest, "", "") if part == "model" else rest.partition("/")
            if len(layout.mesh.shape) > 1:
                placed.add(parameter)
            elif part == "optim":
                plain.append((parameter, entry))
        return ((parameter, entry) for parameter, entry in plain if parameter in placed)

    @cached_property
    def differing(self) -> list[str]:
        """Return the names under which groups saved different things, unless the own one's are taken."""
        named = [] if self.takes_own or len(self.leaders) == 1 else list(map(self._named, self.leaders))
        first: dict[str, Any] = {}
        return [
            name
            for own in named
            for name, value in own.items()
            if first.setdefault(name, value) is not value and _differs(first[name], value)
        ]

    def _named(self, leader: int) -> dict[str, Any]:
        """Return what a group saved by name: entries of its model, and the state of its optimizer."""
        named: dict[str, Any] = {}
        if self.files.has(names.structure_file(names.MODEL_DIR, leader)):
            named |= {f"model/{name}": value for name, value in self._tree(names.MODEL_DIR, leader).items()}
        if self.files.has(names.structure_file(names.OPTIMIZER_DIR, leader)):
            state = self._tree(names.OPTIMIZER_DIR, leader)["state"]
            named |= {f"optim/state/{key}": value for key, value in state.items() if isinstance(key, str)}
            for number, name in enumerate(self.index(leader).optimizer_names or ()):
                named |= {f"optim/{name}/{entry}": value for entry, value in state.get(number, {}).items()}
        return named

    @cached_property
    def _ordered(self) -> list[int]:
        """The leaders, that of the own group first."""
        return sorted(self.leaders, key=lambda leader: leader != self._own_leader)

    @property
    def takes_own(self) -> bool:
        """True if the group of the rank that loads comes first."""
        return self._own_leader is not None

    @cached_property
    def _own_leader(self) -> int | None:
        if self.own is None or len(self.leaders) == 1:
            return None
        rank, model = self.own
        for leader in self.leaders:
            if self._holds(leader, rank) and self._tree(names.MODEL_DIR, leader).keys() == set(model):
                return leader
        return None

    def _holds(self, leader: int, rank: int) -> bool:
        """Return whether the rank is in the group with this leader."""
        return any(rank in layout.mesh.ranks for layout in self._record(leader).layouts)

    def _groups(self, trees: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[tuple[str, Any]]]]:
        """Return each param group's options, with name and state of each of its parameters.

        Param groups of several groups of ranks are merged if they have the same number and the same options.
        """
        groups: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
        for leader, tree in zip(self._ordered, trees, strict=True):
            listed = iter(self.index(leader).optimizer_names or ())
            for number, group in enumerate(tree["param_groups"]):
                options = options_of(group)
                key = number, by_digest(options)
                states = next((states for at, earlier, states in groups if (at, by_digest(earlier)) == key), None)
                if states is None:
                    states = {}
                    groups.append((number, options, states))
                for index in group["params"]:
                    name = next(listed, f"#{leader}.{index}")
                    if not (self.takes_own and any(name in others for *_, others in groups)):
                        states.setdefault(name, tree["state"].get(index, {}))
        return [(options, list(states.items())) for _, options, states in groups]

    def _tree(self, directory: str, leader: int) -> dict[str, Any]:
        file = names.structure_file(directory, leader)
        self.verify(file, leader)
        return self._followed(self.files.tree(file), self._tensors(directory, leader), leader, self.files.where(file))

    def _tensors(self, directory: str, leader: int) -> list[WholeTensor]:
        return [one for one in self._record(leader).tensors if one.name.startswith(_PREFIXES[directory])]

    def _followed(self, tree: Any, tensors: Sequence[WholeTensor], leader: int, where: str) -> dict[str, Any]:
        """Return the tree with the ``tensors`` of a group, by number, in place of references."""
        record = self._record(leader)

        def whole(reference: TensorReference) -> Assembly:
            tid = reference.tid
            if tid >= len(tensors):
                raise MalformedFile(f"{where}: tensor {tid} is not in the index of rank {leader}")
            tensor = tensors[tid]
            stride = noted(reference.noted)
            return DeferredAssembly(
                tensor.dtype, tensor.shape, lambda box: self._fragments(record, tensor, box), stride
            )

        followed: dict[str, Any] = map_tensors(tree, whole, TensorReference)
        return followed

    def _record(self, leader: int) -> MeshRecord:
        record = self.index(leader).mesh
        if record is None:
            raise MalformedFile(f"{self.where}: the index of rank {leader}, a leader, has no {'mesh'!r}: damaged")
        return record

    def _fragments(self, record: MeshRecord, tensor: WholeTensor, box: Box) -> tuple[Fragment, ...]:
        """Return the parts that make up ``box`` of the tensor."""
        writers = record.writers(tensor, box)
        fragments = tuple(fragment for rank in writers for fragment in self._fragments_of(rank, tensor, box))
        if not is_tiling(Box.whole(box.size), [fragment.target for fragment in fragments]):
            raise MalformedFile(
                f"{self.where}: the parts of {tensor.name} in the indexes do not cover {box}, each element once"
            )
        return fragments

    def _fragments_of(self, rank: int, tensor: WholeTensor, box: Box) -> Iterator[Fragment]:
        entries = self._entries_of(rank).get(tensor.name, ())
        wrong = [entry for entry in entries if entry.pieces is None or entry.dtype != tensor.dtype]
        if wrong or not entries:
            actual = f"{wrong[0].dtype} {wrong[0].shape}" if wrong else "none"
            where = f"{self.where}: the index of rank {rank}"
            raise MalformedFile(f"{where}: expected a {tensor.dtype} part of {tensor.name}, found {actual}")
        for entry in entries:
            pieces = entry.pieces or ()
            common = [(piece, part) for piece in pieces if (part := piece.box.intersect(box)) is not None]
            if common:
                stub = self._stub(rank, entry)
                yield from (Fragment(stub, piece.local_of(part), part.shifted(box.offset)) for piece, part in common)

    def _entries_of(self, rank: int) -> Mapping[str, Sequence[TensorEntry]]:
        """Return the rank's entries by name; a tensor that torch DCP has in several chunks has several."""
        if rank not in self._written:
            entries: dict[str, list[TensorEntry]] = {}
            for entry in self.index(rank).tensors:
                entries.setdefault(entry.name, []).append(entry)
            self._written[rank] = entries
        return self._written[rank]

    def _stub(self, rank: int, entry: TensorEntry) -> TensorStub:
        about = self.index(rank).files.get(entry.file)
        if about is None:
            raise PartNotFound(f"{self.where}: the index of rank {rank} does not list {entry.file}, where tensors lie")
        if entry.file not in self._sized:
            self.verify_size(entry.file, about.nbytes)
            self._sized.add(entry.file)
        self.entries[entry.file, entry.offset] = entry
        return stub_of(entry)


def _differs(one: Any, other: Any) -> bool:
    """Return whether two trees differ in a value, or in a part of a tensor that both have in one piece."""
    leaves = dict(iter_leaves(one))
    others = dict(iter_leaves(other))
    return leaves.keys() != others.keys() or any(_leaf_differs(leaves[path], others[path]) for path in leaves)


def _leaf_differs(one: Any, other: Any) -> bool:
    if not (isinstance(one, Assembly) and isinstance(other, Assembly)):
        return digest_of_value(one) != digest_of_value(other)
    parts, others = ({str(part.target): digest_of(part.stub) for part in each.fragments} for each in (one, other))
    return any(parts[target] != others[target] for target in parts.keys() & others.keys())
