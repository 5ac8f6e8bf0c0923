"""A directory of torch_checkpointing, Meta's library: a file of each item and rank, ``model_0.pt``, as entries by name.

An item is a key of the dict that a script saved: "model", "optimizer", "step". Each tensor is assembled from the parts
that ranks wrote. A part's place is in the DTensor itself, else in ``metadata.pkl``; a plain tensor is whole.

The library writes ``metadata.pkl`` into the first checkpoint of a process only, and only for items with a resharder. It
is a pickle of dicts, lists, text and numbers, and unpickled as nothing else: it names no class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from nxd_ckpt.core.box import Box, is_tiling
from nxd_ckpt.core.dcp_names import PARAMS, Path
from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import DCP_METADATA, RANKS, check_count, check_sizes, checked_key, shown
from nxd_ckpt.core.mesh import Mesh, Shard
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.errors import CheckpointNotFound, MalformedFile, PartNotFound, UnsafePickle, UnsupportedState
from nxd_ckpt.formats.dtensors import DTensorPart, layout_of, local_tensor
from nxd_ckpt.formats.machine import Machine
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub, digest_of
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.payload import Payload, checked_optimizer, is_optimizer, refuse_other_counts
from nxd_ckpt.layouts.torch_dcp import WholeForm, parsing_metadata

METADATA = "metadata.pkl"
_VERSION = "2.0"
_FORMATS = {"TorchSerialization": False, "SafetensorsSerialization": True}


@dataclass(frozen=True)
class RankFile:
    """The file in which one rank wrote an item."""

    name: str
    is_safetensors: bool = False


@dataclass(frozen=True)
class ItemMetadata:
    """An item's tensors by name (keys joined by dots), each as the library describes it, and the files of ranks."""

    tensors: Mapping[str, list[Any]] = field(default_factory=dict)
    files: Mapping[int, RankFile] = field(default_factory=dict)

    def local(self, name: str, rank: int, stub: TensorStub) -> DTensorPart | None:
        """Return the part that the rank's tensor is; None if nothing describes it. Raises MalformedFile."""
        for group in self.tensors.get(name, ()):
            if rank in group["ranks"]:
                about = group["sharding_metadata"]
                return _LOCAL[about["type"]](about["data"], rank, stub, name)
        return None


def read_metadata(files: TagFiles) -> tuple[Mapping[str, ItemMetadata], int]:
    """Return the metadata of each item, and the number of ranks; nothing and 0 if there is no such file.

    Raises:
        UnsafePickle: the pickle names a class or a function.
        UnsupportedState: another version, or items in another form.
        MalformedFile: other content.
    """
    if not files.has(METADATA):
        return {}, 0
    data = files.storage.read(files.key(METADATA), DCP_METADATA)
    with parsing_metadata(files.where(METADATA), "the metadata of torch_checkpointing"):
        root = _Machine(data).load()
        if root["version"] != _VERSION:
            raise UnsupportedState(f"version {shown(root['version'])}, expected {_VERSION}")
        check_count(root["world_size"], RANKS, "its world_size")
        items = {checked_key(item): _item(item, about) for item, about in root["metadata"].items()}
        return items, int(root["world_size"])


def _item(item: str, about: Mapping[str, Any]) -> ItemMetadata:
    described = about["nested_path_to_metadata"].items()
    tensors = {".".join(map(str, json.loads(path))): list(groups) for path, groups in described}
    for name, groups in tensors.items():
        for group in groups:
            kind = group["sharding_metadata"]["type"]
            if kind not in _LOCAL:
                raise UnsupportedState(f"{name} of {item} is described as {shown(kind)}, expected {', '.join(_LOCAL)}")
            check_count(len(group["ranks"]), RANKS, f"ranks of {name}")
    ranks = {rank for groups in tensors.values() for group in groups for rank in group["ranks"]}
    layouts = about["rank_to_layout_info"]
    return ItemMetadata(tensors, {rank: _file(item, rank, layouts.get(rank)) for rank in sorted(ranks)})


