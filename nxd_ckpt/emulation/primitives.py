"""torch-xla's collective primitives and runtime facts, answered for an emulated world.

They are replaced below the public functions (in ``torch_xla._XLAC`` and in the dispatcher):
``xm.all_reduce``, the bucketized forms, ``torch_xla.core.functions``, FSDP and names that were imported early
all end there, with torch-xla's own argument checks in front.
"""

# For mypy: torch.distributed does not declare what it exports.
# mypy: disable-error-code="attr-defined, arg-type"
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from nxd_ckpt.emulation import collectives
from nxd_ckpt.emulation.process_group import EmulatedProcessGroup
from nxd_ckpt.emulation.world import GroupMembers, NotEmulated, World
from nxd_ckpt.errors import InvalidArgument

Tensor = torch.Tensor
Groups = Sequence[Sequence[int]]

_COLLECTIVE = re.compile(r"_xla_(spmd_)?(all_|reduce_|collective_|cross_|broadcast|send$|recv$)")


def runtime_facts(world: World) -> dict[str, Callable[..., Any]]:
    """Return replacements in ``_XLAC`` for the facts of the world that ``torch_xla.runtime`` asks for."""
    devices = [f"CPU:{rank}" for rank in range(world.size)]
    return {
        "_xla_get_all_devices": lambda: devices,
        "_xla_get_all_runtime_devices": lambda: devices,
        "_xla_num_global_devices": lambda: world.size,
        # torch-xla takes 0 for "not replicated", a world of one.
        "_xla_get_replication_devices_count": lambda: world.size if world.size > 1 else 0,
        "_xla_get_default_device_ordinal": lambda: world.rank,
        "_xla_get_device_ordinal": lambda _device: world.rank,
        "_xla_get_process_index": lambda: world.rank,
        "_xla_get_num_processes": lambda: world.size,
    }


def routed_primitives(world: World) -> dict[str, Callable[..., Any]]:
    """Replacements in ``_XLAC`` for the collectives; the signatures are those of torch-xla 2.5 to 2.9.

    A token, which orders collectives inside a graph, is passed through: here a call is its own order.
    """

    def all_reduce(kind: str, tensor: Tensor, scale: float, groups: Groups, *_: Any) -> Tensor:
        return collectives.all_reduce(_peers(world, groups), kind, tensor, scale)

    def all_reduce_inplace(kind: str, tensors: list[Tensor], scale: float, groups: Groups, *_: Any) -> None:
        for tensor in tensors:
            collectives.fill(tensor, all_reduce(kind, tensor, scale, groups))

    def all_gather(tensor: Tensor, dim: int, count: int, groups: Groups, *_: Any) -> Tensor:
        return collectives.all_gather(_peers(world, groups, count), tensor, dim)

    def all_gather_out(output: Tensor, tensor: Tensor, token: Any, *args: Any) -> Any:
        collectives.fill(output, all_gather(tensor, *args))
        return token

    def all_gather_coalesced(tensors: list[Tensor], token: Any, *args: Any) -> list[Any]:
        return [*(all_gather(tensor, *args) for tensor in tensors), token]

    def all_gather_coalesced_out(outputs: list[Tensor], tensors: list[Tensor], token: Any, *args: Any) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            all_gather_out(output, tensor, token, *args)
        return token

    def reduce_scatter(
        kind: str, tensor: Tensor, token: Any, scale: float, dim: int, count: int, groups: Groups, *_: Any
    ) -> tuple[Tensor, Any]:
        return collectives.reduce_scatter(_peers(world, groups, count), kind, tensor, scale, dim), token

    def reduce_scatter_out(kind: str, output: Tensor, tensor: Tensor, token: Any, *args: Any) -> Any:
        collectives.fill(output, reduce_scatter(kind, tensor, token, *args)[0])
        return token

    def reduce_scatter_coalesced(kind: str, tensors: list[Tensor], token: Any, *args: Any) -> list[Any]:
        return [*(reduce_scatter(kind, tensor, token, *args)[0] for tensor in tensors), token]

    def reduce_scatter_coalesced_out(
        kind: str, outputs: list[Tensor], tensors: list[Tensor], token: Any, *args: Any
    ) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            reduce_scatter_out(kind, output, tensor, token, *args)
        return token

    def all_to_all(
        tensor: Tensor, token: Any, split: int, concat: int, count: int, groups: Groups, *_: Any
    ) -> tuple[Tensor, Any]:
        return collectives.all_to_all(_peers(world, groups, count), tensor, split, concat), token

    def collective_permute(tensor: Tensor, token: Any, pairs: Groups) -> tuple[Tensor, Any]:
        return collectives.permute(world.peers(), tensor, pairs), token

    routed = (all_reduce, all_reduce_inplace, all_gather, all_gather_out, all_gather_coalesced,
              all_gather_coalesced_out, reduce_scatter, reduce_scatter_out, reduce_scatter_coalesced,
              reduce_scatter_coalesced_out, all_to_all, collective_permute)  # fmt: skip
    return {f"_xla_{function.__name__}": function for function in routed}


