"""Checkpoints that torch-xla's scripts save with ``xm.save``: one file, or with FSDP one of each rank.

transformers' trainer saves two of each, model and optimizer. Only read; tests/migrate/sources.md names the sources.

The ``shard_metadata`` of FSDP says where each parameter is. A sharded parameter is a flat run of elements, with padding
at its end, divided equally over the ranks: one parameter of the model (``flatten_parameters=False``), or all of a
wrapped module's, one after the other. With ``shard_param_on_dim_0`` it keeps its dimensions, and its rows are divided.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from nxd_ckpt.core.box import Box, boxes_of_run
from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import RANKS, check_count, check_sizes
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.parameter_names import NOT_DECAYED, Shape, grouped
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import CheckpointNotFound, MalformedFile, OptimizerMismatch, PartNotFound, UnsupportedState
from nxd_ckpt.formats.optimizer_trees import numbered
from nxd_ckpt.formats.tensors import (
    Assembly,
    Fragment,
    TensorStub,
    by_digest,
    contiguous_stride,
    dtype_name,
    itemsize,
    iter_tensors,
)
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.layouts.payload import (
    Payload,
    PayloadFile,
    payload_of,
    reading,
    refuse_other_counts,
)

_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")
_MULTIPLE = 128
"""Shards have a multiple of this many elements; in older versions any number."""


@dataclass(frozen=True)
class FlatParameter:
    """One parameter of the model: its name and shape, and its first element in the sharded one."""

    name: str
    shape: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class ShardedParameter:
    """A sharded parameter: the ranks' ``name`` of it, and its whole ``shape`` without padding."""

    name: str
    shape: tuple[int, ...]
    members: tuple[FlatParameter, ...]

    def require(self, shards: Sequence[tuple[int, ...]], where: str) -> None:
        """Raise MalformedFile unless shards of these shapes, one for each rank, make up the parameter."""
        rows = len(shards[0]) > 1
        whole = self.shape[0] if rows else prod(self.shape)
        total = sum(shape[0] for shape in shards if shape)
        inner = self.shape[1:] if rows else ()
        fits = len(set(shards)) == 1 and shards[0][1:] == inner and len(shards[0]) > 0
        if not fits or not whole <= total < whole + _MULTIPLE * len(shards):
            raise MalformedFile(
                f"{where}: shard_metadata says {self.shape} of {self.name}, but the {len(shards)} ranks hold shards of "
                f"{', '.join(map(str, dict.fromkeys(shards)))}; files of two saves are mixed"
            )


def sharded_parameters(metadata: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, ShardedParameter]:
    """Return the sharded parameters among ``names``, the names in a rank's state dict, in their order.

    Raises MalformedFile if the metadata does not describe one; other errors for other metadata.
    """
    parameters: dict[str, ShardedParameter] = {}
    for name in names:
        parts = name.split(".")
        at = next((number for number, part in enumerate(parts) if part.startswith(_SHARD)), None)
        if at is not None:
            parameters[name] = _sharded(metadata, name, ".".join(parts[:at]), ".".join(parts[at:]), where)
    described = sum(len(about) for about in metadata["shard_info"].values())
    if described != len(parameters):
        raise MalformedFile(
            f"{where}: shard_metadata describes {described} sharded parameters, the model has {len(parameters)}; "
            "files of two saves are mixed"
        )
    _refuse_twice(parameters, names, where)
    return parameters


