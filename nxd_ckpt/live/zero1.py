"""ZeRO-1: torch-xla's ZeroRedundancyOptimizer and NxD's subclasses, recognised by their attributes.

Such an optimizer has the full parameters (its ``param_groups``) and a ``base_optimizer`` that steps on shards of them
(dimension 0, padded with zeros to a multiple of the sharding group; source:
torch_xla.distributed.zero_redundancy_optimizer). Its own ``load_state_dict`` is not used: it copies everything,
gathers, takes shards without saved master weights from the parameters' current values, and leaves zero gradients
behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.partition import zero1_rows
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, ShapeMismatch, UnsupportedState
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS, KEYS, MASTER_WEIGHTS, MASTERS, options_of, split
from nxd_ckpt.formats.state import OptimizerForm
from nxd_ckpt.formats.tensors import Path, dtype_name
from nxd_ckpt.live.frozen import LiveState
from nxd_ckpt.live.load_hooks import call_post_hooks, has_post_hooks, keys_of_its_own
from nxd_ckpt.live.optimizer_state import (
    Keeps,
    LeafSource,
    OptimizerAdapter,
    Slot,
    check_form,
    check_groups,
    check_state,
    entries_of,
    fill_state,
    flat_parameters,
    form_of_slots,
    keeps_any_shape,
    keeps_nothing,
    overwrite,
    restore_groups,
    state_by_slots,
    traits_of_all,
)
from nxd_ckpt.live.parameters import refuse_short, spec_of
from nxd_ckpt.live.state_names import if_known
from nxd_ckpt.live.torch_xla import copy_in, to_cpu

logger = logging.getLogger(__name__)


class Zero1Optimizer(OptimizerAdapter):
    """The OptimizerAdapter of ZeRO-1.

    ``expert`` ones are sharded over the replicas of each expert, not over all of dp.
    """

    kind = "zero1"

    def __init__(self, optimizer: Any, names: list[str], topology: Topology, *, expert: bool = False) -> None:
        if not hasattr(optimizer, "base_optimizer"):
            raise InvalidArgument(
                f"{type(optimizer).__name__} has no shards yet (lazy_init=True): call its init_zero(), or "
                "partition the pipeline model, before saving or loading"
            )
        self._place = _place_in_group(optimizer, topology, expert)
        self.parameter_names: list[str] | None = if_known(names)
        self._optimizer = optimizer
        self._names = names
        self._tp = topology.tp
        self.stepping: Any = optimizer.base_optimizer

    @cached_property
    def slots(self) -> list[Slot]:
        full = flat_parameters(self._optimizer.param_groups)
        cut = flat_parameters(self._optimizer.base_optimizer.param_groups)
        return [
            Slot(name, parameter, key, group, spec_of(parameter, self._tp), *self._place)
            for name, (parameter, _), (key, group) in zip(self._names, full, cut, strict=True)
        ]

    def cache_key(self) -> Any:
        """Return everything that the description of its state depends on besides the tree, see `State`."""
        traits = traits_of_all(self._optimizer), traits_of_all(self._optimizer.base_optimizer)
        return self._place, self._tp, self._names, traits

    def form(self) -> OptimizerForm:
        return form_of_slots(self.kind, self.slots, self._optimizer.param_groups)

    def entries(self) -> Iterator[str]:
        yield from entries_of(self.slots, self._optimizer.base_optimizer.state)
        yield from (slot.global_name(MASTER_WEIGHTS) for slot in self.slots)

    def live_state(self) -> LiveState:
        def slot_at(path: Path) -> Slot | None:
            return self.slots[path[1]] if path[0] in ("base_state", MASTERS) and isinstance(path[1], int) else None

        refuse_own_ways([self._optimizer, self._optimizer.base_optimizer])
        tree = self._optimizer.state_dict()
        refuse_own_keys(tree, self._optimizer)
        return state_by_slots(tree, slot_at, self.cache_key())

    def validate(self, saved: Mapping[str, Any]) -> None:
        check_kind(saved, self._optimizer, expert=False)
        warn_of_own_keys(saved, self._optimizer)
        self.validate_part(saved)

    def validate_part(self, saved: Mapping[str, Any]) -> None:
        indices = check_groups(self._optimizer.param_groups, saved["param_groups"])
        if indices != list(range(len(self.slots))):
            raise OptimizerMismatch(f"optimizer: indices of its parameters must count up from 0, found {indices[:8]}")
        slots = dict(enumerate(self.slots))
        for index, shape in saved.get("shape_info", {}).items():
            if index in slots and tuple(shape) != tuple(slots[index].parameter.shape):
                raise ShapeMismatch(
                    f"optim/{slots[index].name}: saved for a parameter of shape {tuple(shape)}, the live one has "
                    f"{tuple(slots[index].parameter.shape)}; did the order of parameters, or tp, change?"
                )
        for slot in self.slots:
            refuse_short(slot.global_name(MASTER_WEIGHTS), slot.key)
        base = self._optimizer.base_optimizer
        check_state(slots, saved["base_state"], base.state, any_shape=keeps_any_shape(base))
        for index, weights in saved.get(MASTERS, {}).items():
            if index not in slots:
                raise OptimizerMismatch(f"optimizer: master weights for unknown parameter {index!r}")
            check_form(slots[index], MASTER_WEIGHTS, weights, slots[index].key)

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        optimizer = self._optimizer
        base = self._optimizer.base_optimizer
        restore_groups([optimizer.param_groups, base.param_groups], saved["param_groups"], read)
        fill_state(base.state, dict(enumerate(self.slots)), saved["base_state"], read, keeps)
        masters = saved.get(MASTERS, {})
        for index, weights in masters.items():
            overwrite(self.slots[index].key, weights, read)
        self._rederive([slot for index, slot in enumerate(self.slots) if index not in masters], keeps)
        for slot in self.slots:
            slot.clear_gradients()

    def after_load(self) -> None:
        for optimizer in (self._optimizer, self._optimizer.base_optimizer):
            call_post_hooks(optimizer)

    def followed(self, saved: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        masters = saved.get(MASTERS, {})
        yield from ((slot.name, slot.parameter) for index, slot in enumerate(self.slots) if index not in masters)

    @property
    def passes_user_code(self) -> bool:
        return any(map(has_post_hooks, (self._optimizer, self._optimizer.base_optimizer)))

    def shards(self, saved: Mapping[str, Any]) -> Mapping[Any, Slot]:
        return dict(enumerate(self.slots))

    def follow(self, keeps: Keeps) -> None:
        self._rederive(self.slots, keeps)

    def _rederive(self, slots: list[Slot], keeps: Keeps) -> None:
        _rederive([slot for slot in slots if not keeps(slot.global_name(MASTER_WEIGHTS))])

    def master_weights(self) -> list[torch.Tensor] | None:
        """Return the shards' values, in the order of their indices, if this optimizer saves them; else None."""
        if not self._optimizer.save_master_weights:
            return None
        return [shard.data for shard, _ in flat_parameters(self._optimizer.base_optimizer.param_groups)]


