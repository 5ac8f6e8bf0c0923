"""Stand-ins on plain CPU torch for torch-xla's and NxD's ZeRO-1 optimizers: the same attributes and state dicts.

Replicas of a data-parallel group share their parameter objects and gradients, so that each rank's step writing its own
rows is what an all-gather would leave behind.
"""

from collections.abc import Callable
from typing import Any

import torch

Tree = dict[str, Any]


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO-1 of one rank: ``base_optimizer`` steps on zero-padded rows of each parameter."""

    def __init__(self, params, rank=0, groups=((0,),), *, dtype=torch.float32, save_master_weights=False, **defaults):
        super().__init__(params, defaults)
        self.global_rank, self.sharding_groups = rank, [list(group) for group in groups]
        self.save_master_weights = save_master_weights
        (self._group,) = (group for group in self.sharding_groups if rank in group)
        cut = [
            {**group, "params": [torch.nn.Parameter(self._shard(p.data).to(dtype)) for p in group["params"]]}
            for group in self.param_groups
        ]
        self.base_optimizer = torch.optim.AdamW(cut, **defaults)
        for group, own in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            group.update({option: value for option, value in own.items() if option != "params"})

    def step(self, closure=None):
        for param, shard in self._pairs():
            shard.grad = None if param.grad is None else self._shard(param.grad).to(shard.dtype)
        for group, own in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            own.update({option: value for option, value in group.items() if option != "params"})
        self.base_optimizer.step()
        self.base_optimizer.zero_grad(set_to_none=True)
        for param, shard in self._pairs():
            if param.grad is not None:
                start = self._group.index(self.global_rank) * len(shard)
                rows = param.data[start : start + len(shard)]
                rows.copy_(shard.data[: len(rows)])

    def state_dict(self):
        shards = [shard for _, shard in self._pairs()]
        masters = {"sharded_master_weights": {i: shard.data for i, shard in enumerate(shards)}}
        return {
            **super().state_dict(),
            "base_state": self.base_optimizer.state_dict()["state"],
            "shape_info": {i: param.shape for i, (param, _) in enumerate(self._pairs())},
            **(masters if self.save_master_weights else {}),
        }

    def load_state_dict(self, state_dict):
        raise AssertionError("an adapter must not call the optimizer's own load_state_dict")

    def _pairs(self):
        for group, own in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            yield from zip(group["params"], own["params"], strict=True)

    def _shard(self, values):
        world = len(self._group)
        rows = -(-values.shape[0] // world)
        padded = torch.zeros((rows * world, *values.shape[1:]), dtype=values.dtype)
        padded[: values.shape[0]] = values
        return padded.chunk(world)[self._group.index(self.global_rank)].clone()


class ExpertShardedOptimizer(torch.optim.Optimizer):
    """NxD's optimizer for expert parallelism: two of the above, merged in one state dict.

    Schedulers know its own groups only. A step copies their options onto the inner ones, whose the state dict has.
    """

    def __init__(self, params, rank, dp_groups, expert_dp_groups, *, dtype=torch.float32, save_master_weights=False,
                 **defaults):
        options = {"dtype": dtype, "save_master_weights": save_master_weights, **defaults}
        ordinary, experts = ([_with_params(group, wanted) for group in params] for wanted in (False, True))
        self.non_ep_zero_optimizer = ShardedOptimizer(ordinary, rank, dp_groups, **options)
        self.ep_zero_optimizer = ShardedOptimizer(experts, rank, expert_dp_groups, **options)
        super().__init__([dict(group) for group in params], defaults)
        for group, own in zip(self.param_groups, self.non_ep_zero_optimizer.param_groups, strict=True):
            group.update({option: value for option, value in own.items() if option != "params"})

    def step(self, closure=None):
        self.hand_down()
        for inner in (self.non_ep_zero_optimizer, self.ep_zero_optimizer):
            inner.step()

    def hand_down(self):
        for inner in (self.non_ep_zero_optimizer, self.ep_zero_optimizer):
            for group, own in zip(self.param_groups, inner.param_groups, strict=True):
                own.update({option: value for option, value in group.items() if option != "params"})

    def state_dict(self):
        ordinary, experts = self.non_ep_zero_optimizer.state_dict(), self.ep_zero_optimizer.state_dict()
        base, shapes = (max([0, *(k for k in ordinary[key])]) + 1 for key in ("base_state", "shape_info"))
        return {
            "ep_param_id_offset": 1,
            "ep_param_group_offset": len(ordinary["param_groups"]),
            "ep_base_state_offset": base,
            "ep_shape_info_offset": shapes,
            "param_groups": ordinary["param_groups"] + experts["param_groups"],
            "state": {},
            "base_state": ordinary["base_state"] | {base + k: v for k, v in experts["base_state"].items()},
            "shape_info": ordinary["shape_info"] | {shapes + k: v for k, v in experts["shape_info"].items()},
        }

    def load_state_dict(self, state_dict):
        raise AssertionError("an adapter must not call the optimizer's own load_state_dict")


class NxDWrapper(torch.optim.Optimizer):
    """What NxD's trainer returns for an optimizer: the optimizer behind an attribute, and looks like it."""

    def __init__(self, optimizer):
        self.optimizer, self.nxd_config = optimizer, {"optimizer_config": {"zero_one_enabled": True}}

    @property
    def param_groups(self):  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self):  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def state(self):  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=False):
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()


class AcceleratedOptimizer(NxDWrapper):
    """accelerate's wrapper, as optimum-neuron's trainer passes it."""

    def __init__(self, optimizer):
        self.optimizer, self.accelerator_state = optimizer, object()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


class _Reading:
    """The reader that a checkpoint's would be: gives tensors of their own, or fills the adapter's."""

    def __call__(self, leaf: torch.Tensor) -> torch.Tensor:
        assert isinstance(leaf, torch.Tensor)
        return leaf.detach().cpu().clone()

    def into(self, leaf: torch.Tensor, memory: torch.Tensor) -> None:
        memory.copy_(self(leaf))

    def then(self, leaf: torch.Tensor, take: Callable[[torch.Tensor], None]) -> None:
        take(self(leaf))


read = _Reading()


def copied(tree: Any) -> Any:
    """A tree as it would be in a checkpoint: with tensors of its own, and lists for tuples."""
    if isinstance(tree, torch.Tensor):
        return read(tree)
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def plain(tree: Any) -> Any:
    """A tree with what can be compared by ``==``: tensors as their dtype, shape and bytes' values."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), tree.detach().cpu().tolist()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return type(tree)(plain(value) for value in tree) if isinstance(tree, (list, tuple)) else tree


def _with_params(group: Tree, experts: bool) -> Tree:
    return {**group, "params": [p for p in group["params"] if getattr(p, "expert_model_parallel", False) is experts]}
