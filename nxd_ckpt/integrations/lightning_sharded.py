"""Lightning's sharded models (FSDP2, tensor parallelism) as tags: each rank writes and reads what it holds.

Written for Lightning 2.6. One line changes::

    trainer = Trainer(strategy=ModelParallelStrategy(), plugins=[CheckpointIO(async_save=True)], ...)

The tags are those of `nxd_ckpt.integrations.lightning`, and its ``CheckpointIO`` has the options. Nothing is
gathered; all ranks call its functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.integrations.lightning import CheckpointIO, is_hidden, is_lightnings, package
from nxd_ckpt.storage.urls import StrPath

_strategies = import_module(f"{package}.strategies")


class ModelParallelStrategy(_strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
    """A replacement of Lightning's ``ModelParallelStrategy``, with the same arguments.

    Checkpoints load on any number of ranks, also those of models that were not sharded. Lightning's own sharded
    checkpoints load too. A strategy that extends Lightning's is extended in turn:
    ``class Mine(ModelParallelStrategy, Theirs)``.
    """

    _checkpoint_io: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state: dict[str, Any] = {}
        """The model's state that Lightning got for the coming save."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state on this rank, for hooks that read it."""
        self._state = dict(self.model.state_dict())
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
        parts = {"model": self.model, "optimizer": _only(optimizers), "user_content": rest}
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
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return checkpoint
        strict = bool(self.lightning_module.strict_loading)
        optimizer = _only(self.optimizers)
        _, _, rest = self.checkpoint_io.load(path, self.model, optimizer, weights_only, strict=strict)
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def teardown(self) -> None:
        """Tear down Lightning's strategy, then finish unfinished saves, see `CheckpointIO.teardown`."""
        super().teardown()
        self.checkpoint_io.teardown()

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


def _only(optimizers: list[Any]) -> Any:
    """Return the only optimizer, or None. Raises UnsupportedState for several."""
    if len(optimizers) > 1:
        raise UnsupportedState(f"{len(optimizers)} optimizers of a sharded model: only one can be saved and loaded")
    return optimizers[0] if optimizers else None
