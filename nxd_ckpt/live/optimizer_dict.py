"""Optimizer state dicts in place of live optimizers: saved unchanged, filled or replaced on load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.name_patterns import PARAM_GROUPS
from nxd_ckpt.core.partition import Partition, zero1_rows
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import OptimizerMismatch, UnsupportedState
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS, MASTERS, restore_types
from nxd_ckpt.formats.state import StateTensor
from nxd_ckpt.formats.tensors import Path, form_of, iter_tensors
from nxd_ckpt.live.dtensor import is_dtensor
from nxd_ckpt.live.frozen import LiveState
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.optimizer_state import (
    Keeps,
    LeafSource,
    OptimizerAdapter,
    Slot,
    describe_path,
    keeps_nothing,
    materialise,
)
from nxd_ckpt.live.parameters import own_stride
from nxd_ckpt.live.state_names import if_known, parameter_names, put_back, state_entries


class DictOptimizer(OptimizerAdapter):
    """The OptimizerAdapter of a state dict.

    The keys of a dict show its kind; for an empty or unusual one ``zero1`` does. Without a model, a parameter's shape
    is known (from ``shape_info``, or its state), but not its cut over tp.
    """

    is_filled = True

    def __init__(
        self,
        state: dict[str, Any],
        param_names: Sequence[Sequence[str]] | None,
        model: ModelAdapter | None,
        zero1: bool,
        topology: Topology,
    ) -> None:
        self.kind = "zero1" if zero1 or "base_state" in state else "plain"
        groups = state.get("param_groups") or [{"params": list(names)} for names in param_names or ()]
        self._names = parameter_names(groups, None, param_names)
        self.parameter_names: list[str] | None = if_known(self._names)
        self._state = state
        self._topology = topology
        self._model = None if model is None else model.capture(topology.tp)
        ordinary = groups[: state.get("ep_param_group_offset", len(groups))]
        self._first_expert = sum(len(group["params"]) for group in ordinary)

    def know_names(self, names: Sequence[str]) -> None:
        """Use these names of the parameters, by index, if the dict has none."""
        if self.parameter_names is None:
            self._names = list(names)

    def form(self) -> None:
        return None

    def entries(self) -> Iterator[str]:
        return (name for _, name, _ in state_entries(self._state, self._names))

    def live_state(self) -> LiveState:
        layout = repr([self._state.get(key) for key in ("shape_info", *EXPERT_KEYS)])
        model = None if self._model is None else self._model.cache_key
        cache_key = self.kind, self._topology.sizes, self._names, layout, model
        return LiveState(self._state, self._describe, cache_key, lambda _, tensor: own_stride(tensor, None))

    def validate(self, saved: Mapping[str, Any]) -> None:
        if any(is_dtensor(tensor) for _, tensor in iter_tensors(self._state, torch.Tensor)):
            raise UnsupportedState(
                "optimizer: the dict given holds DTensors, which would be replaced by whole tensors; pass the optimizer"
            )
        if self._state and ("base_state" in saved) != ("base_state" in self._state):
            raise OptimizerMismatch(
                f"optimizer: the checkpoint holds a state dict of {', '.join(map(str, saved))}, the dict given has "
                f"{', '.join(map(str, self._state))}; pass an empty dict to be filled, or the same kind of optimizer"
            )

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        loaded = restore_types(materialise(saved, read, torch.device("cpu")))
        for path, name, _ in state_entries(self._state, self._names):
            if keeps(name):
                put_back(loaded, path, reduce(getitem, path, self._state))
        if keeps(PARAM_GROUPS) and "param_groups" in self._state:
            loaded["param_groups"] = self._state["param_groups"]
        self._state.clear()
        self._state.update(loaded)

    def _describe(self, path: Path, tensor: torch.Tensor) -> StateTensor:
        owned = path[0] in ("state", "base_state", MASTERS) and isinstance(path[1], int)
        return describe_path(path, tensor, self._slot(path[0], path[1], tensor) if owned else None)

    def _slot(self, section: str, index: int, tensor: torch.Tensor) -> Slot:
        offset = self._state.get("ep_base_state_offset" if section == "base_state" else "ep_shape_info_offset")
        expert = offset is not None and index >= offset
        flat = index - offset + self._first_expert if offset is not None and expert else index
        name = self._names[flat] if flat < len(self._names) else f"#{flat}"
        own = None if self._model is None else self._model.parameters.get(name)
        spec = own or self._guessed(section, index, tensor, expert)
        if self.kind == "plain" or spec is None:
            return Slot(name, tensor, torch.empty(() if spec is None else spec.shape, device="meta"), {}, spec)
        at = self._topology
        shards, shard = (at.expert_dp, at.expert_dp_rank) if expert else (at.dp, at.dp_rank)
        cut = torch.empty((zero1_rows(spec.shape[0], shards), *spec.shape[1:]), device="meta")
        return Slot(name, tensor, cut, {}, spec, shards, shard)

    def _guessed(self, section: str, index: int, tensor: torch.Tensor, expert: bool) -> ParameterSpec | None:
        dtype, shape = form_of(tensor)
        if section != "state":
            shape = self._state.get("shape_info", {}).get(index)
        elif self.kind == "zero1" or not shape:
            return None
        if shape is None:
            return None
        is_whole = self._topology.tp == self._topology.ep == 1
        return ParameterSpec(dtype, tuple(shape), Partition(expert=expert, known=is_whole))
