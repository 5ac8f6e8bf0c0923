"""``metadata.pkl`` of torch_checkpointing: which rank wrote which part of a tensor, and into which file.

It is a pickle of dicts, lists, text and numbers, and unpickled as nothing else: it names no class. The library writes
it into the first checkpoint of a process only, and only for items with a resharder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.keys import checked_key
from nxd_ckpt.core.limits import DCP_METADATA, RANKS, check_count, check_sizes, shown
from nxd_ckpt.core.mesh import Mesh, Shard
from nxd_ckpt.core.parsing import parsing
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.errors import MalformedFile, UnsafePickle, UnsupportedState
from nxd_ckpt.formats.dtensors import LocalTensor, layout_of, local_tensor
from nxd_ckpt.formats.machine import Machine
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.tag.files import TagFiles

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

    def local(self, name: str, rank: int, stub: TensorStub) -> LocalTensor | None:
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
    where = files.where(METADATA)
    data = files.storage.read(files.key(METADATA), DCP_METADATA)
    try:
        with parsing(where, "the metadata of torch_checkpointing"):
            root = _Machine(data).load()
            if root["version"] != _VERSION:
                raise UnsupportedState(f"version {shown(root['version'])}, expected {_VERSION}")
            check_count(root["world_size"], RANKS, "its world_size")
            items = {checked_key(item): _item(item, about) for item, about in root["metadata"].items()}
            return items, int(root["world_size"])
    except EOFError as error:
        raise MalformedFile(f"{where}: not the metadata of torch_checkpointing: it ends too early") from error
    except (UnsafePickle, UnsupportedState, MalformedFile) as error:
        raise type(error)(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


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


def _of_dtensor(data: Mapping[str, Any], rank: int, stub: TensorStub, name: str) -> LocalTensor:
    about, shape = data["mesh_spec"], check_sizes(data["global_shape"], name)
    sizes, ranks = check_sizes(about["mesh_shape"], name), tuple(about["mesh_data"])
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


def _of_boxes(data: Mapping[str, Any], rank: int, stub: TensorStub, name: str) -> LocalTensor:
    """Return the part of a tensor that said itself which boxes of the global one it holds."""
    shape = check_sizes(data["global_shape"], name)
    pieces = tuple(_pieces(data, name))
    for piece in pieces:
        if not len(piece.local.size) == len(piece.local.offset) == len(piece.box.offset) == len(shape):
            raise MalformedFile(f"{name}: a shard {piece.box} of a tensor of shape {shape}")
        if not (len(stub.shape) == len(shape) and Box.whole(stub.shape).contains(piece.local)):
            raise MalformedFile(f"{name}: a shard at {piece.local} of the rank's tensor, whose shape is {stub.shape}")
    return LocalTensor(stub, shape, pieces)


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
