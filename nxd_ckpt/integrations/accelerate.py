"""Checkpoints of accelerate's save_state: its files, complete or invisible, with models and optimizers as tags.

Written for accelerate 1.x. One line changes::

    from nxd_ckpt.integrations.accelerate import Accelerator  # in place of accelerate.Accelerator

``save_state("checkpoint")`` makes the directory ``checkpoint``, as ever. In it, the first model and its optimizer are
the tag ``training_state``; further models are ``training_state_1`` and so on. ``digests.json`` has digests of
accelerate's own files (schedulers, samplers, random states, registered objects). It is all written out of sight, and
renamed when it is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import accelerate
from accelerate import DistributedType
from accelerate.state import is_initialized

from nxd_ckpt.api import close_checkpointers, load_checkpoint, save_checkpoint
from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.environment import default_topology
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.core.option_classes import options_of, plain_options, split_options
from nxd_ckpt.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    IncompatibleState,
    InvalidArgument,
    OptimizerMismatch,
    UnsupportedState,
)
from nxd_ckpt.integrations.resume_checks import WORLD_SIZE, parameter_names, require_same, require_same_setting
from nxd_ckpt.integrations.sealed import (
    SealedDirectory,
    directory_of,
    is_ours,
    next_number,
    oldest_first,
    require_one_writer,
    verify_files,
)
from nxd_ckpt.load.loading import require_fit
from nxd_ckpt.load.options import LoadOptions, LoadRequest
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT, CheckpointerOptions
from nxd_ckpt.save.options import SaveOptions
from nxd_ckpt.save.pending import PendingSave
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.identity import Identity
from nxd_ckpt.tag.known_damage import note_damage
from nxd_ckpt.tag.verify import verify_checkpoint

STATE = "training_state"
"""The tag of the first model in a checkpoint's directory."""

_CHECKPOINTS = "checkpoints"
"""accelerate's folder of a project's checkpoints."""
_NUMBERED = r"checkpoint_(\d+)"

_RANDOM_STATE = "random_states_{}.pkl"
"""File of each rank, by its number."""

_OF_OBJECTS = re.compile(r"scheduler(_\d+)?\.bin|custom_checkpoint_\d+\.pkl|scaler\.pt")
"""Files that accelerate reads without asking whether they are there, or more of them."""

