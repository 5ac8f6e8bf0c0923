"""Installation of an emulated world under torch-xla and ``torch.distributed`` in this process."""

# For mypy: torch.distributed does not declare what it exports.
# mypy: disable-error-code="attr-defined, name-defined, no-untyped-call"
from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nxd_ckpt.emulation.primitives import (
    functional_collectives,
    routed_primitives,
    runtime_facts,
    unrouted_primitives,
)
from nxd_ckpt.emulation.process_group import create_process_group
from nxd_ckpt.emulation.world import NotEmulated, World, world_from_environment

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
    xr._WORLD_SIZE, xr._ORDINAL = world.size, world.rank
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
