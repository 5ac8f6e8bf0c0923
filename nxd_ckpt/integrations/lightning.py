"""Lightning's checkpoints as tags: what its trainer saves is written, read and removed by nxd_ckpt.

Written for Lightning 2.6, installed as ``lightning`` or ``pytorch-lightning``. One line changes::

    trainer = Trainer(plugins=[CheckpointIO(async_save=True)], callbacks=[ModelCheckpoint(...), ExactResume()])

A checkpoint is the tag of the path's last part (``epoch=0-step=500.ckpt``) in the directory before it. The model and
the optimizer, if there is only one, are its model and optimizer; whatever else Lightning's dict holds is its user
content. Which checkpoints stay is up to ``ModelCheckpoint``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from typing_extensions import Unpack

from nxd_ckpt.api import (
    close_checkpointers,
    finalize_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.coordination.agreement import decided_by_rank0
from nxd_ckpt.coordination.lease import leased
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.core.option_classes import plain_options, takes
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointError,
    IncompatibleState,
    InvalidArgument,
    OptimizerMismatch,
    UnsupportedState,
)
from nxd_ckpt.integrations.trainer_tags import WORLD_SIZE, parameter_names, require_same
from nxd_ckpt.keywords import SaveCheckpointKeywords
from nxd_ckpt.live.data_position import capture_random_state, restore_random_state
from nxd_ckpt.live.environment import default_topology
from nxd_ckpt.loading.load import require_same_save
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT, CheckpointerOptions
from nxd_ckpt.output.locations import Location, location_of
from nxd_ckpt.saving.options import SaveOptions
from nxd_ckpt.saving.pending import PendingSave
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import StrPath, is_url, local_path, open_storage, options_for

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
"""Lightning's packages, each with the package of its plugins."""


def _installed() -> str:
    """Return Lightning's package: the imported one, or the installed one."""
    names = [name for name in _FABRIC if name in sys.modules]
    names += [name for name in _FABRIC if find_spec(name.partition(".")[0])]
    if not names:
        raise ModuleNotFoundError("Lightning is not installed: pip install lightning, or pytorch-lightning")
    return names[0]


package: str = _installed()
_callbacks, _plugins = import_module(f"{package}.callbacks"), import_module(f"{_FABRIC[package]}.plugins")

_EXTRA = "nxd_ckpt"
"""Key of Lightning's dict under which `ExactResume` keeps its data."""

_META = "meta.pt"
"""File that distinguishes Lightning's own directories of sharded models from tags."""


