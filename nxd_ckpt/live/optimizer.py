"""Choice of the adapter for a live optimizer, and the adapters' protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, UnsupportedState
from nxd_ckpt.formats.tensors import Path
from nxd_ckpt.live.dtensor import Placed, is_dtensor
from nxd_ckpt.live.expert_zero1 import ExpertZero1Optimizer
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.named import by_name
from nxd_ckpt.live.named_optimizers import NamedOptimizers
from nxd_ckpt.live.optimizer_dict import DictOptimizer
from nxd_ckpt.live.optimizer_names import parameter_names
from nxd_ckpt.live.optimizer_state import Keeps, LeafSource, flat_parameters, keeps_nothing
from nxd_ckpt.live.plain import PlainOptimizer
from nxd_ckpt.live.state import OptimizerForm, State
from nxd_ckpt.live.torch_zero import TorchZeroOptimizer, is_torch_zero
from nxd_ckpt.live.zero1 import Zero1Optimizer


class OptimizerAdapter(Protocol):
    """A live optimizer as a state tree and back. ``kind`` is "plain" or "zero1" (each rank has its own state).

    ``parameter_names`` lists the names of all parameters in the order of their indices, None if they are unknown.
    ``stepping`` is the live optimizer whose class keeps the state; None if there are several, or none.
    """

    kind: str
    parameter_names: list[str] | None
    stepping: Any

    def form(self) -> OptimizerForm | None:
        """Return the form of its state dict on this rank; None for a dict, which takes any saved one.

        Raises OptimizerMismatch if only the optimizer itself knows how its state is cut.
        """

    def entries(self) -> Iterable[str]:
        """Return the global names of its state so far."""

    def capture(self) -> State:
        """Return the optimizer's state dict in NxD's form, with its live tensors. No device work."""

    def validate(self, saved: Mapping[str, Any]) -> None:
        """Check that ``saved`` (a state dict whose leaves are tensors or have ``dtype`` and ``shape``) fits.

        Changes nothing. Raises OptimizerMismatch for another kind or other param groups, ShapeMismatch or
        DtypeMismatch for a tensor that does not fit.
        """

    def placed(self, saved: Mapping[str, Any]) -> Mapping[Path, Placed]:
        """Return the mesh positions of those of ``saved``'s tensors, by path, that are loaded into DTensors.

        `load` takes this rank's part of each instead. Raises UnsupportedState for a DTensor that is not cut into boxes.
        """

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        """Continue from ``saved``, which `validate` accepted, reading one leaf at a time; after the model's load.

        State whose name ``keeps`` accepts is not in ``saved``, and stays.

        No collective, nothing compiled. Gradients are dropped: the next backward pass makes new ones. (With
        ``zero_grad(set_to_none=False)``, torch-xla's and NxD's default, an uninterrupted run would keep zero gradients,
        and so would go on decaying a parameter that had a gradient before and gets none in the next step.)
        """

    def after_load(self) -> None:
        """Call the hooks that torch calls after a load, when everything is loaded."""

    def followed(self, saved: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the live parameters, by name, that `load` copies into shards because ``saved`` has no such values."""

    def follow(self, keeps: Keeps) -> None:
        """Copy the model's weights again into ZeRO-1's shards, after a load of the model alone.

        Otherwise the next step would restore the old weights.
        """


def open_optimizer(
    optimizer: Any,
    *,
    model: ModelAdapter | None = None,
    param_names: Sequence[Sequence[str]] | None = None,
    zero1_optimizer: bool = False,
    topology: Topology | None = None,
) -> OptimizerAdapter:
    """Return the adapter of ``optimizer``, recognised by its attributes; NxD's wrappers are removed.

    Names come from ``param_names`` (per param group), else from the identity of ``model``'s parameters, else from names
    that torch keeps in the groups. ``zero1_optimizer``: a dict, or an optimizer of another kind, has state of this rank
    alone. An optimizer of DTensors needs no such flag.

    Raises InvalidArgument for an object that is no optimizer, UnsupportedState for shards that do not follow the
    ``topology``.
    """
    topology = topology or Topology()
    several = by_name(optimizer, "optimizer")
    if several is not None:
        return _open_several(several, model, param_names, zero1_optimizer, topology)
    if isinstance(optimizer, dict):
        return DictOptimizer(optimizer, param_names, model, zero1_optimizer, topology)
    optimizer = _unwrapped(optimizer)
    if hasattr(optimizer, "ep_zero_optimizer"):
        inner = optimizer.non_ep_zero_optimizer, optimizer.ep_zero_optimizer
        names = parameter_names([*inner[0].param_groups, *inner[1].param_groups], model, param_names)
        return ExpertZero1Optimizer(optimizer, names, topology)
    if is_torch_zero(optimizer):
        return TorchZeroOptimizer(optimizer, model, param_names, topology)
    names = parameter_names(optimizer.param_groups, model, param_names)
    if model is not None and model.is_placed:
        _refuse_others_parameters(names)
    return _adapter(optimizer, names, zero1_optimizer, topology)