def _file(item: str, rank: int, layout: Mapping[str, Any] | None) -> RankFile:
    if layout is None:
        return RankFile(f"{item}_{rank}.pt")
    kind = layout["serialization_format"]["type"]
    if kind not in _FORMATS:
        raise UnsupportedState(f"tensors of {item} in the form {shown(kind)}, expected {' or '.join(_FORMATS)}")
    return RankFile(checked_key(layout["file_path"]), _FORMATS[kind])


def _of_dtensor(data: Mapping[str, Any], rank: int, stub: TensorStub, name: str) -> DTensorPart:
    about = data["mesh_spec"]
    shape = check_sizes(data["global_shape"], name)
    sizes = check_sizes(about["mesh_shape"], name)
    ranks = tuple(about["mesh_data"])
    if prod(sizes) != len(ranks) or len(ranks) > RANKS:
        raise MalformedFile(f"{name}: a mesh of {sizes} with {len(ranks)} ranks")
    mesh = Mesh(("",) * len(sizes), sizes, ranks)
    placements = [None if each["type"] == "Replicate" else _shard(each, name) for each in data["placements"]]
    layout = layout_of(mesh, placements, shape, name)
    return local_tensor(stub, shape, layout, mesh.coordinate_of(rank), name)


def _shard(placement: Mapping[str, Any], name: str) -> Shard:
    if placement["type"] not in ("Shard", "StridedShard"):
        raise UnsupportedState(f"{name} has the placement {shown(placement['type'])}, which is not known")
    return Shard(*check_sizes((placement["dim"], placement.get("split_factor", 1)), name))


def _of_boxes(data: Mapping[str, Any], rank: int, stub: TensorStub, name: str) -> DTensorPart:
    """Return the part of a tensor that said itself which boxes of the global one it holds."""
    shape = check_sizes(data["global_shape"], name)
    pieces = tuple(_pieces(data, name))
    for piece in pieces:
        if not len(piece.local.size) == len(piece.local.offset) == len(piece.box.offset) == len(shape):
            raise MalformedFile(f"{name}: a shard {piece.box} of a tensor of shape {shape}")
        if not (len(stub.shape) == len(shape) and Box.whole(stub.shape).contains(piece.local)):
            raise MalformedFile(f"{name}: a shard at {piece.local} of the rank's tensor, whose shape is {stub.shape}")
    return DTensorPart(stub, shape, pieces)


def _pieces(data: Mapping[str, Any], name: str) -> Iterator[Piece]:
    for first, local, size in zip(data["global_offsets"], data["local_offsets"], data["local_sizes"], strict=True):
        sizes = check_sizes(size, name)
        yield Piece(Box(check_sizes(local, name), sizes), Box(check_sizes(first, name), sizes))


_LOCAL = {"DTensorShardingMetadata": _of_dtensor, "default_tensor_v1": _of_boxes}


class _Machine(Machine):
    def find_class(self, module: str, name: str) -> Any:
        raise UnsafePickle(
            f"its pickle asks for {module:.100}.{name:.100}, which no metadata of torch_checkpointing holds"
        )


_FILE = re.compile(r"(.+)_(\d+)\.pt")
_FIRST_MODEL = "model_0.pt"
_UNFINISHED = "tmp_"
"""Prefix of the directory that the library writes, before it renames it."""
_OF_ALL_RANKS = ("model", "optimizer", "optim")
"""Items whose tensors without a recorded place must be equal on all ranks; of others the first rank's counts."""
_GROUPS, _NAMES = "param_groups", "param_names"


def is_present(names: Collection[str]) -> bool:
    """Return whether a directory of these files is one of torch_checkpointing."""
    return METADATA in names or _FIRST_MODEL in names