def refuse_own_ways(optimizers: Iterable[Any]) -> None:
    """Raise UnsupportedState for hooks that a load would skip."""
    for optimizer in optimizers:
        if getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {}):
            raise UnsupportedState(
                f"optimizer: {type(optimizer).__name__} has hooks that look at its state dict before a load "
                "(register_load_state_dict_pre_hook); ZeRO-1 shards are loaded without one, so they would be "
                "skipped: use a post hook instead"
            )


def refuse_own_keys(tree: Mapping[str, Any], optimizer: Any) -> None:
    """Raise UnsupportedState for keys of a ZeRO-1 state dict that no load restores."""
    own = keys_of_its_own(tree, KEYS)
    if own:
        raise UnsupportedState(
            f"optimizer: the state_dict() of {type(optimizer).__name__} has {first_of(own)}, which is not part of "
            "ZeRO-1's. A load does not call its load_state_dict(), so it would be lost: save it as user_content, "
            "or as state of a parameter"
        )


def check_kind(saved: Mapping[str, Any], optimizer: Any, *, expert: bool) -> None:
    """Raise OptimizerMismatch unless ``saved`` is a ZeRO-1 state dict, with expert parallelism or without."""
    if "base_state" not in saved:
        raise OptimizerMismatch(
            f"optimizer: the checkpoint holds a plain optimizer's state ({', '.join(map(str, saved))}), the live "
            f"{type(optimizer).__name__} is ZeRO-1; build the optimizer as when it was saved, or pass optimizer=None"
        )
    if any(key in saved for key in EXPERT_KEYS) != expert:
        kinds = ("without expert parallelism", "with expert parallelism")
        raise OptimizerMismatch(
            f"optimizer: the checkpoint's ZeRO-1 state was saved {kinds[not expert]}, the live "
            f"{type(optimizer).__name__} is {kinds[expert]}; use the same expert_parallel_size, or optimizer=None"
        )


