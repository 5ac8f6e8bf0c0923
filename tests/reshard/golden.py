"""The golden checkpoints as whole models, and what a rank of any other job holds of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt import Partition, Topology
from tests.golden.checkpoints import Saved
from tests.reshard.whole import part, put_back

TAG = "step_3"
Names = list[list[str]]
Held = dict[str, Any]


@dataclass(frozen=True)
class GoldenModel:
    """What all ranks of a configuration held, put together."""

    saved: Saved

    @property
    def zero1(self) -> bool:
        return bool(self.saved.config["zero1"])

    def tensors(self, tp_rank: int) -> dict[str, dict[str, Any]]:
        """By name: ``model``, ``exp_avg``, ``exp_avg_sq`` and ``master``, whole, and ``step``.

        Of what all tensor-parallel ranks hold, the values of one: norms were not kept equal in every configuration.
        """
        found: dict[str, dict[str, Any]] = {}
        for at, held in zip(self.saved.topologies, self._held, strict=True):
            for name, entries in ((name, {"model": value}) for name, value in held["model"].items()):
                self._put(found.setdefault(name, {}), entries, name, at, tp_rank)
            for name, entries in _by_name(held):
                self._put(found[name], entries, name, at, tp_rank)
        return found

    @cached_property
    def abouts(self) -> dict[str, Held]:
        """Name, dtype, shape and attributes of every parameter, as one of its ranks had them."""
        return {about["name"]: about for held in self._held for about in held["params"]}

    @property
    def saved_names(self) -> list[Names]:
        """The optimizer's parameters as its files list them: by stage, by param group, experts' groups after others."""
        by_stage = {at.pp_rank: held for at, held in zip(self.saved.topologies, self._held, strict=True)}
        return [_listed(by_stage[stage]) for stage in sorted(by_stage)]

    def held_on(self, at: Topology) -> Held:
        """What the rank ``at`` of another job holds, as ``Saved.held`` has it for those that there were.

        ``entries``, by name, are the state of its optimizer, with ``master``, its shard of the weights in float32.
        """
        tensors = self.tensors(at.tp_rank if at.tp == self.saved.config["tp"] else 0)
        names = [name for name in tensors if at.pp == 1 or _stage(name) == at.pp_rank]
        cut = {name: self.partition(name, at) for name in names}
        entries = {
            name: {
                kind: value if kind == "step" else part(value, cut[name], at, sharded=self.zero1)
                for kind, value in tensors[name].items()
                if kind != "model"
            }
            for name in names
        }
        groups = [[name for stage in self._outer_names for name in stage[group]] for group in range(self._group_count)]
        return {
            "model": {name: part(tensors[name]["model"], cut[name], at) for name in names},
            "params": [self._about(name, cut[name]) for name in names if name in self.abouts],
            "optimizer_param_names": [[name for name in group if name in names] for group in groups],
            "entries": {name: each for name, each in entries.items() if each},
        }

    def options(self) -> dict[str, Held]:
        """The options of each parameter's group."""
        groups = [group for group in self._held[0]["optimizer"]["param_groups"] if group["params"]]
        return {
            name: {option: groups[number][option] for option in ("lr", "weight_decay", "betas")}
            for stage in self._outer_names
            for number, group in enumerate(stage)
            for name in group
        }

    def partition(self, name: str, at: Topology) -> Partition:
        """How a job cuts it: as many partitions as ranks where those divide it, else as many as when it was saved."""
        about = self.abouts.get(name, {})
        expert = bool(about.get("expert_model_parallel")) and at.ep > 1
        if not about.get("tensor_model_parallel"):
            return Partition(expert=expert)
        dim, stride = about["partition_dim"], about["partition_stride"]
        fits = about["global_shape"][dim] % (at.tp * stride) == 0
        return Partition(dim, stride, at.tp if fits else about["num_partitions"], expert=expert)

    def unmarked_experts(self, at: Topology) -> dict[str, Partition]:
        """Experts of a job without expert parallelism, for ``partitions=``: NxD marks them only with it."""
        experts = [name for name, about in self.abouts.items() if about["expert_model_parallel"] and at.ep == 1]
        return {name: replace(self.partition(name, at), expert=True) for name in experts}

    @cached_property
    def _held(self) -> list[Held]:
        return [self.saved.held(TAG, rank) for rank in range(len(self.saved.topologies))]

    @property
    def _outer_names(self) -> list[Names]:
        by_stage = {at.pp_rank: held for at, held in zip(self.saved.topologies, self._held, strict=True)}
        return [by_stage[stage]["optimizer_param_names"] for stage in sorted(by_stage)]

    @property
    def _group_count(self) -> int:
        return len(self._outer_names[0])

    def _about(self, name: str, cut: Partition) -> Held:
        about = {**self.abouts[name], "expert_model_parallel": cut.expert}
        return about | ({"num_partitions": cut.num_partitions} if cut.partition_dim is not None else {})

    def _put(self, wholes: Held, entries: Held, name: str, at: Topology, tp_rank: int) -> None:
        cut = self.partition(name, at)
        if cut.replicated_over_tp and at.tp_rank != tp_rank:
            return
        for kind, value in entries.items():
            if kind == "step":
                assert wholes.setdefault(kind, value) == value
                continue
            shape = self.abouts[name]["global_shape"] if name in self.abouts else value.shape
            shape = [shape[0] * at.ep, *shape[1:]] if cut.expert else list(shape)
            whole = wholes.setdefault(kind, torch.empty(shape, dtype=value.dtype))
            put_back(whole, value, cut, at, sharded=self.zero1 and kind != "model")


def _by_name(held: Held) -> Iterator[tuple[str, Held]]:
    """The optimizer's state of each parameter."""
    state = held["optimizer"]
    masters = state.get("sharded_master_weights", {})
    for index, name in enumerate(name for group in _listed(held) for name in group):
        master = {"master": masters[index]} if index in masters else {}
        yield name, {**state.get("base_state", state["state"])[index], **master}


def _listed(held: Held) -> Names:
    names: Names = held["optimizer_param_names"]
    if "ep_param_group_offset" not in held["optimizer"]:
        return names
    experts = {about["name"] for about in held["params"] if about["expert_model_parallel"]}
    return [[name for name in group if (name in experts) is expert] for expert in (False, True) for group in names]


def _stage(name: str) -> int:
    """Of two stages, as the configuration with two has them."""
    return 0 if name.startswith(("embed", "in_scale", "blocks.0", "frozen_scale", "pos_scale")) else 1
