"""Models and optimizers of torch's first FSDP, whose parameters are flat, as DTensors, like FSDP2's.

torch makes them (``SHARDED_STATE_DICT``): it gathers one FSDP module after the other, and each rank keeps its rows, in
host memory. All ranks call each of these functions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.live.dtensor import canonical


def model_state(model: Any) -> dict[str, Any]:
    """Return the model's state for `put_back`, by names without those of wrappers.

    Raises:
        UnsupportedState: its modules were wrapped without a device mesh.
    """
    with _sharded(model):
        state = model.state_dict()
    for name, tensor in state.items():
        if hasattr(tensor, "local_shards"):
            raise UnsupportedState(
                f"{name} is a ShardedTensor, as its module was wrapped without a device mesh: let Lightning wrap the "
                "model, or pass device_mesh=self.trainer.strategy.kwargs['device_mesh'] to FullyShardedDataParallel; "
                "for hybrid strategies pass device_mesh=(replicas, shards) to FSDPStrategy"
            )
    return {name: state[wrapped] for name, wrapped in canonical(state, "the model").items()}


def put_back(model: Any, state: dict[str, Any]) -> None:
    """Load a changed result of `model_state` into the model."""
    with _sharded(model):
        names = canonical(model.state_dict(), "the model")
        model.load_state_dict({wrapped: state[name] for name, wrapped in names.items()})


class Unflattened(torch.optim.Optimizer):
    """A stand-in for ``optimizer`` whose parameters are the tensors of ``state``.

    ``state`` is a result of `model_state` for ``model``; the optimizer's state is cut as these tensors are.
    """

    def __init__(self, model: Any, optimizer: Any, state: dict[str, Any]) -> None:
        with _sharded(model):
            whole = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        self._names = {id(tensor): name for name, tensor in state.items()}
        super().__init__(
            [{**group, "params": [state[name] for name in group["params"]]} for group in whole["param_groups"]], {}
        )
        self.state.update({state[name]: entries for name, entries in whole["state"].items()})

    def put_back(self, model: Any, optimizer: Any) -> None:
        """Load this state into ``optimizer``."""
        groups = [{**group, "params": [self._names[id(of)] for of in group["params"]]} for group in self.param_groups]
        state = {self._names[id(of)]: dict(entries) for of, entries in self.state.items()}
        with _sharded(model):
            whole = {"state": state, "param_groups": groups}
            optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, whole))


def _sharded(model: Any) -> AbstractContextManager[Any]:
    """Let torch use states by shards within the block; whole ones where every rank has everything, as on one rank."""
    modules = FullyShardedDataParallel.fsdp_modules(model)
    kind: Any = StateDictType.SHARDED_STATE_DICT
    configs: Any = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    if all(module.sharding_strategy == ShardingStrategy.NO_SHARD for module in modules):
        kind = StateDictType.FULL_STATE_DICT
        configs = FullStateDictConfig(), FullOptimStateDictConfig()
    context: AbstractContextManager[Any] = FullyShardedDataParallel.state_dict_type(model, kind, *configs)
    return context
