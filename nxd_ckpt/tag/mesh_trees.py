"""The trees of a tag that a mesh job saved: of whole tensors, whose parts are looked up when they are asked for.

What a tensor's parts are follows from its layout and from the indexes of the ranks that wrote them (core.mesh_record):
who asks for a box reads the indexes of those ranks only, and none of their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core import names
from nxd_ckpt.core.box import Box, is_tiling
from nxd_ckpt.core.manifest import RankIndex, TensorEntry
from nxd_ckpt.core.mesh import Mesh
from nxd_ckpt.core.mesh_record import MeshRecord, WholeTensor
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.formats import xser
from nxd_ckpt.formats.strides import noted
from nxd_ckpt.formats.tensors import Assembly, DeferredAssembly, Fragment, TensorReference, TensorStub, by_digest
from nxd_ckpt.live.optimizer_state import options_of
from nxd_ckpt.live.optimizer_types import restore_types
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.verification import Entries, stub_of

_PREFIXES = {names.MODEL_DIR: "model/", names.OPTIMIZER_DIR: "optim/"}


@dataclass(frozen=True)
class MeshTrees:
    """The trees of the tag ``where``, whose indexes, by global rank, ``index`` gives.

    ``verify`` compares a file with what its rank's index says of it, ``verify_size`` its size alone. What is found of
    tensors is added to ``entries``.
    """

    where: str
    files: TagFiles
    leaders: Sequence[int]
    index: Callable[[int], RankIndex]
    verify: Callable[[str, int], None]
    verify_size: Callable[[str, int], None]
    entries: Entries
    _written: dict[int, Mapping[str, Sequence[TensorEntry]]] = field(default_factory=dict)
    _sized: set[str] = field(default_factory=set)

    def model(self) -> dict[str, Any]:
        """The model's state dict; of a name in several groups, what the first has."""
        tree: dict[str, Any] = {}
        for leader in self.leaders:
            tree = {**self._tree(names.MODEL_DIR, leader), **tree} if tree else self._tree(names.MODEL_DIR, leader)
        return tree

    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict, of the parameters that :meth:`optimizer_names` lists, numbered in that order."""
        trees = [restore_types(self._tree(names.OPTIMIZER_DIR, leader)) for leader in self.leaders]
        if len(trees) == 1:
            return trees[0]
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for group, (options, held) in enumerate(self._groups(trees)):
            first = sum(len(before["params"]) for before in groups[:group])
            state |= {first + number: entries for number, (_, entries) in enumerate(held) if entries}
            groups.append({**options, "params": list(range(first, first + len(held)))})
        for tree in reversed(trees):
            state |= {key: value for key, value in tree["state"].items() if isinstance(key, str)}
        return {"state": state, "param_groups": groups}

    def optimizer_names(self) -> list[str] | None:
        """The parameter behind each index of the optimizer's state; None where the tag does not tell."""
        if len(self.leaders) == 1:
            found = self.index(self.leaders[0]).optimizer_names
            return None if found is None else list(found)
        trees = [self._tree(names.OPTIMIZER_DIR, leader) for leader in self.leaders]
        return [name for _, held in self._groups(trees) for name, _ in held]

    def meshes(self) -> list[Mesh]:
        """Those that its DTensors lie on, each with as many equal ones as its first dimension says."""
        layouts = (layout for leader in self.leaders for layout in self._record(leader).layouts)
        return list(dict.fromkeys(layout.mesh for layout in layouts if len(layout.mesh.shape) > 1))

    def _groups(self, trees: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[tuple[str, Any]]]]:
        """The options of each param group, and of each of its parameters the name and the state.

        What several groups of ranks have is joined: param groups of the same number, if they have the same options.
        """
        found: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
        for leader, tree in zip(self.leaders, trees, strict=True):
            listed = iter(self.index(leader).optimizer_names or ())
            for number, group in enumerate(tree["param_groups"]):
                options = options_of(group)
                told = number, by_digest(options)
                held = next((held for other, known, held in found if (other, by_digest(known)) == told), None)
                if held is None:
                    held = {}
                    found.append((number, options, held))
                for index in group["params"]:
                    held.setdefault(next(listed, f"#{leader}.{index}"), tree["state"].get(index, {}))
        return [(options, list(held.items())) for _, options, held in found]

    def _tree(self, directory: str, leader: int) -> dict[str, Any]:
        file = names.structure_file(directory, leader)
        self.verify(file, leader)
        record = self._record(leader)
        tensors = [one for one in record.tensors if one.name.startswith(_PREFIXES[directory])]

        def whole(reference: TensorReference) -> Assembly:
            tid = reference.tid
            if tid >= len(tensors):
                raise MalformedFile(f"{self.files.where(file)}: tensor {tid} is not in the index of rank {leader}")
            tensor, stride = tensors[tid], noted(reference.noted)
            return DeferredAssembly(
                tensor.dtype, tensor.shape, lambda wanted: self._fragments(record, tensor, wanted), stride
            )

        tree: dict[str, Any] = xser.join(self.files.tree(file), whole)
        return tree

    def _record(self, leader: int) -> MeshRecord:
        record = self.index(leader).mesh
        if record is None:
            raise MalformedFile(f"{self.where}: the index of rank {leader}, a leader, has no {'mesh'!r}: damaged")
        return record

    def _fragments(self, record: MeshRecord, tensor: WholeTensor, wanted: Box) -> tuple[Fragment, ...]:
        """What ``wanted``, a box of the tensor, is made of."""
        writers = record.writers(tensor, wanted)
        found = tuple(fragment for rank in writers for fragment in self._fragments_of(rank, tensor, wanted))
        if not is_tiling(Box.whole(wanted.size), [fragment.target for fragment in found]):
            raise MalformedFile(
                f"{self.where}: what the indexes have of {tensor.name} is not all of {wanted}, or some of it twice"
            )
        return found

    def _fragments_of(self, rank: int, tensor: WholeTensor, wanted: Box) -> Iterator[Fragment]:
        entries = self._entries_of(rank).get(tensor.name, ())
        wrong = [entry for entry in entries if entry.pieces is None or entry.dtype != tensor.dtype]
        if wrong or not entries:
            held = f"{wrong[0].dtype} {wrong[0].shape}" if wrong else "none"
            where = f"{self.where}: the index of rank {rank}"
            raise MalformedFile(f"{where}: expected a {tensor.dtype} part of {tensor.name}, found {held}")
        for entry in entries:
            pieces = entry.pieces or ()
            common = [(piece, part) for piece in pieces if (part := piece.box.intersect(wanted)) is not None]
            if common:
                stub = self._stub(rank, entry)
                yield from (Fragment(stub, piece.local_of(part), part.shifted(wanted.offset)) for piece, part in common)

    def _entries_of(self, rank: int) -> Mapping[str, Sequence[TensorEntry]]:
        """What the rank wrote, by name: of a tensor that torch DCP has in several chunks, each of them."""
        if rank not in self._written:
            found: dict[str, list[TensorEntry]] = {}
            for entry in self.index(rank).tensors:
                found.setdefault(entry.name, []).append(entry)
            self._written[rank] = found
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