class RankItems:
    """Entries (`dcp_directory.Entries`) of the directory in ``files``.

    Raises:
        CheckpointNotFound: its save was interrupted.
        PartNotFound: a rank's file is missing.
        MalformedFile: files of two saves, or parts that do not cover a tensor.
        UnsafePickle: model or optimizer is more than tensors and plain data.
    """

    def __init__(self, files: TagFiles) -> None:
        self.files: TagFiles = files
        self.where: str = files.directory
        if files.tag.rpartition("/")[2].startswith(_UNFINISHED):
            raise CheckpointNotFound(
                f"{self.where} is what torch_checkpointing renames when a save is complete; that save was interrupted"
            )
        self._paths: dict[str, Path] = {}
        self._entries: dict[str, Any] = {}
        with parsing(self.where, "a directory of torch_checkpointing"):
            metadata, world_size = read_metadata(files)
            for item, ranks in self._items(metadata, world_size).items():
                self._add(item, ranks, metadata.get(item, ItemMetadata()))

    @property
    def names(self) -> list[str]:
        return list(self._paths)

    def recorded(self, name: str) -> Path | None:
        return self._paths.get(name)

    def path(self, name: str) -> Path:
        return self._paths[name]

    def form(self, name: str) -> WholeForm | None:
        """Return dtype and shape of a tensor; None for another value."""
        entry = self._entries[name]
        return WholeForm(entry.dtype, entry.shape, {}) if isinstance(entry, (TensorStub, Assembly)) else None

    def entry(self, name: str) -> Any:
        """Return the stub or assembly of a tensor, or the value. Raises UnsafePickle for an item that is no data."""
        entry = self._entries[name]
        if isinstance(entry, UnsafePickle):
            raise entry
        return entry

    def _items(self, metadata: Mapping[str, ItemMetadata], world_size: int) -> dict[str, dict[int, RankFile]]:
        """Return each item's file on each rank that wrote it."""
        items: dict[str, dict[int, RankFile]] = {item: dict(about.files) for item, about in metadata.items()}
        for name, is_directory in self.files.names().items():
            match = None if is_directory else _FILE.fullmatch(name)
            if match is not None and match[1] not in metadata:
                check_count(int(match[2]), RANKS, f"the rank of {name}")
                items.setdefault(match[1], {})[int(match[2])] = RankFile(name)
        ranks = {rank for files in items.values() for rank in files}
        count = max(ranks, default=-1) + 1
        if 0 < world_size < count:
            raise MalformedFile(
                f"{self.where}: {METADATA} is of {world_size} ranks, but there is a file of rank {count - 1}; files of "
                "two saves are mixed"
            )
        missing = sorted(set(range(max(count, world_size))) - ranks)
        if missing:
            raise PartNotFound(
                f"{self.where}: the files of ranks {missing[:8]} are missing, of {max(count, world_size)}"
            )
        lost = [file.name for files in items.values() for file in files.values() if not self.files.has(file.name)]
        if lost:
            raise PartNotFound(f"{self.where}: {', '.join(lost[:8])}, which {METADATA} names, are missing")
        return {item: dict(sorted(files.items())) for item, files in items.items()}

    def _add(self, item: str, ranks: Mapping[int, RankFile], about: ItemMetadata) -> None:
        """Add the entries of an item."""
        try:
            trees = {rank: self._tree(item, file) for rank, file in ranks.items()}
        except UnsafePickle as error:
            if item in _OF_ALL_RANKS:
                raise
            self._put((item,), error)
            return
        counts = {}
        for rank, tree in trees.items():
            counts[ranks[rank].name] = Payload({item: tree, **(tree if isinstance(tree, dict) else {})})
        refuse_other_counts(counts, self.where)
        by_path: dict[Path, dict[int, Any]] = {}
        for rank, tree in trees.items():
            for path, leaf in _leaves(tree, (item,)):
                by_path.setdefault(path, {})[rank] = leaf
        for path, leaves in by_path.items():
            self._put(path, self._joined(path, leaves, about))

    def _put(self, path: Path, entry: Any) -> None:
        name = ".".join(map(str, path))
        if name in self._paths:
            raise MalformedFile(f"{self.where}: two entries have the name {name}")
        self._paths[name] = path
        self._entries[name] = entry

    def _tree(self, item: str, file: RankFile) -> Any:
        if file.is_safetensors:
            return dict(self.files.safetensors(file.name))
        tree = self.files.tree(file.name, dtensors=True)
        return _by_name(tree, self.files.where(file.name)) if is_optimizer(tree) else tree

    def _joined(self, path: Path, leaves: Mapping[int, Any], about: ItemMetadata) -> Any:
        """Return one leaf for those of ranks."""
        first = next(iter(leaves.values()))
        if not isinstance(first, (TensorStub, DTensorPart)):
            return first
        name = ".".join(map(str, path[1:]))
        parts = {
            rank: about.local(name, rank, leaf) or leaf if isinstance(leaf, TensorStub) else leaf
            for rank, leaf in leaves.items()
        }
        if isinstance(first, TensorStub) and not any(isinstance(part, DTensorPart) for part in parts.values()):
            if path[0] in _OF_ALL_RANKS:
                self._require_equal(".".join(map(str, path)), leaves)
            return first
        return self._assembled(".".join(map(str, path)), list(parts.values()))

    def _require_equal(self, name: str, leaves: Mapping[int, Any]) -> None:
        """Raise MalformedFile unless all ranks hold the same tensor."""
        first, *others = leaves.items()
        for rank, leaf in others:
            if not isinstance(leaf, TensorStub) or _differ(leaf, first[1]):
                raise MalformedFile(
                    f"{self.where}: ranks {first[0]} and {rank} hold different tensors {name}, and nothing says which "
                    f"part of it each has: neither is a DTensor, and {METADATA} does not describe it; or files of two "
                    "saves are mixed"
                )

    def _assembled(self, name: str, parts: Iterable[Any]) -> TensorStub | Assembly:
        """Return the tensor of these parts, of which replicas count once."""
        fragments: dict[Box, Fragment] = {}
        forms = set()
        for part in parts:
            if not isinstance(part, DTensorPart):
                raise MalformedFile(
                    f"{self.where}: {name} is whole on one rank, and a part or {shown(part)} on another"
                )
            forms.add((part.stub.dtype, part.shape))
            for piece in part.pieces:
                fragments.setdefault(piece.box, Fragment(part.stub, piece.local, piece.box))
        if len(forms) > 1:
            raise MalformedFile(
                f"{self.where}: {name} is {' and '.join(map(str, forms))}; files of two saves are mixed"
            )
        ((dtype, shape),) = forms
        whole = Box.whole(shape)
        if not is_tiling(whole, list(fragments)):
            raise MalformedFile(
                f"{self.where}: the parts of {name} do not cover its shape {shape}, each element once; found "
                f"{', '.join(map(str, list(fragments)[:5]))}: a rank's file is missing, or of another save"
            )
        only = fragments.get(whole)
        if only is not None and only.source == whole and only.stub.shape == shape:
            return only.stub
        return Assembly(dtype, shape, tuple(fragments.values()))


