"""torch-xla's FSDP description of its shards (``shard_metadata``): the parameters in each, and their places. Pure.

A sharded parameter is a flat run of elements, with padding at its end, divided equally over the ranks: one
parameter of the model (``flatten_parameters=False``), or all of a wrapped module's, one after the other. With
``shard_param_on_dim_0`` it keeps its dimensions, and its rows are divided. docs/sources.md names the sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from nxd_ckpt.core.limits import check_sizes
from nxd_ckpt.errors import MalformedFile

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
    begin, members = 0, []
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