class CheckpointIO(_plugins.CheckpointIO):  # type: ignore[misc,name-defined]
    """A replacement of Lightning's ``TorchCheckpointIO`` and ``AsyncCheckpointIO``: ``Trainer(plugins=[...])``.

    Checkpoints that Lightning wrote load too, and a run continues with them. A checkpoint that ``ModelCheckpoint``
    drops is removed once a later one is complete, and pinned ones stay.

    Args:
        async_save: return from a save once the state is copied to host memory. A save that fails is logged at once, and
            raised by the next save, or by the end of ``fit``.
        options: keywords of `nxd_ckpt.save_checkpoint`, such as ``durable``, ``trust_pickle``, ``overwrite`` (needed if
            a store has a checkpoint that is saved again, such as ``last.ckpt``), ``storage_options`` and
            ``on_save_failure``.
    """

    @takes(checks=False)
    def __init__(self, *, async_save: bool = False, **options: Unpack[SaveCheckpointKeywords]) -> None:
        self._async = async_save
        self._options = plain_options(options, SaveOptions, CheckpointerOptions)
        self._storage_options = self._options.get("storage_options")
        self._last: PendingSave | None = None
        self._dropped: list[Location] = []
        self._saved_by: dict[str, Topology | None] = {}
        """Topology of the saves in each open directory: a removal there must be by the same job."""
        self.before_load: Callable[[Mapping[str, Any]], None] | None = None
        """Function of the rest of Lightning's dict, called before model and optimizer are loaded; it may refuse."""

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: StrPath, storage_options: Any | None = None) -> None:
        """Save Lightning's dict as the tag at ``path``; under a hidden name, which its tuner uses, as Lightning's file.

        Raises:
            CheckpointError: see ``nxd_ckpt.save_checkpoint``; or the previous save failed in the background.
        """
        if is_hidden(path):
            _plugins.TorchCheckpointIO().save_checkpoint(checkpoint, path, storage_options)
            return
        rest = dict(checkpoint)
        model = rest.pop("state_dict", None)
        optimizers = rest.get("optimizer_states") or ()
        # One process writes: strategies call this on rank 0, and every rank reads for itself.
        parts: dict[str, Any] = {"model": model, "user_content": rest, "topology": Topology()}
        if len(optimizers) == 1:
            (parts["optimizer"],) = rest.pop("optimizer_states")
            parts["param_names"] = rest.get(_EXTRA, {}).get("param_names")
        self.save(path, parts, storage_options)

    def save(
        self, path: StrPath, parts: Mapping[str, Any], storage_options: Any | None, is_rank_0: bool = True
    ) -> None:
        """Save ``parts``, keywords of ``nxd_ckpt.save_checkpoint``, as the tag at ``path``.

        Every rank with a part calls this. Raises as `save_checkpoint` does.
        """
        if storage_options is not None:
            raise InvalidArgument("storage_options belong to all saves: pass them to CheckpointIO(storage_options=...)")
        finalize_checkpoint()
        self._remove_dropped()
        topology = parts.get("topology") or default_topology()
        agreement = meet(topology.rank, topology.world_size, DEFAULT_TIMEOUT, "checkpoint")
        if agreement is not None:
            decided_by_rank0(agreement, partial(_make_way, path))  # if that is refused, no rank continues
        elif is_rank_0:
            _make_way(path)
        place = self.place(path)
        self._dropped = [dropped for dropped in self._dropped if dropped != place]
        behind = self._async and not place.name.startswith("hpc_ckpt_")  # before which Slurm may end the job
        self._last = save_checkpoint(place.directory, place.name, async_save=behind, **{**parts, **self._options})
        self._saved_by[place.directory] = parts.get("topology")

    def load_checkpoint(
        self, path: StrPath, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return Lightning's dict, with its tensors on the CPU; their digests were compared.

        Args:
            path: a tag, or a file of Lightning's, which is read as Lightning does.
            weights_only: False allows objects of any class, which can run any code.

        Raises:
            CheckpointError: see `nxd_ckpt.errors`.
        """
        place = self.place(path)
        if is_lightnings(place):
            if place.open().is_dir(place.name):
                raise UnsupportedState(
                    f"{place.path} has {_META}, as Lightning's sharded checkpoints have: resume it with a strategy of "
                    f"nxd_ckpt.integrations.lightning_sharded. If nxd_ckpt wrote the directory, remove {_META} from it"
                )
            checkpoint: dict[str, Any] = _plugins.TorchCheckpointIO().load_checkpoint(path, map_location, weights_only)
            if self.before_load is not None:
                self.before_load(checkpoint)
            return checkpoint
        # Into dicts that nobody else has: one pass is enough.
        model, optimizer, content = self.load(path, {}, {}, weights_only, verify="reading", topology=Topology())
        own = {} if model is None else {"state_dict": model}
        return {**content, **own, **({} if optimizer is None else {"optimizer_states": [optimizer]})}

    def load(
        self, path: StrPath, model: Any, optimizer: Any, weights_only: bool | None, **options: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Load the tag at ``path``, with keywords of ``nxd_ckpt.load_checkpoint``.

        Raises as `load_checkpoint` does.

        Returns:
            The model and the optimizer, None if the tag has none, and the user content.
        """
        place = self.place(path)
        trusted = weights_only is False
        finalize_checkpoint()
        tag = open_checkpoint(place.directory, place.name, storage_options=place.options, trust_pickle=trusted)
        rest = tag.user_content()
        if not isinstance(rest, dict):
            raise IncompatibleState(
                f"{place.path} has no dict of Lightning's, its user content is {type(rest).__name__}: Lightning did "
                "not save it. Load it into a module with nxd_ckpt.load_checkpoint"
            )
        if self.before_load is not None:
            self.before_load(rest)
        model = model if tag.parts.model else None
        optimizer = optimizer if tag.parts.optimizer else None
        content: dict[str, Any] = load_checkpoint(
            place.directory,
            place.name,
            model,
            optimizer,
            trust_pickle=trusted,
            storage_options=place.options,
            **options,
        )
        return model, optimizer, content

    def remove_checkpoint(self, path: StrPath) -> None:
        """Remove a tag once the last save is complete: at the latest at the next save, or at the end.

        Raises DirectoryInUse if another live job saves there: nothing is removed.
        """
        if is_hidden(path):
            _plugins.TorchCheckpointIO().remove_checkpoint(path)
            return
        if not is_url(path) and os.path.islink(local_path(path)):
            with leased(_around(path)):
                os.unlink(local_path(path))  # made by ModelCheckpoint(save_last="link"): its target stays
            return
        self._dropped.append(self.place(path))
        if self._last is None or self._last.done():
            self._remove_dropped()

    def teardown(self) -> None:
        """Finish unfinished saves, and release directories and memory.

        Raises their failures; if an exception ends the training, that is raised, and the failure is logged.
        """
        raised = sys.exc_info()[1]
        try:
            try:
                finalize_checkpoint()
                self._remove_dropped()
            finally:
                close_checkpointers()
                self._saved_by.clear()
        except CheckpointError as error:
            if raised is None:
                raise
            logger.error("a checkpoint was not saved: %s: %s", type(error).__name__, error)

    def _remove_dropped(self) -> None:
        """Remove the dropped tags, when no save is unfinished.

        After a failed save they stay until one succeeds.
        """
        if self._last is not None and self._last.error is not None:
            return
        while self._dropped:
            place = self._dropped.pop()
            storage = place.open()
            if is_lightnings(place):
                with leased(storage):
                    storage.remove(place.name)
            elif storage.is_dir(place.name):
                # If nothing is open, this process removes alone.
                job = self._saved_by.get(place.directory, Topology())
                remove_checkpoint(place.directory, place.name, topology=job, storage_options=place.options)

    def place(self, path: StrPath) -> Location:
        """Return the location of the tag at ``path``."""
        return location_of(path, "checkpoint", options_for(path, self._storage_options))


class ExactResume(_callbacks.Callback):  # type: ignore[misc,name-defined]
    """A callback that makes a resumed run the same run: with the random state of every rank, or a clear refusal.

    A checkpoint also has the names of the optimizer's parameters, so that all tools of nxd_ckpt work on it. The data
    loaders' next items are up to them (Lightning keeps the state of those that have one).
    """

    def __init__(self) -> None:
        self._random: dict[str, Any] | None = None
        self._saved: dict[str, Any] = {}
        self._before: dict[str, Any] | None = None
        """The model's earlier state, while a resume can still be refused after Lightning has loaded it."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Run the checks of `on_load_checkpoint` already before a checkpoint is loaded."""
        self._before = None
        strategy = trainer.strategy
        ask = partial(self._before_load, trainer, pl_module)
        if isinstance(strategy.checkpoint_io, CheckpointIO):
            strategy.checkpoint_io.before_load = ask
        else:
            inner = getattr(strategy.load_checkpoint, "__wrapped__", strategy.load_checkpoint)
            strategy.load_checkpoint = _asking(inner, strategy.restore_checkpoint_after_setup, ask)

    def _before_load(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        _require_one_save(trainer, checkpoint)
        saved = _saved_run(trainer, checkpoint)
        if saved is not None and not trainer.strategy.restore_checkpoint_after_setup:
            self._before = {name: _copied(value) for name, value in pl_module.state_dict().items()}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the data that `on_load_checkpoint` reads; every rank calls it."""
        checkpoint[_EXTRA] = {
            "runs_with": {**_setting(trainer), **_optimizers(trainer)},
            "random": _random_states(trainer),
            "param_names": parameter_names(pl_module, trainer.optimizers[0]) if trainer.optimizers else None,
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Raise IncompatibleState if ``fit`` continues with another world size or precision."""
        saved = _saved_run(trainer, checkpoint)
        if saved is None:
            return
        self._saved = saved["runs_with"]
        self._random = saved["random"][trainer.global_rank]
        if trainer.strategy.restore_checkpoint_after_setup:  # then fit has started already
            self.on_fit_start(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise OptimizerMismatch, before the optimizers' states are loaded, if they are of other classes.

        Most strategies make the optimizers only after the model was loaded: then this is the first opportunity, and the
        model gets its earlier state back.
        """
        before = self._before
        self._before = None
        if self._random is None:
            return
        try:
            require_same("the checkpoint", self._saved, _optimizers(trainer), OptimizerMismatch)
        except OptimizerMismatch:
            if before is not None:
                _put_back(pl_module, before)
            raise
        restore_random_state(self._random)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the random state again in the middle of an epoch.

        The saved run would not have begun another pass over the data there, which draws random numbers.
        """
        if self._random is not None:
            for lost in _lost(trainer):
                logger.warning(lost)
            if _is_mid_epoch(trainer.fit_loop):
                restore_random_state(self._random)
        self._random = None


def _is_mid_epoch(loop: Any) -> bool:
    return bool(loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch)


def _lost(trainer: Any) -> Iterator[str]:
    """Yield what Lightning does not resume as it was, so that the resumed run is another."""
    loop = trainer.fit_loop
    if getattr(loop, "_combined_loader_states_to_load", None):
        yield (
            "at the end of an epoch Lightning does not load the state of data loaders: one that draws its order by "
            "itself, such as torchdata's StatefulDataLoader(shuffle=True), goes on in another order than the saved "
            "run. Resume from the middle of an epoch (every_n_train_steps=), or use torch's DataLoader"
        )
    loaders = getattr(loop._combined_loader, "flattened", ())
    if trainer.world_size > 1 and _is_mid_epoch(loop) and any(hasattr(loader, "state_dict") for loader in loaders):
        yield (
            "in the middle of an epoch Lightning loads the state of the first rank's data loaders on all ranks, and "
            "they may go on with other data than the saved run. Resume from the end of an epoch"
        )
    at_end = loop.restarted_on_epoch_end or loop.resumed_on_epoch_end
    if at_end and any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs):
        yield (
            "Lightning saves at the end of an epoch before the step of ReduceLROnPlateau, and leaves that step out "
            "when it resumes: the learning rate may be another than the saved run's. Schedules without a metric go on "
            "as they were"
        )


def _asking(
    load_checkpoint: Callable[..., Any], loads_model: bool, ask: Callable[[Mapping[str, Any]], None]
) -> Callable[..., Any]:
    """Return a strategy's ``load_checkpoint`` that first calls ``ask`` with the rest of Lightning's dict; it may raise.

    If that method ``loads_model`` as well, the rest is read beforehand: a file of its own beside shards, or a part of
    the only file, of which nothing else is read then.
    """

    @wraps(load_checkpoint)
    def asking(checkpoint_path: StrPath, weights_only: bool | None = None) -> Any:
        whole = "" if is_url(checkpoint_path) or not loads_model else local_path(checkpoint_path)
        early = next((path for path in (os.path.join(whole, _META), whole) if os.path.isfile(path)), None)
        if early is not None:
            ask(torch.load(early, "cpu", weights_only=weights_only, mmap=True))
        options = {} if weights_only is None else {"weights_only": weights_only}  # older versions have none
        checkpoint = load_checkpoint(checkpoint_path, **options)
        if early is None:
            ask(checkpoint)
        return checkpoint

    return asking


def is_hidden(path: StrPath) -> bool:
    """Return whether no tag may have this name. Lightning's tuner saves so, loads that soon after, and removes it."""
    return os.path.basename(os.fspath(path)).startswith(".")


def is_lightnings(place: Location) -> bool:
    """Return whether Lightning wrote the files there: one file, or a directory of the ranks' files."""
    storage = place.open()
    is_whole = storage.is_file(place.name) and not storage.is_dir(place.name)
    return is_whole or storage.is_file(f"{place.name}/{_META}")


def _make_way(path: StrPath) -> None:
    """Remove a link at ``path``, and rename files that Lightning wrote.

    They are renamed because ``ckpt_path="last"`` must find them until the tag is complete. Raises DirectoryInUse if
    another live job saves there: nothing is moved.
    """
    if is_url(path):
        return
    text = local_path(path)
    if os.path.islink(text):
        with leased(_around(path)):
            os.unlink(text)
    elif os.path.isfile(text) or os.path.isfile(os.path.join(text, _META)):
        stem, ending = os.path.splitext(text)
        with leased(_around(path)):
            os.replace(text, f"{stem}-replaced{ending}")
        logger.info("%s, which Lightning wrote, is called %s-replaced%s now", text, stem, ending)


def _around(path: StrPath) -> Storage:
    """Return the directory of a local path, whose last part may be a link."""
    return open_storage(os.path.dirname(os.path.abspath(local_path(path))))


def _random_states(trainer: Any) -> list[dict[str, Any]]:
    """Return every rank's random state, by rank; on other ranks than 0 only their own, which is not saved."""
    own = capture_random_state()
    agreement = meet(trainer.global_rank, trainer.world_size, DEFAULT_TIMEOUT, "random state")
    if agreement is None or trainer.world_size == 1:
        return [own]
    words = agreement.gather({**own, "torch": own["torch"].tolist()}) or []
    return [{**word, "torch": torch.tensor(word["torch"], dtype=torch.uint8)} for word in words] or [own]


def _require_one_save(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """Raise RanksDisagree, on all ranks, if one of them reads another checkpoint, such as an older ``last``."""
    if trainer.state.fn != "fit":
        return
    agreement = meet(trainer.global_rank, trainer.world_size, DEFAULT_TIMEOUT, "resume")
    if agreement is not None:
        require_same_save(agreement, f"step {checkpoint.get('global_step')} of epoch {checkpoint.get('epoch')}")


def _saved_run(trainer: Any, checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the data of `ExactResume.on_save_checkpoint`; None if it was not used, or this is no ``fit``.

    Raises IncompatibleState or OptimizerMismatch if ``fit`` would not continue as the run that saved.
    """
    saved: Mapping[str, Any] | None = checkpoint.get(_EXTRA)
    if trainer.state.fn != "fit" or saved is None:
        return None
    require_same("the checkpoint", saved["runs_with"], _setting(trainer), IncompatibleState)
    if trainer.strategy.restore_checkpoint_after_setup:  # else the optimizers are not made yet
        require_same("the checkpoint", saved["runs_with"], _optimizers(trainer), OptimizerMismatch)
    return saved


def _put_back(module: Any, state: dict[str, Any]) -> None:
    """Restore the model's earlier state; tensors whose shapes hooks have changed are logged."""
    try:
        module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        logger.error("the model was loaded from the checkpoint, and its earlier state was not restored: %s", error)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else deepcopy(value)


def _setting(trainer: Any) -> dict[str, Any]:
    return {WORLD_SIZE: trainer.world_size, "precision": str(trainer.precision)}


def _optimizers(trainer: Any) -> dict[str, Any]:
    return {"optimizers": [type(optimizer).__qualname__ for optimizer in trainer.optimizers]}
