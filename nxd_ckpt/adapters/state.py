"""State trees: what a rank holds, as NxD's state dict, with a note on what each tensor of it is globally."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.formats.tensors import Path, iter_tensors, map_tensors

MASTER_WEIGHTS = "master_weights"
"""Last part of the global name of a ZeRO-1 shard's full-precision values."""


@dataclass(frozen=True)
class StateTensor:
    """What one tensor of a state tree is, globally.

    ``name`` is "model/embed.weight", "optim/embed.weight/exp_avg", "optim/embed.weight/master_weights", or
    "optim/#3/exp_avg" where the parameter's name is not known. ``spec`` is the parameter that the tensor is shaped like
    (as this rank holds it, not yet cut by ZeRO-1), None for scalars and unknown shapes. ``shard`` of ``shards`` is the
    ZeRO-1 cut of ``spec.shape`` along dimension 0. Equal ``tie`` means the same memory: stored once. ``expert`` says
    that the tensor belongs to an expert parameter, whatever its shape.
    """

    name: str
    spec: ParameterSpec | None = None
    shards: int = 1
    shard: int = 0
    tie: Hashable | None = None
    expert: bool = False


@dataclass
class State:
    """One part of a checkpoint as this rank holds it.

    ``tree`` is what NxD's state dict is, with live types; its containers are copies, its tensors the live ones (any
    device). ``describe`` describes every tensor of it, see :attr:`tensors`: only on demand, because that takes longer
    than copying a small one, and is mostly known already at the next save. ``grounds`` is all that ``describe`` depends
    on besides the tree: if tree and grounds are equal, so is the description.
    """

    tree: dict[str, Any]
    describe: Callable[[], dict[Path, StateTensor]]
    grounds: Any = None

    @cached_property
    def tensors(self) -> dict[Path, StateTensor]:
        """Every tensor of the tree by path, depth first in dict order."""
        return self.describe()

    def master_weight_entries(self) -> dict[str, Path]:
        """The path of each parameter's master weights, by the parameter's name."""
        suffix = f"/{MASTER_WEIGHTS}"
        return {
            about.name.removeprefix("optim/").removesuffix(suffix): path
            for path, about in self.tensors.items()
            if about.name.endswith(suffix)
        }


@dataclass
class ModelState(State):
    """The model's state. ``specify`` tells about the parameters and buffers that this rank holds, when asked."""

    specify: Callable[[], dict[str, ParameterSpec]] = dict

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """The parameters and buffers that this rank holds, by name."""
        return self.specify()


@dataclass(frozen=True)
class OptimizerSlot:
    """One parameter of an optimizer as a rank holds it, and ``shard`` of ``shards``, its ZeRO-1 cut."""

    name: str
    spec: ParameterSpec
    shards: int = 1
    shard: int = 0


@dataclass(frozen=True)
class OptimizerForm:
    """What an optimizer's state dict is on one rank, its values left out.

    ``slots`` are its parameters in the order of their indices, ``groups`` how many of them each param group has.
    ``ordinary`` is None, or for ZeRO-1 with expert parallelism how many slots, and how many groups, come before the
    experts'.
    """

    kind: str
    slots: tuple[OptimizerSlot, ...]
    groups: tuple[int, ...]
    ordinary: tuple[int, int] | None = None


def state_of(
    tree: dict[str, Any], describe: Callable[[Path, torch.Tensor], StateTensor], grounds: Any
) -> State:
    """The state whose tensors ``describe(path, tensor)`` tells about, on these ``grounds``."""
    copied = frozen(tree)
    return State(
        copied, lambda: {path: describe(path, leaf) for path, leaf in iter_tensors(copied, torch.Tensor)}, grounds
    )


def frozen(tree: dict[str, Any]) -> dict[str, Any]:
    """``tree`` with its containers copied: they change while the tensors are being copied, or after (an optimizer's
    Python ``step``)."""
    copied: dict[str, Any] = map_tensors(tree, _without_graph, torch.Tensor)
    return copied


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    # Detaching makes a new object; one that needs none keeps its identity, so that sharing stays visible.
    return tensor.detach() if tensor.requires_grad else tensor
