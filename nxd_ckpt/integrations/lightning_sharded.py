"""Lightning's sharded models (FSDP2, tensor parallelism, FSDP) as tags: each rank writes and reads what it holds.

Written for Lightning 2.6. One line changes::

    trainer = Trainer(strategy=ModelParallelStrategy(), plugins=[CheckpointIO(async_save=True)], ...)

or ``strategy=FSDPStrategy()``. The tags are those of `nxd_ckpt.integrations.lightning`, and its ``CheckpointIO``
has the options. Nothing is gathered, but by FSDPStrategy one module at a time: torch makes DTensors of its flat
parameters (``SHARDED_STATE_DICT``), of which each rank keeps its rows, in host memory. All ranks call these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from nxd_ckpt.core.parameter_names import canonical
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.integrations.lightning import CheckpointIO, is_hidden, is_lightnings, package
from nxd_ckpt.storage.urls import StrPath


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


_strategies = import_module(f"{package}.strategies")


class _Tags:
    """The common part of the strategies.

    Checkpoints load on any number of ranks, also those of models that were not sharded. Lightning's own sharded
    checkpoints load too.
    """

    model: Any
    optimizers: list[Any]
    lightning_module: Any
    is_global_zero: bool
    broadcast: Any
    _checkpoint_io: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state: dict[str, Any] = {}
        """The model's state that Lightning got for the coming save."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state on this rank, for hooks that read it."""
        self._state = self._state_now()
        return dict(self._state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the optimizer itself is saved."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: StrPath, storage_options: Any = None) -> None:
        """Save model and optimizer, and Lightning's dict as user content; every rank calls this.

        Raises:
            UnsupportedState: there are several optimizers, or a hook has changed the model's state in the dict.
            CheckpointError: as `CheckpointIO.save_checkpoint`.
        """
        if is_hidden(filepath):
            self._save_lightnings(dict(checkpoint), filepath)
            return
        rest = dict(checkpoint)
        state = rest.pop("state_dict")
        optimizers = self.optimizers if "optimizer_states" in rest else []
        rest.pop("optimizer_states", None)
        if {name: id(tensor) for name, tensor in state.items()} != {n: id(t) for n, t in self._state.items()}:
            raise UnsupportedState(
                "a hook has changed checkpoint['state_dict']: sharded checkpoints are made of the model itself. Leave "
                "the dict as it is, and change the model"
            )
        parts = {**self._to_save(_only(optimizers)), "user_content": rest}
        self.checkpoint_io.save(self.broadcast(filepath), parts, storage_options, is_rank_0=self.is_global_zero)
        self._state = {}

    def _save_lightnings(self, checkpoint: dict[str, Any], filepath: StrPath) -> None:
        """Save what Lightning's strategy does."""
        lightnings: Any = super()
        checkpoint["state_dict"] = lightnings.lightning_module_state_dict()
        self._state = {}
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [lightnings.optimizer_state(each) for each in self.optimizers]
        lightnings.save_checkpoint(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: StrPath, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizer, and return the rest of Lightning's dict; every rank calls this.

        Raises:
            CheckpointError: see `nxd_ckpt.errors`; nothing was changed.
        """
        path = self.broadcast(checkpoint_path)
        if is_lightnings(self.checkpoint_io.place(path)):
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return checkpoint
        strict = bool(self.lightning_module.strict_loading)
        return self._load(path, _only(self.optimizers), weights_only, strict)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def teardown(self) -> None:
        """Tear down Lightning's strategy, then finish unfinished saves, see `CheckpointIO.teardown`."""
        super().teardown()  # type: ignore[misc]
        self.checkpoint_io.teardown()

    def _state_now(self) -> dict[str, Any]:
        """Return the model's state on this rank."""
        raise NotImplementedError

    def _to_save(self, optimizer: Any) -> dict[str, Any]:
        """Return model and optimizer as keywords of ``save_checkpoint``; `_state_now` was called before."""
        raise NotImplementedError

    def _load(self, path: StrPath, optimizer: Any, weights_only: bool | None, strict: bool) -> dict[str, Any]:
        """Load a tag; return its user content."""
        raise NotImplementedError

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The CheckpointIO that saves and loads. Raises InvalidArgument if it is not ours."""
        if self._checkpoint_io is None:
            self._checkpoint_io = CheckpointIO()
        if not isinstance(self._checkpoint_io, CheckpointIO):
            raise InvalidArgument(
                f"the trainer's CheckpointIO is {type(self._checkpoint_io).__name__}: this strategy saves by "
                "nxd_ckpt.integrations.lightning.CheckpointIO alone; pass that to plugins=, or none"
            )
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io


class ModelParallelStrategy(_Tags, _strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
    """A replacement of Lightning's ``ModelParallelStrategy``, with the same arguments.

    A strategy that extends Lightning's is extended in turn: ``class Mine(ModelParallelStrategy, Theirs)``.
    """

    def _state_now(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def _to_save(self, optimizer: Any) -> dict[str, Any]:
        return {"model": self.model, "optimizer": optimizer}

    def _load(self, path: StrPath, optimizer: Any, weights_only: bool | None, strict: bool) -> dict[str, Any]:
        return self.checkpoint_io.load(path, self.model, optimizer, weights_only, strict=strict)[2]


class FSDPStrategy(_Tags, _strategies.FSDPStrategy):  # type: ignore[misc,name-defined]
    """A replacement of Lightning's ``FSDPStrategy``, with the same arguments; ``state_dict_type`` has no effect.

    The tags are those of ``ModelParallelStrategy``: each reads the other's. For a save and a load each rank has a copy
    of its shards in host memory.
    """

    def setup_environment(self) -> None:
        """Set up Lightning's environment, with a device mesh, from which torch makes DTensors."""
        super().setup_environment()
        hybrid = "HYBRID" in self.sharding_strategy.name
        if not hybrid and not {"device_mesh", "process_group"} & self.kwargs.keys():
            self.kwargs["device_mesh"] = init_device_mesh(self.root_device.type, (self.world_size,))

    def _state_now(self) -> dict[str, Any]:
        return model_state(self.model)

    def _to_save(self, optimizer: Any) -> dict[str, Any]:
        made = None if optimizer is None else Unflattened(self.model, optimizer, self._state)
        return {"model": self._state, "optimizer": made}

    def _load(self, path: StrPath, optimizer: Any, weights_only: bool | None, strict: bool) -> dict[str, Any]:
        state = self._state_now()
        made = None if optimizer is None else Unflattened(self.model, optimizer, state)
        _, loaded, content = self.checkpoint_io.load(path, state, made, weights_only, strict=strict)
        put_back(self.model, state)
        if loaded is not None:
            loaded.put_back(self.model, optimizer)
        return content


def _only(optimizers: list[Any]) -> Any:
    """Return the only optimizer, or None. Raises UnsupportedState for several."""
    if len(optimizers) > 1:
        raise UnsupportedState(f"{len(optimizers)} optimizers of a sharded model: only one can be saved and loaded")
    return optimizers[0] if optimizers else None
