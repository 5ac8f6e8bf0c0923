"""State trees: a rank's part of a checkpoint as NxD's state dict, with a global description of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Piece, zero1_pieces
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.strides import Stride, stride_of, with_note
from nxd_ckpt.formats.tensors import Path, iter_tensors, map_tensors
from nxd_ckpt.live.dtensor import Placed, is_dtensor, local_of, placed_of, traits_of

MASTER_WEIGHTS = "master_weights"
"""Last part of the global name of a ZeRO-1 shard's full-precision values."""


class StateTensor(NamedTuple):
    """The global description of one tensor of a state tree.

    ``name`` is "model/embed.weight", "optim/embed.weight/exp_avg", "optim/embed.weight/master_weights", or
    "optim/#3/exp_avg" where the parameter's name is unknown. ``spec`` is the parameter that the tensor is shaped like
    (this rank's part, not yet cut by ZeRO-1), None for scalars and unknown shapes. ``shard`` of ``shards`` is the
    ZeRO-1 cut of ``spec.shape`` along dimension 0. Equal ``tie`` means the same memory: stored once. ``expert``: the
    tensor belongs to an expert parameter, whatever its shape. ``placed`` is a DTensor's position on its mesh.
    """

    name: str
    spec: ParameterSpec | None = None
    shards: int = 1
    shard: int = 0
    tie: Hashable | None = None
    expert: bool = False
    placed: Placed | None = None

    def pieces(self, topology: Topology, shape: Iterable[int]) -> tuple[Piece, ...] | None:
        """Return the parts of the global tensor that this rank's tensor of ``shape`` is; None if unknown."""
        if self.placed is not None:
            return self.placed.pieces
        spec = self.spec
        if spec is None:
            return None
        pieces = spec.partition.pieces(spec.shape, topology.tp_rank, topology.tp, topology.ep_rank)
        if pieces is None or self.shards == 1:
            return None if tuple(shape) != spec.shape else pieces
        return tuple(zero1_pieces(pieces, spec.shape, self.shards, self.shard))


@dataclass
class State:
    """One part of a checkpoint on this rank.

    ``tree`` is NxD's state dict with live types. Its containers are copies, its tensors the live ones (any device), or
    this rank's parts of DTensors; ``is_placed`` is True if there are such. ``describe`` describes every tensor of it,
    see `tensors`: only on demand, because that takes longer than copying a small one, and the next save mostly knows it
    already. ``cache_key`` is everything that ``describe`` depends on besides the tree: equal trees and keys have equal
    descriptions.
    """

    tree: dict[str, Any]
    describe: Callable[[], dict[Path, StateTensor]]
    cache_key: Any = None
    is_placed: bool = False

    @cached_property
    def tensors(self) -> dict[Path, StateTensor]:
        """Description of every tensor of the tree by path, depth first in dict order."""
        return self.describe()

    def master_weight_entries(self) -> dict[str, Path]:
        """Return the path of each parameter's master weights, by the parameter's name."""
        suffix = f"/{MASTER_WEIGHTS}"
        return {
            about.name.removeprefix("optim/").removesuffix(suffix): path
            for path, about in self.tensors.items()
            if about.name.endswith(suffix)
        }


@dataclass
class ModelState(State):
    """The model's state. ``specify`` returns the specifications of this rank's parameters and buffers."""

    specify: Callable[[], dict[str, ParameterSpec]] = dict

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """Specifications of this rank's parameters and buffers, by name."""
        return self.specify()


@dataclass(frozen=True)
class OptimizerSlot:
    """One parameter of an optimizer on a rank, and ``shard`` of ``shards``, its ZeRO-1 cut.

    ``master_dtype`` is the dtype of the master weights, None if the optimizer steps on the parameter itself.
    """

    name: str
    spec: ParameterSpec
    shards: int = 1
    shard: int = 0
    master_dtype: str | None = None


