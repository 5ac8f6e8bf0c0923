"""Installation of an emulated world under torch-xla and ``torch.distributed`` in this process.

torch-xla's collective primitives and runtime facts are replaced below the public functions (in ``torch_xla._XLAC`` and
in the dispatcher): ``xm.all_reduce``, the bucketized forms, ``torch_xla.core.functions``, FSDP and names that were
imported early all end there, with torch-xla's own argument checks in front.
"""

# For mypy: torch.distributed does not declare what it exports.
# mypy: disable-error-code="attr-defined, arg-type, name-defined, no-untyped-call"
from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from nxd_ckpt.emulation import collectives
from nxd_ckpt.emulation.process_group import EmulatedProcessGroup, create_process_group
from nxd_ckpt.emulation.world import GroupMembers, NotEmulated, World, world_from_environment
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


# Per process, as what is patched: the world, and the handle that keeps the dispatcher's kernels registered.
_installed: World | None = None
_library: torch.library.Library | None = None


def install() -> World:
    """Join the processes that the launcher started with this one, and route collectives to them.

    Call it before the training script is imported; a second call returns the first one's world. ``PJRT_DEVICE`` is set
    to CPU. Collective over the processes from the first collective on; itself it only reaches rank 0's store.

    Raises:
        NotEmulated: SPMD is switched on.
        ModuleNotFoundError: torch-xla is not installed.
    """
    global _installed
    if _installed is None:
        if os.environ.get("XLA_USE_SPMD", "0") != "0":
            _refuse_spmd()
        os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1")
        world = world_from_environment()
        # What torch_xla.runtime asks about this host.
        os.environ["PJRT_LOCAL_PROCESS_RANK"] = str(world.local_rank)
        os.environ["PJRT_LOCAL_PROCESS_COUNT"] = str(world.local_size)
        _patch_torch_xla(world)
        _patch_torch_distributed(world)
        _installed = world
    return _installed


def _patch_torch_xla(world: World) -> None:
    import torch_xla.core.dynamo_bridge as dynamo_bridge
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch_xla import _XLAC
    from torch_xla._internal import pjrt

    routed = routed_primitives(world)
    for name, fact in runtime_facts(world).items():
        setattr(_XLAC, name, fact)
    for name, primitive in (routed | unrouted_primitives(dir(_XLAC), list(routed))).items():
        # Not to be traced into, as the native ones are not: torch.compile breaks its graph around the call.
        setattr(_XLAC, name, torch._dynamo.disable(primitive))
    xr._WORLD_SIZE = world.size
    xr._ORDINAL = world.rank
    xr.use_spmd = _refuse_spmd
    xm.xla_rendezvous = _rendezvous(world)
    # Gone from recent releases, still called by scripts written for torch-xla before 2.7.
    xm.get_ordinal = getattr(xm, "get_ordinal", xr.global_ordinal)
    xm.xrt_world_size = getattr(xm, "xrt_world_size", xr.world_size)
    pjrt.spawn = _spawn_in_place(world)
    dynamo_bridge.extract_compiled_graph = _without_collectives(dynamo_bridge.extract_compiled_graph)
    _replace_kernels(functional_collectives(world))


def _patch_torch_distributed(world: World) -> None:
    from torch_xla.distributed import xla_backend

    groups = itertools.count()  # a name of its own for each group: the store keeps what earlier ones put in

    def rendezvous(_url: str, **_options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield dist.PrefixStore(f"xla://{next(groups)}", world.store), world.rank, world.size

    dist.Backend._plugins["XLA"] = dist.Backend._BackendPlugin(create_process_group, True)
    dist.rendezvous.__globals__["_rendezvous_handlers"]["xla"] = rendezvous
    # torch-xla's version derives device meshes that the emulated group does not use, and lacks newer
    # arguments.
    dist.new_group = xla_backend._orig_new_group_fn


def _replace_kernels(kernels: dict[str, Callable[..., torch.Tensor]]) -> None:
    global _library
    _library = torch.library.Library("_c10d_functional", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "Overriding a previously registered kernel"
        for name, kernel in kernels.items():
            _library.impl(name, kernel, "XLA", allow_override=True)


def _rendezvous(world: World) -> Callable[..., list[bytes]]:
    """Replace ``xm.xla_rendezvous``, under ``xm.rendezvous`` and ``xm.mesh_reduce``, without device tensors."""
    import torch_xla

    def xla_rendezvous(payload: bytes = b"", ordinals: list[int] | None = None, tag: str | None = None) -> list[bytes]:
        if ordinals and len(ordinals) != world.size:
            raise ValueError(f"rendezvous {tag!r} of ranks {ordinals}: torch-xla supports only all ranks")
        if not isinstance(payload, bytes):
            raise TypeError(f"rendezvous {tag!r}: the payload must be bytes, not {type(payload).__name__}")
        torch_xla.sync()  # as torch-xla's own does: step closures run before ranks meet
        return world.peers().gather_bytes(f"rendezvous({tag!r})", payload)

    return xla_rendezvous


def _spawn_in_place(world: World) -> Callable[..., None]:
    """Replace ``pjrt.spawn``, under ``xmp.spawn`` and ``torch_xla.launch``: the launcher has spawned already."""

    def spawn(
        fn: Callable[..., Any],
        nprocs: int | None = None,
        start_method: str = "spawn",
        args: tuple[Any, ...] = (),
    ) -> None:
        if nprocs not in (None, 1, world.size):
            raise ValueError(f"spawn with nprocs={nprocs}: leave it out, {world.size} processes run already")
        fn(world.rank, *args)

    return spawn


def _without_collectives(extract: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(backend="openxla")`` records a graph once: a collective's first result would be in it."""

    def extract_compiled_graph(model: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in model.graph.nodes:
            if "c10d_functional" in str(node.target):
                raise NotEmulated(
                    f"{node.target} under torch.compile: keep collectives outside of the compiled function, or "
                    "use torch_xla.compile or no compile in emulation"
                )
        return extract(model, inputs)

    return extract_compiled_graph


def _refuse_spmd(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise NotEmulated(
        "SPMD (use_spmd, XLA_USE_SPMD): CPU-XLA emulation has one device a process and no mesh between them; "
        "use process groups and torch_xla.launch"
    )