def _adapter(optimizer: Any, names: list[str], zero1_optimizer: bool, topology: Topology) -> OptimizerAdapter:
    """Return the adapter of one optimizer whose parameters have these names."""
    if hasattr(optimizer, "sharding_groups"):
        return Zero1Optimizer(optimizer, names, topology)
    on_meshes = any(is_dtensor(parameter) for parameter, _ in flat_parameters(optimizer.param_groups))
    return PlainOptimizer(optimizer, names, topology.tp, sharded=zero1_optimizer and not on_meshes)


def _open_several(
    optimizers: Mapping[str, Any],
    model: ModelAdapter | None,
    param_names: Sequence[Sequence[str]] | None,
    zero1_optimizer: bool,
    topology: Topology,
) -> NamedOptimizers:
    """Return the adapter of several. Raises InvalidArgument if two of them hold one parameter."""
    ordered = {name: _unwrapped(optimizers[name], f"optimizer[{name!r}]") for name in sorted(optimizers)}
    for name, optimizer in ordered.items():
        if hasattr(optimizer, "ep_zero_optimizer") or is_torch_zero(optimizer):
            raise UnsupportedState(
                f"optimizer[{name!r}] is a {type(optimizer).__name__}, which is saved and loaded alone: use a "
                "directory of its own for it"
            )
    groups = [group for optimizer in ordered.values() for group in optimizer.param_groups]
    names = parameter_names(groups, model, param_names)
    if model is not None and model.is_placed:
        _refuse_others_parameters(names)
    adapters: dict[str, OptimizerAdapter] = {}
    owners: dict[int, str] = {}
    rest = iter(names)
    for name, optimizer in ordered.items():
        parameters = [parameter for parameter, _ in flat_parameters(optimizer.param_groups)]
        own = list(islice(rest, len(parameters)))
        for parameter, its_name in zip(parameters, own, strict=True):
            if owners.setdefault(id(parameter), name) != name:
                raise InvalidArgument(
                    f"optimizer[{owners[id(parameter)]!r}] and optimizer[{name!r}] both hold the parameter "
                    f"{its_name!r}, whose state in a tag is by its name: give it to one of them, or save one of the "
                    "two under a directory of its own"
                )
        adapters[name] = _adapter(optimizer, own, zero1_optimizer, topology)
    return NamedOptimizers(adapters, names)


def _refuse_others_parameters(names: Sequence[str]) -> None:
    """Raise OptimizerMismatch for an optimizer whose parameters are not those of the model of DTensors."""
    unnamed = [name for name in names if name.startswith("#")]
    if unnamed:
        raise OptimizerMismatch(
            f"optimizer: its parameter {unnamed[0]} is not one of the model's ({len(unnamed)} are not): fully_shard "
            "and parallelize_module replace parameters, so make the optimizer after them"
        )


def _unwrapped(optimizer: Any, called: str = "optimizer=") -> Any:
    inner = optimizer
    # NxD's wrapper has no state of its own; other wrappers (Lookahead) do, and are saved themselves.
    while hasattr(inner, "nxd_config") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if isinstance(inner, type) or not hasattr(inner, "param_groups") or not hasattr(inner, "state_dict"):
        kind = f"the class {inner.__name__} itself" if isinstance(inner, type) else f"a {type(optimizer).__name__}"
        several = isinstance(optimizer, (list, tuple)) and bool(optimizer)
        advice = "; pass several by name, optimizer={name: optimizer}" if several else ""
        raise InvalidArgument(
            f"{called} must be a torch optimizer, an NxD optimizer or a state dict, found {kind}{advice}"
        )
    return inner