def _differ(leaf: TensorStub, other: TensorStub) -> bool:
    if (leaf.dtype, leaf.shape) != (other.dtype, other.shape):
        return True
    digests = digest_of(leaf), digest_of(other)
    return None not in digests and digests[0] != digests[1] and leaf.nbytes == leaf.storage.nbytes


def _leaves(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the entries of a tree: what is below dicts, and the options of param groups."""
    if isinstance(node, list) and path[-1] == _GROUPS:
        node = dict(enumerate(node))
    if not isinstance(node, dict) or (not node and path[0] not in _OF_ALL_RANKS):
        yield path, node
        return
    for key, child in node.items():
        yield from _leaves(child, (*path, key))


def _by_name(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return an optimizer's state dict by names of parameters, as far as its groups have them."""
    saved = tree.get(_GROUPS)
    if isinstance(saved, list) and all(isinstance(group, dict) for group in saved):  # which may have names alone
        tree = {**tree, _GROUPS: [{PARAMS: group.get(_NAMES, ()), **group} for group in saved]}
    checked = checked_optimizer(tree, where)
    groups = checked[_GROUPS]
    names = [name for group in groups for name in group.get(_NAMES, group.get(PARAMS, ()))]
    numbers = [number for group in groups for number in group.get(PARAMS, group.get(_NAMES, ()))]
    name_of = dict(zip(numbers, names, strict=True))
    own = []
    for group in groups:
        options = {option: value for option, value in group.items() if option not in (PARAMS, _NAMES)}
        own.append({PARAMS: list(group.get(_NAMES, group.get(PARAMS, ()))), **options})
    state = {name_of.get(number, number): entries for number, entries in checked["state"].items()}
    return {"state": state, _GROUPS: own}