def plain_name(name: str) -> str:
    """Return the model's name, without FSDP's wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _refuse_twice(parameters: Mapping[str, ShardedParameter], names: Sequence[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        parameter_names = (
            [member.name for member in parameters[name].members] if name in parameters else [plain_name(name)]
        )
        for parameter in parameter_names:
            if parameter in seen:
                raise MalformedFile(
                    f"{where}: two entries of the model's state dict, one of them {name}, are of {parameter}"
                )
            seen.add(parameter)


def _sharded(metadata: Mapping[str, Any], name: str, prefix: str, suffix: str, where: str) -> ShardedParameter:
    about = metadata["shard_info"].get(prefix, {}).get(suffix)
    if about is None:
        raise MalformedFile(f"{where}: shard_metadata does not describe {name}; files of two saves are mixed")
    shape = check_sizes(about["_orig_size"], f"{where}: {name}")
    whole = _joined(prefix, about["_orig_name"])
    if _FLAT not in whole:
        return ShardedParameter(name, shape, (FlatParameter(plain_name(whole), shape, 0),))
    parameters, shapes, numels = metadata["flatten_info"][whole]
    begin = 0
    members = []
    for parameter, its_shape, numel in zip(parameters, shapes, numels, strict=True):
        size = check_sizes(its_shape, f"{where}: {parameter}")
        if prod(size) != numel:
            raise MalformedFile(f"{where}: shard_metadata says {numel} elements of {parameter}, whose shape is {size}")
        members.append(FlatParameter(plain_name(_joined(whole.rpartition(".")[0], parameter)), size, begin))
        begin += numel
    if begin != prod(shape):
        raise MalformedFile(f"{where}: shard_metadata says {shape} of {name}, but {begin} elements of parameters in it")
    return ShardedParameter(name, shape, tuple(members))


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


METADATA = "shard_metadata"


class FsdpFiles(PayloadFile):
    """Layout (`TagLayout`) of the files ``names`` of ranks 0, 1 and so on, with their ``payloads``.

    Content of neither model nor optimizer is the first rank's. Raises MalformedFile for files of two saves.
    """

    def __init__(self, files: TagFiles, names: Sequence[str], payloads: Sequence[Payload]) -> None:
        super().__init__(files, names[0], payloads[0])
        self._names = names
        self._payloads = payloads
        refuse_other_counts(dict(zip(names, payloads, strict=True)), files.directory)

    @reading
    def parts(self) -> Parts:
        parts = super().parts()
        if parts.optimizer == "zero1":
            raise UnsupportedState(f"{self.where}: ZeRO-1 of a model that FSDP shards is not supported; leave it out")
        return parts

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        """Return the model's state dict; parameters that were sharded together are at the place of the first."""
        tree: dict[str, Any] = {}
        for name, leaf in self._models[0].items():
            sharded = self._sharded.get(name)
            if sharded is None:
                tree[plain_name(name)] = self._buffer(name, leaf)
            else:
                shards = [model[name] for model in self._models]
                tree |= {member.name: self._whole(sharded, member, shards) for member in sharded.members}
        return tree

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the optimizer's state dict as for an unsharded model: an entry for each parameter."""
        states: dict[str, dict[str, Any]] = {}
        groups = []
        for options, names in zip(self._optimizers[0]["param_groups"], self._groups, strict=True):
            groups.append({**options, "params": []})
            for index, name in zip(options["params"], names, strict=True):
                for member in self._sharded[name].members:
                    groups[-1]["params"].append(member.name)
                    if entries := self._entries(index, self._sharded[name], member):
                        states[member.name] = entries
        return numbered({"state": states, "param_groups": groups})

    @reading
    def optimizer_names(self, at: Coordinates) -> list[str]:
        return [member.name for names in self._groups for name in names for member in self._sharded[name].members]

    @property
    def _rest(self) -> dict[str, Any]:
        return {key: value for key, value in super()._rest.items() if key != METADATA}

    @cached_property
    def _models(self) -> list[dict[str, Any]]:
        """Each rank's state dict, with the same names in it."""
        models = [
            self._model(payload, self.files.where(name))
            for name, payload in zip(self._names, self._payloads, strict=True)
        ]
        for name, model in zip(self._names, models, strict=True):
            if model.keys() != models[0].keys():
                differing = ", ".join(sorted(map(str, model.keys() ^ models[0].keys()))[:5])
                raise MalformedFile(
                    f"{self.files.where(name)} and {self._names[0]} do not hold the same names ({differing}); "
                    "files of two saves are mixed"
                )
        return models

    @cached_property
    def _sharded(self) -> dict[str, ShardedParameter]:
        """Sharded parameters by the names in a rank's state dict, in the order of the model's ``parameters()``."""
        metadata = self._payload.content[METADATA]
        parameters = sharded_parameters(metadata, list(self._models[0]), self.where)
        for name, sharded in parameters.items():
            shapes = []
            for file, model in zip(self._names, self._models, strict=True):
                shapes.append(_stub(model[name], f"{self.files.where(file)}: {name}").shape)
            sharded.require(shapes, self.where)
        return parameters

    @cached_property
    def _optimizers(self) -> list[dict[str, Any]]:
        """Each rank's optimizer, with equal param groups and steps."""
        trees = []
        for file, payload in zip(self._names, self._payloads, strict=True):
            tree = self._optimizer(payload, self.files.where(file))
            trees.append(tree)
            if by_digest(_common(tree)) != by_digest(_common(trees[0])):
                raise MalformedFile(
                    f"{self.files.where(file)} and {self._names[0]} have different param groups, steps or entries of "
                    "the optimizer; files of two saves are mixed"
                )
        return trees

    @cached_property
    def _groups(self) -> list[list[str]]:
        """The sharded parameters in each param group of the optimizer."""
        tree = self._optimizers[0]
        shapes = {name: self._models[0][name].shape for name in self._sharded}
        saved = [[_shape(tree["state"].get(index, {})) for index in group["params"]] for group in tree["param_groups"]]
        for patterns in NOT_DECAYED:
            groups = grouped(shapes, saved, patterns)
            if groups is not None:
                return groups
        raise OptimizerMismatch(
            f"{self.where} does not record which parameters its optimizer's entries belong to, and param groups of "
            f"{[len(group) for group in saved]} parameters are unusual for {len(shapes)} parameters: expected all in "
            "one, or biases, or norms and biases, in the second; leave the optimizer out"
        )

    def _entries(self, index: int, sharded: ShardedParameter, member: FlatParameter) -> dict[str, Any]:
        """Return the optimizer's state of one parameter.

        Values that are no shards are the first rank's, equal on all.
        """
        shape = self._models[0][sharded.name].shape
        entries = {}
        for key, value in self._optimizers[0]["state"].get(index, {}).items():
            if isinstance(value, TensorStub) and value.shape == shape:
                shards = [tree["state"][index][key] for tree in self._optimizers]
                if any(shard.shape != shape for shard in shards):
                    raise MalformedFile(f"{self.where}: ranks hold {key} of {member.name} in different shapes")
                entries[key] = self._whole(sharded, member, shards)
            elif isinstance(value, TensorStub) and value.shape:
                raise UnsupportedState(
                    f"{self.where}: the optimizer's {key} of {member.name} has shape {value.shape}, its shard "
                    f"{shape}; only state of the parameter's own shape is supported"
                )
            else:
                entries[key] = value
        return entries

    def _buffer(self, name: str, leaf: Any) -> Any:
        """Return a buffer, which all ranks hold, in its dtype before FSDP cast it."""
        about = self._payload.content[METADATA]["buffer_info"].get(name)
        if about is None or not isinstance(leaf, TensorStub):
            return leaf
        whole = Assembly.of(leaf)
        return Assembly(dtype_name(about["_orig_dtype"]), whole.shape, whole.fragments)

    def _whole(self, sharded: ShardedParameter, member: FlatParameter, shards: Sequence[Any]) -> Assembly:
        """Assemble the parameter from the parts that ranks hold."""
        stubs = [_stub(shard, f"{self.where}: {sharded.name}") for shard in shards]
        dtypes = dict.fromkeys(stub.dtype for stub in stubs)
        if len(dtypes) > 1:
            raise MalformedFile(
                f"{self.where}: ranks hold shards of {member.name} in different dtypes, {' and '.join(dtypes)}; files "
                "of two saves are mixed"
            )
        parts = _rows(stubs, member) if len(stubs[0].shape) > 1 else _runs(stubs, member)
        return Assembly(stubs[0].dtype, member.shape, tuple(parts))


