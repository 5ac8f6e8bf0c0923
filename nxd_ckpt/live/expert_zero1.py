"""ZeRO-1 with expert parallelism: NxD's NeuronEPZero1Optimizer, two ZeRO-1 optimizers in one.

The first shards ordinary parameters over dp, the second expert parameters over the replicas of each expert. In the
state dict the entries from an offset on are the second's; its own indices restart at 0.

Learning-rate schedulers know the outer param groups only. Each step begins with copying their options onto the inner
groups, so these are one step behind in between. Upstream saves and loads the inner ones: its resumed runs continue with
the outer groups' initial learning rate. Here the outer groups' options are saved, and all three lists are restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.formats.strides import Stride
from nxd_ckpt.formats.tensors import Path
from nxd_ckpt.live.dtensor import Placed
from nxd_ckpt.live.load_hooks import OptimizerHooks
from nxd_ckpt.live.optimizer_names import if_known
from nxd_ckpt.live.optimizer_state import (
    Keeps,
    LeafSource,
    Slot,
    describe_path,
    keeps_nothing,
    options_of,
    restore_groups,
    stride_to_note,
)
from nxd_ckpt.live.state import OptimizerForm, State, StateTensor, state_of
from nxd_ckpt.live.zero1 import (
    EXPERT_KEYS,
    MASTERS,
    Zero1Optimizer,
    check_kind,
    refuse_own_keys,
    refuse_own_ways,
    warn_of_own_keys,
)


class ExpertZero1Optimizer:
    """The OptimizerAdapter of NxD's expert-parallel ZeRO-1.

    Master weights, which upstream's state dict leaves out, are saved under the usual key.
    """

    stepping = None
    kind = "zero1"

    def __init__(self, optimizer: Any, names: list[str], topology: Topology) -> None:
        ordinary = sum(len(group["params"]) for group in optimizer.non_ep_zero_optimizer.param_groups)
        self.parameter_names = if_known(names)
        self._optimizer = optimizer
        self._ordinary = Zero1Optimizer(optimizer.non_ep_zero_optimizer, names[:ordinary], topology)
        self._experts = Zero1Optimizer(optimizer.ep_zero_optimizer, names[ordinary:], topology, expert=True)

    def form(self) -> OptimizerForm:
        ordinary, experts = self._ordinary.form(), self._experts.form()
        first = len(ordinary.slots), len(ordinary.groups)
        return OptimizerForm(self.kind, ordinary.slots + experts.slots, ordinary.groups + experts.groups, first)

    def entries(self) -> Iterator[str]:
        yield from self._ordinary.entries()
        yield from self._experts.entries()

    def capture(self) -> State:
        refuse_own_ways([self._optimizer, *self._inner])
        tree = self._optimizer.state_dict()
        refuse_own_keys(tree, self._optimizer)
        outer = self._optimizer.param_groups
        tree["param_groups"] = [
            {**inner, **options_of(group)} for inner, group in zip(tree["param_groups"], [*outer, *outer], strict=True)
        ]
        offsets = {"base_state": tree["ep_base_state_offset"], MASTERS: tree["ep_shape_info_offset"]}
        ordinary, experts = self._ordinary.master_weights(), self._experts.master_weights()
        if ordinary is not None and experts is not None:
            tree[MASTERS] = dict(enumerate(ordinary)) | dict(enumerate(experts, offsets[MASTERS]))

        def slot_at(path: Path) -> Slot | None:
            return self._slot(path[1], offsets[path[0]]) if path[0] in offsets and isinstance(path[1], int) else None

        def describe(path: Path, tensor: torch.Tensor) -> StateTensor:
            return describe_path(path, tensor, slot_at(path))

        def stride(path: Path, tensor: torch.Tensor) -> Stride | None:
            return stride_to_note(path, tensor, slot_at(path))

        return state_of(tree, describe, (offsets, self._ordinary.cache_key(), self._experts.cache_key()), stride)

    def validate(self, saved: Mapping[str, Any]) -> None:
        check_kind(saved, self._optimizer, expert=True)
        warn_of_own_keys(saved, self._optimizer)
        absent = [key for key in EXPERT_KEYS if key not in saved]
        if absent:
            raise OptimizerMismatch(f"optimizer: the checkpoint's expert-parallel state lacks {absent}")
        ordinary, experts = split(saved)
        self._ordinary.validate_part(ordinary)
        self._experts.validate_part(experts)

    def placed(self, saved: Mapping[str, Any]) -> dict[Path, Placed]:
        return {}

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        ordinary, experts = split(saved)
        self._ordinary.load(ordinary, read, keeps)
        self._experts.load(experts, read, keeps)
        pairs = zip(ordinary["param_groups"], experts["param_groups"], strict=True)
        # On other sizes an empty group has no options.
        groups = [first if first["params"] else second for first, second in pairs]
        restore_groups([self._optimizer.param_groups], groups, read)

    def after_load(self) -> None:
        self._ordinary.after_load()
        self._experts.after_load()
        OptimizerHooks(self._optimizer).after_load()

    def followed(self, saved: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        ordinary, experts = split(saved)
        yield from self._ordinary.followed(ordinary)
        yield from self._experts.followed(experts)

    def follow(self, keeps: Keeps) -> None:
        self._ordinary.follow(keeps)
        self._experts.follow(keeps)

    @property
    def _inner(self) -> list[Any]:
        both = self._optimizer.non_ep_zero_optimizer, self._optimizer.ep_zero_optimizer
        return [optimizer for inner in both for optimizer in (inner, inner.base_optimizer)]

    def _slot(self, index: int, offset: int) -> Slot:
        return self._ordinary.slots[index] if index < offset else self._experts.slots[index - offset]


def split(saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of the ordinary and of the expert optimizer, each with indices from 0."""
    groups = saved["param_groups"]
    first = saved["ep_param_group_offset"]
    parts = []
    for expert, own_groups in ((False, groups[:first]), (True, groups[first:])):
        part: dict[str, Any] = {"param_groups": own_groups}
        for section, key in (
            ("base_state", "ep_base_state_offset"),
            ("shape_info", "ep_shape_info_offset"),
            (MASTERS, "ep_shape_info_offset"),
        ):
            if section in saved:
                part[section] = _rows(saved[section], saved[key], expert)
        parts.append(part)
    return parts[0], parts[1]


def _rows(entries: Mapping[int, Any], offset: int, expert: bool) -> dict[int, Any]:
    if expert:
        return {index - offset: value for index, value in entries.items() if index >= offset}
    return {index: value for index, value in entries.items() if index < offset}