_ACCELERATES = (
    *("model*.safetensors*", "pytorch_model*", "optimizer*", "scheduler*.bin", "sampler*.bin", "dl_state_dict*"),
    *("random_states_*.pkl", "scaler.pt", "custom_checkpoint_*.pkl"),
)
"""accelerate's own names of a checkpoint's files."""


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """A replacement of ``accelerate.Accelerator``, on one process, with data parallelism (DDP), or FSDP2.

    With FSDP2 each rank writes and reads its shards. ``total_limit`` of the project's configuration counts once the new
    checkpoint is complete. Checkpoints that accelerate wrote load too.
    """

    async_save: ClassVar[bool] = False
    """Write models and optimizers in the background; the checkpoint appears when that is done."""

    checkpoint_options: ClassVar[Mapping[str, Any]] = {}
    """Keywords of `nxd_ckpt.save_checkpoint`, such as ``durable`` and ``memory_cap``."""

    any_world_size: ClassVar[bool] = False
    """Load also checkpoints of another number of processes. Random states are then those of ranks that both have."""

    files_added_later: ClassVar[Sequence[str]] = ()
    """Glob patterns of files that a script adds to a checkpoint after it was saved: a load ignores them."""

    _saving: SealedDirectory | None = None
    """The checkpoint that is not known to be visible yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        is_first = not is_initialized()
        super().__init__(*args, **kwargs)
        if is_first:  # connects the ranks: rank 0 then learns what the others do while it waits for them
            require_one_writer(self._meet("Accelerator"), self._writes)
        if self.project_configuration.automatic_checkpoint_naming and self.project_dir is not None:
            directory_of(self.project_dir)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Save to ``output_dir``, or to the project's directory; return the checkpoint's directory.

        Raises:
            CheckpointError: the save failed, and only earlier checkpoints are visible; or the previous one failed in
                the background.
        """
        self._settle()
        self._require_supported()
        agreement = self._meet("checkpoint")
        directory = self._directory(output_dir, agreement)
        directory.begin_together(agreement)
        with self._bare() as bare:
            models = bare["_models"]
            for hook in [*bare["_save_model_state_pre_hook"].values()]:  # weights that they remove are saved anyway
                hook(list(models), [None] * len(models), directory.staged)
            super().save_state(directory.staged, safe_serialization, **options)
        own = _RANDOM_STATE.format(self.process_index)
        if self.is_main_process:
            directory.record(_RANDOM_STATE.format("[1-9]*"), [own, *self._files_of_objects()])
        self.wait_for_everyone()  # until all ranks' files are there
        # All ranks write the state of the scaler and of stateful data loaders, and hooks write any files.
        directory.complete(agreement, own, shared=True)
        with directory.publishing(self.is_main_process) as saves:
            self._save_models(directory, saves)
        self._saving = directory
        if not self.async_save:
            self._settle()
        return directory.path

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Load from ``input_dir``, or the latest checkpoint of the project.

        Raises:
            CheckpointError: it is damaged, or of another world size, precision, optimizer or number of models, or a
                tensor of any of these has another name or shape; nothing was changed.
        """
        self._settle()
        place = directory_of(input_dir) if input_dir is not None else self._latest()
        if not is_ours(place, STATE):
            super().load_state(place, load_kwargs, **options)
            return
        self._require_supported()
        content = open_checkpoint(place, STATE).user_content()
        require_same_setting(place, content["runs_with"], self._setting(), self.any_world_size)
        require_same(place, content["runs_with"], self._classes(), OptimizerMismatch)
        verify_files(place, STATE, self.files_added_later)
        self._require_same_objects(place)
        self._load_models(place, options)
        with self._bare() as bare:
            for hook in [*bare["_load_model_state_pre_hook"].values()]:
                hook(list(bare["_models"]), place)
            super().load_state(place, load_kwargs, **options)

    def end_training(self) -> None:
        """End accelerate's training once the last checkpoint is complete. Raises failures of the background."""
        self._settle()
        close_checkpointers()
        super().end_training()

    def _save_models(self, directory: SealedDirectory, saves: list[PendingSave]) -> None:
        """Save models and optimizers, which accelerate's files lack, and add the saves to ``saves``."""
        for tag, model, optimizer, names in self._parts():
            content = {"runs_with": {**self._setting(), **self._classes()}} if tag == STATE else None
            more = {"async_save": self.async_save, "param_names": names, **self.checkpoint_options}
            saves.append(save_checkpoint(directory.tags, tag, model, optimizer, None, content, **more))

    def _load_models(self, place: str, given: Mapping[str, Any]) -> None:
        """Load all models, or none; with those of the ``given`` options that are options of a load, such as ``strict``.

        Before the first one changes, the others are checked to fit, and their tags are verified.
        """
        parts = self._parts()
        if is_ours(place, _tag(len(parts))):
            raise IncompatibleState(
                f"{place} was saved with more models than the {len(self._models)} that were prepared: prepare all"
            )
        options, _ = split_options(LoadOptions, given)
        agreement = self._meet("load_state")
        own = [tag for tag, *_ in parts[1:]][self.process_index :: self.num_processes]
        storage, topology = LocalStorage(os.path.abspath(place)), default_topology()
        try:
            on_all(agreement, partial(_verify, place, own))
        except CorruptCheckpoint as error:  # another rank may have found it, and rank 0 removes surplus checkpoints
            note_damage(storage, Identity(storage, STATE), str(error))
            raise
        for tag, model, optimizer, names in parts[1:]:
            chosen = options_of(LoadOptions, {"param_names": names, **options})
            require_fit(storage, tag, LoadRequest(topology, agreement, model, optimizer, options=chosen))
        for tag, model, optimizer, names in parts:
            load_checkpoint(place, tag, model, optimizer, **{"param_names": names, **options})

    def _parts(self) -> list[tuple[str, Any, Any, list[list[str]] | None]]:
        """Return each tag with its model and its optimizer, or None, without accelerate's wrappers.

        An optimizer is saved with the model at its place. Those for which there is none have tags of their own, with
        the names of their parameters if these are of one model.
        """
        models: list[Any] = [self.unwrap_model(model) for model in self._models]
        if not models:
            raise UnsupportedState("no model was prepared: prepare one, or use accelerate.Accelerator")
        parts: list[tuple[str, Any, Any, list[list[str]] | None]] = []
        for index, (model, wrapped) in enumerate(zip_longest(models, self._optimizers)):
            optimizer = None if wrapped is None else wrapped.optimizer
            named = (parameter_names(each, optimizer) for each in models) if model is None else ()
            parts.append((_tag(index), model, optimizer, next(filter(None, named), None)))
        return parts

    def _files_of_objects(self) -> list[str]:
        """Return accelerate's files of the scaler, the schedulers and the registered objects of this run."""
        numbers = ["", *(f"_{index}" for index in range(1, len(self._schedulers)))]
        files = [f"scheduler{number}.bin" for number in numbers[: len(self._schedulers)]]
        files += [f"custom_checkpoint_{index}.pkl" for index in range(len(self._custom_objects))]
        return files if self.scaler is None else [*files, "scaler.pt"]

    def _require_same_objects(self, place: str) -> None:
        """Raise IncompatibleState unless the checkpoint has the files of just the objects of this run."""
        own = {*self._files_of_objects()}
        saved = {name for name in os.listdir(place) if _OF_OBJECTS.fullmatch(name)}
        if saved != own:
            raise IncompatibleState(
                f"{place} was saved with other schedulers or registered objects than this run has: it has "
                f"{', '.join(sorted(saved)) or 'none'}, and this run takes {', '.join(sorted(own)) or 'none'}. "
                "Prepare and register as many, in the same order, as the run that saved"
            )

    @contextmanager
    def _bare(self) -> Iterator[Mapping[str, Any]]:
        """Let accelerate save and load only its other files within the block, in the directory it is given.

        Yields the attributes that this object lacks meanwhile, by name.
        """
        names = ("_models", "_optimizers", "_save_model_state_pre_hook", "_load_model_state_pre_hook")
        attributes = {name: getattr(self, name) for name in names}
        project, automatic = self.project_configuration, self.project_configuration.automatic_checkpoint_naming
        for name, value in attributes.items():
            setattr(self, name, type(value)())
        project.automatic_checkpoint_naming = False
        try:
            yield attributes
        finally:
            project.automatic_checkpoint_naming = automatic
            for name, value in attributes.items():
                setattr(self, name, value)

    def _directory(self, output_dir: str | None, agreement: Agreement) -> SealedDirectory:
        """Return the checkpoint to be made: ``output_dir``, or the project's next one. All ranks call this.

        Raises InvalidArgument if ``output_dir`` is no checkpoint.
        """
        durable = plain_options(self.checkpoint_options, SaveOptions, CheckpointerOptions).get("durable", True)
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise InvalidArgument("save_state() needs output_dir, or automatic_checkpoint_naming in the project")
            directory = SealedDirectory(*os.path.split(os.path.abspath(directory_of(output_dir))), durable)
            on_all(agreement, partial(directory.refuse_to_replace, _ACCELERATES))
            return directory
        # A new process counts from 0 again, and accelerate takes the highest number for the newest.
        free = decided_by_rank0(agreement, lambda: next_number(self._checkpoints, _NUMBERED))
        project.iteration = max(project.iteration, free)
        # Written outside of the folder of the checkpoints: accelerate takes everything in it for one.
        return SealedDirectory(self._project, f"{_CHECKPOINTS}/checkpoint_{project.iteration}", durable)

    @property
    def _project(self) -> str:
        """The project's directory. Raises InvalidArgument for none, and for a URL."""
        if self.project_dir is None:
            raise InvalidArgument("automatic_checkpoint_naming needs the project's directory: pass project_dir")
        return directory_of(self.project_dir)

    @property
    def _checkpoints(self) -> str:
        """The folder of the project's checkpoints."""
        return os.path.join(self._project, _CHECKPOINTS)

    def _latest(self) -> str:
        """Return the project's newest checkpoint."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise InvalidArgument("load_state() needs input_dir, or automatic_checkpoint_naming in the project")
        checkpoints = oldest_first(self._checkpoints, _NUMBERED, STATE)
        if not checkpoints:
            raise CheckpointNotFound(f"{self._checkpoints}: there is no checkpoint yet")
        return os.path.join(self._checkpoints, checkpoints[-1])

    def _settle(self) -> None:
        """Wait until the unfinished checkpoint is visible, and surplus ones are removed. Raises its failure."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        project = self.project_configuration
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        saving.wait(self._meet("checkpoint"), partial(saving.retire, _NUMBERED, STATE, limit))
        self.wait_for_everyone()

    def _meet(self, call: str) -> Agreement:
        met = meet(self.process_index, self.num_processes, DEFAULT_TIMEOUT, call)
        return met or SingleProcessAgreement()

    def _require_supported(self) -> None:
        shards = self.distributed_type == DistributedType.FSDP
        if shards and not self.is_fsdp2:
            raise UnsupportedState(
                "nxd_ckpt's Accelerator saves FSDP2's models, not those of the first FSDP, whose parameters are flat: "
                "use FullyShardedDataParallelPlugin(fsdp_version=2)"
            )
        if self.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise UnsupportedState(
                f"nxd_ckpt's Accelerator saves with one process, data parallelism or FSDP2, not with "
                f"{self.distributed_type}"
            )

    @property
    def _writes(self) -> bool:
        """True if accelerate writes the files of the job on this rank."""
        each_node = self.project_configuration.save_on_each_node
        return bool(self.is_local_main_process if each_node else self.is_main_process)

    def _setting(self) -> dict[str, Any]:
        return {WORLD_SIZE: self.num_processes, "precision": self.mixed_precision}

    def _classes(self) -> dict[str, Any]:
        return {"optimizers": [type(optimizer.optimizer).__qualname__ for optimizer in self._optimizers]}


def _tag(index: int) -> str:
    """Return the tag of the model or the optimizer at this place."""
    return f"{STATE}_{index}" if index else STATE


def _verify(place: str, tags: Sequence[str]) -> None:
    """Raise CorruptCheckpoint if a file of the tags differs from the saved one."""
    for tag in tags:
        problems = verify_checkpoint(place, tag).problems
        if problems:
            raise CorruptCheckpoint(f"{place}: {problems[0]}; nothing was loaded. Resume from another checkpoint")