def _rows(shards: Sequence[TensorStub], member: FlatParameter) -> Iterator[Fragment]:
    """Yield the fragments of shards that are rows of the parameter."""
    at = 0
    for stub in shards:
        rows = min(stub.shape[0], member.shape[0] - at)
        if rows > 0:
            target = Box.whole(member.shape).narrowed(0, at, rows)
            yield Fragment(stub, target.shifted((at, *(0 for _ in member.shape[1:]))), target)
        at += stub.shape[0]


def _runs(shards: Sequence[TensorStub], member: FlatParameter) -> Iterator[Fragment]:
    """Yield the fragments of shards that are runs of elements, in boxes that are runs of the parameter too."""
    begin = member.begin
    end = member.begin + prod(member.shape)
    at = 0
    for stub in shards:
        first = max(begin, at)
        last = min(end, at + stub.shape[0])
        offset = stub.offset + (first - at) * itemsize(stub.dtype)
        for box in boxes_of_run(first - begin, last - begin, member.shape):
            stride = contiguous_stride(box.size)
            part = TensorStub(stub.file, offset, stub.dtype, box.size, stride, stub.storage)
            yield Fragment(part, Box.whole(box.size), box)
            offset += part.nbytes
        at += stub.shape[0]


def _stub(leaf: Any, where: str) -> TensorStub:
    if not isinstance(leaf, TensorStub) or not leaf.is_contiguous:
        raise MalformedFile(f"{where}: expected a shard, a tensor of its own, found {type(leaf).__name__}")
    return leaf


def _shape(entries: dict[str, Any]) -> Shape:
    """Return the shape of an optimizer's largest entry for one parameter."""
    return max((leaf.shape for _, leaf in iter_tensors(entries, TensorStub)), key=len, default=())