def warn_of_own_keys(saved: Mapping[str, Any], optimizer: Any) -> None:
    """Warn of keys in a ZeRO-1 state dict that are not restored."""
    own = keys_of_its_own(saved, KEYS)
    if own:
        logger.warning(
            "optimizer: the checkpoint has %s, which is not part of ZeRO-1's state; it is not restored into %s",
            first_of(own), type(optimizer).__name__,
        )  # fmt: skip


def shard_of(values: torch.Tensor, shards: int, shard: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the ZeRO-1 shard of a CPU tensor: rows ``shard * n .. (shard + 1) * n``, zeros beyond the end."""
    rows = zero1_rows(values.shape[0], shards)
    part = values[shard * rows : (shard + 1) * rows]
    padded = torch.zeros((rows, *values.shape[1:]), dtype=dtype)
    padded[: part.shape[0]] = part.to(dtype)
    return padded


def _rederive(slots: list[Slot]) -> None:
    """Cut the shards from the (loaded) parameters, one at a time."""
    lossy = {slot.parameter.dtype for slot in slots if slot.parameter.dtype != slot.key.dtype}
    if lossy:
        names = ", ".join(sorted(map(dtype_name, lossy)))
        logger.warning(
            "no master weights were loaded: shards are cut from %s parameters, so the resumed run cannot continue bit "
            "for bit; where the checkpoint has none, build the optimizer with save_master_weights=True",
            names,
        )
    for slot in slots:
        (values,) = to_cpu([slot.parameter])
        copy_in(slot.key, shard_of(values, slot.shards, slot.shard, slot.key.dtype))


def _place_in_group(optimizer: Any, topology: Topology, expert: bool) -> tuple[int, int]:
    """Return the number of shards and this rank's shard: its place in the optimizer's sharding groups."""
    rank = getattr(optimizer, "global_rank", topology.rank)
    group = next((list(group) for group in optimizer.sharding_groups if rank in group), None)
    place = None if group is None else (len(group), group.index(rank))
    expected = (topology.expert_dp, topology.expert_dp_rank) if expert else (topology.dp, topology.dp_rank)
    if place != expected:
        raise UnsupportedState(
            f"ZeRO-1 on rank {rank}: expected shard {expected[1]} of {expected[0]} (topology {topology.describe()}), "
            f"found (shards, shard) = {place} in sharding_groups {list(optimizer.sharding_groups)[:4]}; shard over the "
            "data-parallel groups, and pass topology= if neuronx-distributed is not initialised"
        )
    return expected


class ExpertZero1Optimizer(OptimizerAdapter):
    """The OptimizerAdapter of NxD's expert-parallel ZeRO-1, NeuronEPZero1Optimizer: two ZeRO-1 optimizers in one.

    The first shards ordinary parameters over dp, the second expert parameters over the replicas of each expert. In the
    state dict the entries from an offset on are the second's; its own indices restart at 0. Master weights, which
    upstream's state dict leaves out, are saved under the usual key.

    Learning-rate schedulers know the outer param groups only. Each step begins with copying their options onto the
    inner groups, so these are one step behind in between. Upstream saves and loads the inner ones: its resumed runs
    continue with the outer groups' initial learning rate. Here the outer groups' options are saved, and all three lists
    are restored.
    """

    kind = "zero1"

    def __init__(self, optimizer: Any, names: list[str], topology: Topology) -> None:
        ordinary = sum(len(group["params"]) for group in optimizer.non_ep_zero_optimizer.param_groups)
        self.parameter_names: list[str] | None = if_known(names)
        self._optimizer = optimizer
        self._ordinary = Zero1Optimizer(optimizer.non_ep_zero_optimizer, names[:ordinary], topology)
        self._experts = Zero1Optimizer(optimizer.ep_zero_optimizer, names[ordinary:], topology, expert=True)

    def form(self) -> OptimizerForm:
        ordinary = self._ordinary.form()
        experts = self._experts.form()
        first = len(ordinary.slots), len(ordinary.groups)
        return OptimizerForm(self.kind, ordinary.slots + experts.slots, ordinary.groups + experts.groups, first)

    def entries(self) -> Iterator[str]:
        yield from self._ordinary.entries()
        yield from self._experts.entries()

    def live_state(self) -> LiveState:
        refuse_own_ways([self._optimizer, *self._inner])
        tree = self._optimizer.state_dict()
        refuse_own_keys(tree, self._optimizer)
        outer = self._optimizer.param_groups
        tree["param_groups"] = [
            {**inner, **options_of(group)} for inner, group in zip(tree["param_groups"], [*outer, *outer], strict=True)
        ]
        offsets = {"base_state": tree["ep_base_state_offset"], MASTERS: tree["ep_shape_info_offset"]}
        ordinary = self._ordinary.master_weights()
        experts = self._experts.master_weights()
        if ordinary is not None and experts is not None:
            tree[MASTERS] = dict(enumerate(ordinary)) | dict(enumerate(experts, offsets[MASTERS]))

        def slot_at(path: Path) -> Slot | None:
            return self._slot(path[1], offsets[path[0]]) if path[0] in offsets and isinstance(path[1], int) else None

        return state_by_slots(tree, slot_at, (offsets, self._ordinary.cache_key(), self._experts.cache_key()))

    def validate(self, saved: Mapping[str, Any]) -> None:
        check_kind(saved, self._optimizer, expert=True)
        warn_of_own_keys(saved, self._optimizer)
        absent = [key for key in EXPERT_KEYS if key not in saved]
        if absent:
            raise OptimizerMismatch(f"optimizer: the checkpoint's expert-parallel state lacks {absent}")
        ordinary, experts = split(saved)
        self._ordinary.validate_part(ordinary)
        self._experts.validate_part(experts)

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        ordinary, experts = split(saved)
        pairs = list(zip(ordinary["param_groups"], experts["param_groups"], strict=True))
        ordinary["param_groups"] = [_with_options(first, second) for first, second in pairs]
        experts["param_groups"] = [_with_options(second, first) for first, second in pairs]
        self._ordinary.load(ordinary, read, keeps)
        self._experts.load(experts, read, keeps)
        halves = zip(ordinary["param_groups"], experts["param_groups"], strict=True)
        groups = [first if first["params"] else second for first, second in halves]
        restore_groups([self._optimizer.param_groups], groups, read)

    def after_load(self) -> None:
        self._ordinary.after_load()
        self._experts.after_load()
        call_post_hooks(self._optimizer)

    def followed(self, saved: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        ordinary, experts = split(saved)
        yield from self._ordinary.followed(ordinary)
        yield from self._experts.followed(experts)

    @property
    def passes_user_code(self) -> bool:
        return any(map(has_post_hooks, (self._optimizer, *self._inner)))

    def shards(self, saved: Mapping[str, Any]) -> Mapping[Any, Slot]:
        first = saved["ep_shape_info_offset"]
        return dict(enumerate(self._ordinary.slots)) | dict(enumerate(self._experts.slots, first))

    def follow(self, keeps: Keeps) -> None:
        self._ordinary.follow(keeps)
        self._experts.follow(keeps)

    @property
    def _inner(self) -> list[Any]:
        both = self._optimizer.non_ep_zero_optimizer, self._optimizer.ep_zero_optimizer
        return [optimizer for inner in both for optimizer in (inner, inner.base_optimizer)]

    def _slot(self, index: int, offset: int) -> Slot:
        return self._ordinary.slots[index] if index < offset else self._experts.slots[index - offset]


def _with_options(half: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return one half of a group with options: one that is left out, or empty on other sizes, has the other's."""
    return half if options_of(half) else {**other, "params": half["params"]}


