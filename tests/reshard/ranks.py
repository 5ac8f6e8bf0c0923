"""Live modules and optimizers of one rank on plain torch: with the state that a whole model gives it, or another."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Partition, Topology, load_checkpoint
from tests.interop.saving import save_as_every_rank
from tests.live.doubles import ExpertShardedOptimizer, ShardedOptimizer
from tests.reshard.whole import OPTIONS, Layout, Weight, expected, part

Group = dict[str, Any]
Entry = tuple[str, torch.Tensor, torch.Tensor, dict[Any, Any], list[Group]]


class Stage(torch.nn.Module):
    """Parameters and buffers under the names of the whole model."""

    def __init__(self, weights: Sequence[Weight], layout: Layout, at: Topology) -> None:
        super().__init__()
        for weight in weights:
            value = part(weight.value, layout.cuts[weight.name], at)
            if weight.kind == "buffer":
                self.register_buffer(weight.name, value)
                continue
            tied = getattr(self, weight.alias, None) if weight.alias else None
            parameter = torch.nn.Parameter(value, requires_grad=weight.kind == "parameter") if tied is None else tied
            mark(parameter, layout.cuts[weight.name])
            self.register_parameter(weight.name, parameter)


class Pipeline(torch.nn.Module):
    """What NxD's pipeline model offers: this stage under the whole model's names."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def local_modules(self) -> list[torch.nn.Module]:
        return [self.stage]

    def local_state_dict(self, **options: Any) -> dict[str, Any]:
        return dict(self.stage.state_dict(**options))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("a pipeline model has no whole state dict")


def mark(tensor: torch.Tensor, partition: Partition) -> None:
    """NxD's attributes, as far as they can say how a tensor is cut."""
    attributes = vars(tensor)
    if partition.expert:
        attributes["expert_model_parallel"] = True
    if partition.partition_dim is not None and not partition.fused:
        attributes["tensor_model_parallel"] = True
        for name in ("partition_dim", "partition_stride", "num_partitions", "rank_ordering"):
            attributes[name] = getattr(partition, name)


class Live:
    """What one rank has live. ``model`` and ``optimizer`` are what a training script passes."""

    def __init__(self, weights: Sequence[Weight], layout: Layout, at: Topology) -> None:
        mine = layout.of_stage(weights, at)
        self.at, self.zero1 = at, layout.zero1
        self.stage = Stage(mine, layout, at)
        self.model: Any = Pipeline(self.stage) if at.pp > 1 else self.stage
        self._options = {weight.name: weight.options for weight in mine}
        self._count_in_python = {weight.name for weight in mine if isinstance(weight.step, int)}
        own = [[name for name in group if name in self._trained] for group in layout.groups]
        self.optimizer = self._optimizer([group for group in own if group], layout.master_weights)

    def fill_optimizer(self, weights: Sequence[Weight], layout: Layout) -> None:
        """Give the optimizer the state that it has in the whole job."""
        wanted = expected(weights, layout, self.at)["optimizer"]
        for name, _, key, state, _ in self._entries():
            with torch.no_grad():
                key.copy_(wanted[name].get("shard", key))
            entries = {kind: value for kind, value in wanted[name].items() if kind not in ("shard", "options")}
            if entries:
                state[key] = entries

    def scramble(self, *, stepped: bool) -> None:
        """Values, options and, if ``stepped``, moments that no checkpoint holds. Steps count as in the checkpoint."""
        with torch.no_grad():
            for tensor in (*self.stage.parameters(), *self.stage.buffers()):
                tensor.fill_(77)
        for name, _, key, state, groups in self._entries():
            for group in groups:
                group.update(lr=77.0, weight_decay=77.0, betas=(0.77, 0.77))
            with torch.no_grad():
                key.fill_(77)
            if stepped:
                moments = {kind: torch.full_like(key, 77, dtype=torch.float32) for kind in ("exp_avg", "exp_avg_sq")}
                state[key] = {"step": 77 if name in self._count_in_python else torch.tensor(77.0), **moments}

    def held(self) -> dict[str, Any]:
        """Everything that a load may change, by name, as ``whole.expected`` has it."""
        optimizer = {}
        for name, parameter, key, state, groups in self._entries():
            assert parameter.grad is None
            shard = {"shard": key.detach().clone()} if self.zero1 else {}
            options = [{option: group[option] for option in OPTIONS[0]} for group in groups]
            entries = _copied(state.get(key, {}))
            if not self.zero1 and name in self._count_in_python and "step" in entries:
                entries["step"] = int(entries["step"])  # a torch optimizer that had no state counts in tensors
            optimizer[name] = {**entries, **shard, "options": options}
        model = _copied(dict(self.stage.state_dict()))
        return {"model": dict(sorted(model.items())), "optimizer": dict(sorted(optimizer.items()))}

    @property
    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.stage.named_parameters() if parameter.requires_grad}

    def _optimizer(self, names: list[list[str]], master_weights: bool) -> Any:
        groups = [
            {"params": [self._trained[name] for name in group], **OPTIONS[self._options[group[0]]]} for group in names
        ]
        if not self.zero1:
            return torch.optim.AdamW(groups)
        dp_groups = [self.at.replicas(self.at.coordinates)]
        settings: dict[str, Any] = {"lr": 1.0, "save_master_weights": master_weights}
        if self.at.ep == 1:
            return ShardedOptimizer(groups, self.at.rank, dp_groups, **settings)
        expert_dp_groups = [self.at.replicas(self.at.coordinates, expert=True)]
        return ExpertShardedOptimizer(groups, self.at.rank, dp_groups, expert_dp_groups, **settings)

    def _entries(self) -> Iterator[Entry]:
        return entries_of(self.optimizer, self._trained)


def entries_of(optimizer: Any, trained: Mapping[str, torch.Tensor]) -> Iterator[Entry]:
    """Name, parameter, what its state is kept under, all states, and the groups that it is in, outermost first."""
    names = {id(parameter): name for name, parameter in trained.items()}
    outer = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    inner = [getattr(optimizer, kind, None) for kind in ("non_ep_zero_optimizer", "ep_zero_optimizer")]
    for owner in [each for each in inner if each is not None] or [optimizer]:
        base = getattr(owner, "base_optimizer", owner)
        for group, cut in zip(owner.param_groups, base.param_groups, strict=True):
            for parameter, key in zip(group["params"], cut["params"], strict=True):
                found = [outer[id(parameter)], group, cut]
                distinct = [g for i, g in enumerate(found) if not any(g is other for other in found[:i])]
                yield names[id(parameter)], parameter, key, base.state, distinct


def save_job(directory: Path, weights: Sequence[Weight], layout: Layout, **options: Any) -> None:
    """The checkpoint ``step_1`` of a whole job, one rank after the other."""

    def what(rank: int) -> dict[str, Any]:
        live = Live(weights, layout, layout.topology.at(rank))
        live.fill_optimizer(weights, layout)
        return {"model": live.model, "optimizer": live.optimizer, "user_content": {"saved": 1}}

    options = {"durable": False, "partitions": layout.partitions, **options}
    save_as_every_rank(directory, "step_1", layout.ranks, what, **options)


def fresh(weights: Sequence[Weight], layout: Layout, at: Topology, *, stepped: bool = False) -> Live:
    """Another job's rank, with nothing of the checkpoint in it."""
    live = Live(weights, layout, at)
    live.scramble(stepped=stepped)
    return live


def load_rank(directory: Path, live: Live, **options: Any) -> Any:
    return load_checkpoint(directory, "step_1", live.model, live.optimizer, topology=live.at, **options)


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in tree.items()}
