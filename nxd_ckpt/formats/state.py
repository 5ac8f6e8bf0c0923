"""State trees: a rank's part of a checkpoint as NxD's state dict, with a global description of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

from nxd_ckpt.core.manifest import ParameterSpec, Parts
from nxd_ckpt.core.mesh import Placed
from nxd_ckpt.core.partition import Piece, zero1_pieces
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS, MASTER_WEIGHTS
from nxd_ckpt.formats.tensors import Path, form_of, iter_tensors


class StateTensor(NamedTuple):
    """The global description of one tensor of a state tree.

    ``name`` is "model/embed.weight", "optim/embed.weight/exp_avg", "optim/embed.weight/master_weights", or
    "optim/#3/exp_avg" where the parameter's name is unknown. ``spec`` is the parameter that the tensor is shaped like
    (this rank's part, not yet cut by ZeRO-1), None for scalars and unknown shapes. ``shard`` of ``shards`` is the
    ZeRO-1 cut of ``spec.shape`` along dimension 0. Equal ``tie`` means the same memory: stored once. ``expert``: the
    tensor belongs to an expert parameter, whatever its shape. ``placed`` is a DTensor's position on its mesh.
    ``broadcast_ranks`` are ranks of the job that get the first one's value before the next use.
    """

    name: str
    spec: ParameterSpec | None = None
    shards: int = 1
    shard: int = 0
    tie: Hashable | None = None
    expert: bool = False
    placed: Placed | None = None
    broadcast_ranks: tuple[int, ...] = ()

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
    descriptions. ``of_rank`` are paths of what this rank alone has.
    """

    tree: dict[str, Any]
    describe: Callable[[], dict[Path, StateTensor]]
    cache_key: Any = None
    is_placed: bool = False
    of_rank: frozenset[Path] = frozenset()

    @cached_property
    def tensors(self) -> dict[Path, StateTensor]:
        """Description of every tensor of the tree by path, depth first in dict order."""
        return self.describe()

    @cached_property
    def forms(self) -> str:
        """A digest that is equal for tensors of the same names, shapes and dtypes, in the same order."""
        digest = sha256()
        for path, tensor in iter_tensors(self.tree):
            digest.update(repr((self.tensors[path].name, *form_of(tensor))).encode())
        return digest.hexdigest()[:32]

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


@dataclass(frozen=True)
class SaveState:
    """Everything that one call saves, in this rank's form.

    ``optimizer_kind`` as in core.manifest.Parts; ``left_out`` says in words what is not saved.

    Without ``lower_precision_weights``, weights that the optimizer's master weights represent are left out, if NxD
    would leave them out too: only then can it load the rest. If it ``is_of_rank``, no tensors of model and optimizer
    are copies of other ranks'. ``own`` is state of the optimizer that this rank alone has, and its tree lacks: path and
    value by name.
    """

    model: ModelState | None = None
    optimizer: State | None = None
    optimizer_kind: str | None = None
    optimizer_names: tuple[str, ...] | None = None
    scheduler: Any = None
    user_content: Any = None
    rank_content: Any = None
    use_xser: bool = False
    lower_precision_weights: bool = True
    left_out: Sequence[str] = ()
    is_of_rank: bool = False
    own: Mapping[str, tuple[Path, Any]] = field(default_factory=dict)

    @property
    def is_placed(self) -> bool:
        """True if there are DTensors in it."""
        return any(state.is_placed for state in self.trees().values())

    def trees(self) -> dict[str, State]:
        """Return the saved ones of model and optimizer, by field."""
        both: dict[str, State | None] = {"model": self.model, "optimizer": self.optimizer}
        return {part: state for part, state in both.items() if state is not None}

    def has_master_weights(self) -> bool:
        return self.optimizer is not None and bool(self.optimizer.master_weight_entries())

    def parts(self, master_weights: bool) -> Parts:
        """Return the parts to save; ``master_weights`` is the result of `has_master_weights`."""
        return Parts(
            model=self.model is not None,
            optimizer=self.optimizer_kind,
            scheduler=self.scheduler is not None,
            user_content=self.user_content is not None,
            rank_content=self.rank_content is not None,
            use_xser=self.use_xser,
            master_weights=master_weights,
            lower_precision_weights=self.lower_precision_weights or bool(self.needs_all_weights(master_weights)),
        )

    def needs_all_weights(self, master_weights: bool) -> str | None:
        """Return why no weights of the model can be left out; None if they can."""
        if not self.use_xser:
            return "without use_xser=True NxD loads every weight from the model's files"
        if not master_weights:
            return "the optimizer holds no master weights that could stand for them (save_master_weights=True)"
        if self.optimizer is not None and EXPERT_KEYS[0] in self.optimizer.tree:
            return "with expert parallelism NxD loads no master weights"
        return None