def _common(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an optimizer that ranks have in common: all but the shards."""
    state = {
        index: {key: None if isinstance(leaf, TensorStub) and leaf.shape else leaf for key, leaf in entries.items()}
        for index, entries in tree["state"].items()
    }
    return {"param_groups": tree["param_groups"], "state": state}


RANDOM_STATES = re.compile(r"rng_state(?:_\d+)?\.pth")
"""Random states that transformers' trainer, and so optimum-neuron's, saves beside the model, for each rank."""

_TRAINERS = re.compile(r"(rank\d+-of-\d+-)pytorch_model\.bin")
_OPTIMIZER = "optimizer.pt"
_RANK, _WORLD_SIZE = "rank", "world_size"


def is_present(names: Iterable[str]) -> bool:
    """Return whether a directory of these files holds such a checkpoint."""
    return any(map(_is_payload, names))


def is_trainers(names: Iterable[str]) -> bool:
    """Return whether transformers' trainer wrote it, which keeps the whole model beside the ranks' files."""
    return any(map(_TRAINERS.fullmatch, names))


def open_files(files: TagFiles, file: str | None, part_keys: Mapping[str, str]) -> PayloadFile:
    """Open the checkpoint in the directory, or in one ``file`` of it; ``part_keys`` as in `Payload`.

    Raises:
        CheckpointNotFound: several files, each a checkpoint of its own.
        PartNotFound: ranks' files are missing, or there is nothing under a key that is given.
        MalformedFile: no such files, or of two saves.
    """
    names = sorted(filter(_is_payload, files.names())) if file is None else [file]
    payloads = {name: _payload(files, name, part_keys) for name in names}
    sharded = {name: payload for name, payload in payloads.items() if METADATA in payload.content}
    where = files.directory
    single = [name for name in names if name not in sharded]
    if sharded and single:
        raise MalformedFile(
            f"{where} has files of FSDP's ranks, {first_of(sharded)}, and {first_of(single)}, which is none; pass "
            "the one that is meant, or move it away"
        )
    if len(single) > 1:
        raise CheckpointNotFound(f"{where} holds several checkpoints; pass one of the files {first_of(single)}")
    if single:
        return PayloadFile(files, single[0], payloads[single[0]])
    with parsing(where, "a checkpoint of torch-xla's FSDP"):
        ordered = _by_rank(sharded, where)
    without = [name for name, payload in sharded.items() if payload.optimizer is None]
    if 0 < len(without) < len(sharded):
        raise PartNotFound(f"{where}: no optimizer is beside {first_of(without)}, and one beside others")
    return FsdpFiles(files, ordered, [sharded[name] for name in ordered])


def _is_payload(name: str) -> bool:
    return _TRAINERS.fullmatch(name) is not None or (name.endswith(".pth") and not RANDOM_STATES.fullmatch(name))


def _payload(files: TagFiles, name: str, part_keys: Mapping[str, str]) -> Payload:
    payload = payload_of(files.tree(name), files.where(name))
    content = payload.content
    for key in filter(None, part_keys.values()):
        if key not in content:
            raise PartNotFound(f"{files.where(name)} has nothing under {key!r}; found keys {payload.keys}")
    of_trainer = _TRAINERS.fullmatch(name)
    beside = f"{of_trainer[1]}{_OPTIMIZER}" if of_trainer is not None else ""
    if of_trainer is None or not files.has(beside):
        return Payload(content, part_keys)
    optimizer = payload_of(files.tree(beside), files.where(beside)).content
    if optimizer.get(METADATA) != content.get(METADATA):
        raise MalformedFile(
            f"{files.where(name)} and {beside} have different shard_metadata; files of two saves are mixed"
        )
    return Payload({**optimizer, **content})


def _by_rank(sharded: Mapping[str, Payload], where: str) -> list[str]:
    """Return the names of the files of ranks 0, 1 and so on, all of one save."""
    about = {name: payload.content[METADATA] for name, payload in sharded.items()}
    first = next(iter(about))
    for name, metadata in about.items():
        if _of_all_ranks(metadata) != _of_all_ranks(about[first]):
            raise MalformedFile(
                f"{where}: {name} and {first} have different shard_metadata; files of two saves are mixed: move those "
                "of one to a place of their own"
            )
    world_size = about[first][_WORLD_SIZE]
    ranks = [metadata[_RANK] for metadata in about.values()]
    check_count(world_size, RANKS, f"{where}: the ranks that shard_metadata says")
    twice = [name for name, metadata in about.items() if ranks.count(metadata[_RANK]) > 1]
    if twice:
        raise MalformedFile(
            f"{where}: several files of one rank, {first_of(twice)}; they are of two saves: move those of one to a "
            "place of their own"
        )
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing or len(ranks) != world_size:
        raise PartNotFound(
            f"{where}: FSDP saved a file for each of {world_size} ranks; those of ranks {first_of(map(str, missing))} "
            f"are not there, found {first_of(about)}"
        )
    return sorted(about, key=lambda name: int(about[name][_RANK]))


def _of_all_ranks(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != _RANK}