def _peers(world: World, groups: Groups, shard_count: int | None = None) -> GroupMembers:
    """Return this rank's group, which has to have ``shard_count`` members."""
    members = world.peers(groups)
    if shard_count not in (None, len(members)):
        raise InvalidArgument(f"shard_count={shard_count}: rank {world.rank} is in the group {list(members.ranks)}")
    return members


def unrouted_primitives(available: Sequence[str], routed: Sequence[str]) -> dict[str, Callable[..., NoReturn]]:
    """Return, for every other collective among the ``available`` names of ``_XLAC``, a function that raises."""

    def refusal(name: str) -> Callable[..., NoReturn]:
        def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise NotEmulated(
                f"torch-xla collective {name.removeprefix('_xla_')!r}: CPU-XLA emulation does not route it "
                "between processes, and torch-xla on CPU would return the local value"
            )

        return refuse

    return {name: refusal(name) for name in available if _COLLECTIVE.match(name) and name not in routed}


def functional_collectives(world: World) -> dict[str, Callable[..., Tensor]]:
    """Kernels for the operators ``_c10d_functional::*`` on XLA tensors.

    ``torch.distributed._functional_collectives`` and plain ``xm.all_reduce`` end there; torch-xla's own
    kernels ignore the group.
    """

    def peers(group_name: str) -> GroupMembers:
        if group_name == "":
            return world.peers()
        group = _resolve_process_group(group_name)
        if not isinstance(group, EmulatedProcessGroup):
            raise NotEmulated(f"functional collective on XLA tensors over the {group.name()} group {group_name!r}")
        return group.peers

    def all_reduce(tensor: Tensor, kind: str, group_name: str) -> Tensor:
        return collectives.all_reduce(peers(group_name), _FUNCTIONAL_KINDS.get(kind, kind), tensor)

    def all_gather_into_tensor(tensor: Tensor, _size: int, group_name: str) -> Tensor:
        return collectives.all_gather(peers(group_name), tensor)

    def reduce_scatter_tensor(tensor: Tensor, kind: str, _size: int, group_name: str) -> Tensor:
        return collectives.reduce_scatter(peers(group_name), _FUNCTIONAL_KINDS.get(kind, kind), tensor)

    def all_to_all_single(tensor: Tensor, outs: list[int], ins: list[int], group_name: str) -> Tensor:
        if len({*outs, *ins}) > 1:
            raise NotEmulated("all_to_all_single with unequal splits: XLA devices lack it too")
        return collectives.all_to_all(peers(group_name), tensor)

    def broadcast(tensor: Tensor, source: int, group_name: str) -> Tensor:
        return collectives.broadcast(peers(group_name), tensor, source)

    kernels = (all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, broadcast)
    return {kernel.__name__: kernel for kernel in kernels}


_FUNCTIONAL_KINDS = {"product": "mul", "band": "and", "bor": "or"}