@dataclass(frozen=True)
class OptimizerForm:
    """The form of an optimizer's state dict on one rank, without its values.

    ``slots`` are its parameters in the order of their indices, ``groups`` the number of parameters of each param group,
    and ``options`` its live options. ``ordinary`` is None, or for ZeRO-1 with expert parallelism the number of slots,
    and of groups, before the experts'.
    """

    kind: str
    slots: tuple[OptimizerSlot, ...]
    groups: tuple[int, ...]
    ordinary: tuple[int, int] | None = None
    options: tuple[dict[str, Any], ...] = field(default=(), compare=False)


def state_of(
    tree: dict[str, Any],
    describe: Callable[[Path, torch.Tensor], StateTensor],
    cache_key: Any,
    stride: Callable[[Path, torch.Tensor], Stride | None],
) -> State:
    """Return the state whose tensors ``describe(path, tensor)`` describes, depending on ``cache_key``.

    ``stride`` returns the strides of tensors that a load would make with others.
    """
    frozen = Frozen(tree, stride)

    def described() -> dict[Path, StateTensor]:
        leaves = iter_tensors(frozen.tree, torch.Tensor)
        if not frozen.is_placed:
            return {path: describe(path, leaf) for path, leaf in leaves}
        return {path: frozen.placed(describe(path, frozen.live(leaf)), leaf) for path, leaf in leaves}

    return State(frozen.tree, described, (cache_key, frozen.cache_key()), frozen.is_placed)


class Frozen:
    """A copy of the containers of ``tree``, which change during and after the copying of tensors.

    (An optimizer's Python ``step`` changes them.) DTensors are replaced by this rank's parts.
    """

    def __init__(self, tree: dict[str, Any], stride: Callable[[Path, torch.Tensor], Stride | None]) -> None:
        # One object for a tensor each time, so that sharing stays visible.
        self._locals: dict[int, torch.Tensor] = {}
        self._aliases: dict[int, torch.Tensor] = {}
        self._dtensors: dict[int, torch.Tensor] = {}
        leaves = ((path, self._local(leaf)) for path, leaf in iter_tensors(tree, torch.Tensor))
        self._strides = {id(leaf): own for path, leaf in leaves if (own := stride(path, leaf)) is not None}
        self.tree: dict[str, Any] = map_tensors(tree, self._freeze, torch.Tensor)

    @property
    def is_placed(self) -> bool:
        """True if there are DTensors in it."""
        return bool(self._dtensors)

    def cache_key(self) -> Any:
        """Return a key that is equal for equal mesh positions of its DTensors and equal noted strides."""
        strides = [stride_of(leaf) for _, leaf in iter_tensors(self.tree, torch.Tensor)] if self._strides else []
        return list(map(traits_of, self._dtensors.values())), strides

    def live(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the DTensor of which a leaf of the tree is this rank's part; any other leaf unchanged."""
        return self._dtensors.get(id(leaf), leaf)

    def placed(self, about: StateTensor, leaf: torch.Tensor) -> StateTensor:
        """Return the leaf's description, with the position on its mesh if it is of a DTensor.

        Raises UnsupportedState for a DTensor that is not cut into boxes.
        """
        live = self._dtensors.get(id(leaf))
        return about if live is None else about._replace(placed=placed_of(about.name, live, leaf))

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(tensor):
            return tensor
        local = self._locals.get(id(tensor))
        if local is None:
            local = self._locals[id(tensor)] = local_of(tensor)
            self._dtensors[id(local)] = tensor
        return local

    def _freeze(self, tensor: torch.Tensor) -> torch.Tensor:
        local = self._local(tensor)
        stride = self._strides.get(id(local))
        if stride is None:
            return local.detach() if local.requires_grad else local
        alias = self._aliases.get(id(local))
        if alias is None:
            alias = self._aliases[id(local)] = with_note(local, stride)
            if local is not tensor:
                self._dtensors[id(alias)] = tensor
        return alias
