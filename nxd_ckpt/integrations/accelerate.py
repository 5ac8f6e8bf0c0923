"""Checkpoints of accelerate's save_state: tags with models and optimizers, which have accelerate's other files too.

Written for accelerate 1.x. One line changes::

    from nxd_ckpt.integrations.accelerate import Accelerator  # in place of accelerate.Accelerator

``save_state("out/checkpoint")`` makes the directory ``out/checkpoint``, as ever: a tag with the models and optimizers,
several by name (``model_0``), which was given accelerate's own files (schedulers, samplers, random states, registered
objects). It is all written out of sight, and renamed when it is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

import accelerate
from accelerate import DistributedType
from accelerate.state import is_initialized

from nxd_ckpt.api import load_checkpoint
from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.core.option_classes import split_options
from nxd_ckpt.errors import (
    CheckpointNotFound,
    IncompatibleState,
    InvalidArgument,
    OptimizerMismatch,
    UnsupportedState,
)
from nxd_ckpt.integrations.trainer_tags import (
    WORLD_SIZE,
    SavesTags,
    TrainerSaves,
    TrainerTag,
    directory_of,
    end_earlier_runs,
    next_number,
    oldest_first,
    parameter_names,
    require_one_writer,
    require_same,
    require_same_setting,
    tag_of,
)
from nxd_ckpt.live.named import is_placed
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.tag.digest_lists import STATE

_CHECKPOINTS = "checkpoints"
"""accelerate's folder of a project's checkpoints."""
_NUMBERED = r"checkpoint_(\d+)"

_OF_OBJECTS = re.compile(r"scheduler(_\d+)?\.bin|custom_checkpoint_\d+\.pkl|scaler\.pt")
"""Files that accelerate reads without asking whether they are there, or more of them."""

_ACCELERATES = (
    *("model*.safetensors*", "pytorch_model*", "optimizer*", "scheduler*.bin", "sampler*.bin", "dl_state_dict*"),
    *("random_states_*.pkl", "scaler.pt", "custom_checkpoint_*.pkl"),
)
"""Names of files in accelerate's own checkpoints: none is left of one that is replaced."""


class Accelerator(SavesTags, accelerate.Accelerator):  # type: ignore[misc]
    """A replacement of ``accelerate.Accelerator``, on one process, with data parallelism (DDP), or FSDP2.

    With FSDP2 each rank writes and reads its shards. ``total_limit`` of the project's configuration counts once the new
    checkpoint is complete. Checkpoints that accelerate wrote load too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        is_first = not is_initialized()
        self._prepared = WeakSet[Any]()
        super().__init__(*args, **kwargs)
        if is_first:  # connects the ranks: rank 0 then learns what the others do while it waits for them
            require_one_writer(self._meet("Accelerator"), self._writes)
        if self.project_configuration.automatic_checkpoint_naming and self.project_dir is not None:
            directory_of(self.project_dir)

    def prepare_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Prepare a model as accelerate does, which keeps none of its wrappers for data parallelism."""
        prepared = super().prepare_model(model, *args, **options)
        self._prepared.add(prepared)
        return prepared

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Save to ``output_dir``, or to the project's directory; return the checkpoint's directory.

        Raises:
            CheckpointError: the save failed, and only earlier checkpoints are visible; or the previous one failed in
                the background.
        """
        self._settle()
        self._require_supported()
        agreement = self._meet("checkpoint")
        saves, name = self._saves_to(output_dir, agreement)
        staged = saves.begin(agreement, name)
        model, optimizer, others = self._objects()
        with self._bare(others) as bare:
            models = bare["_models"]
            for hook in [*bare["_save_model_state_pre_hook"].values()]:  # weights that they remove are saved anyway
                hook(list(models), [None] * len(models), staged)
            super().save_state(staged, safe_serialization, **options)
        project = self.project_configuration
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        content = {"runs_with": {**self._setting(), **self._counts(), **self._classes()}}
        saves.save(agreement, model, optimizer, None, content, async_save=self.async_save, limit=limit)
        if not self.async_save:
            self._settle()
        return os.path.join(saves.directory, name)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Load from ``input_dir``, or the latest checkpoint of the project.

        Raises:
            CheckpointError: it is damaged, or of another world size, precision, optimizer or number of models, or a
                tensor of any of these has another name or shape; nothing was changed.
        """
        self._settle()
        end_earlier_runs()
        place = directory_of(input_dir) if input_dir is not None else self._latest()
        tag = tag_of(place)
        if tag is None:
            super().load_state(place, load_kwargs, **options)
            return
        self._require_supported()
        runs_with = open_checkpoint(tag.directory, tag.tag).user_content()["runs_with"]
        require_same_setting(place, runs_with, self._setting(), self.any_world_size)
        require_same(place, runs_with, {} if tag.is_sealed else self._counts(), IncompatibleState)
        require_same(place, runs_with, self._classes(), OptimizerMismatch)
        tag.verify_files()
        self._require_same_objects(place)
        self._load_models(tag, options)
        with self._bare([] if tag.is_sealed else self._objects()[2]) as bare:
            for hook in [*bare["_load_model_state_pre_hook"].values()]:
                hook(list(bare["_models"]), place)
            super().load_state(place, load_kwargs, **options)

    def end_training(self) -> None:
        """End accelerate's training once the last checkpoint is complete. Raises failures of the background."""
        self._close()
        super().end_training()

    def _objects(self) -> tuple[Any, Any, list[Any]]:
        """Return the models and the optimizers that a tag takes, several by name, and the optimizers that it does not.

        These hold parameters of others before them, and stay accelerate's files.
        """
        wrapped_in = {id(self.unwrap_model(model)): model for model in self._prepared}
        models = [wrapped_in.get(id(own), own) for own in map(self.unwrap_model, self._models)]
        if not models:
            raise UnsupportedState("no model was prepared: prepare one, or use accelerate.Accelerator")
        covered = set[int]()
        own = list[Any]()
        others = list[Any]()
        for wrapped in self._optimizers:
            parameters = {id(each) for group in wrapped.optimizer.param_groups for each in group["params"]}
            (others if parameters & covered else own).append(wrapped)
            covered |= parameters
        return _by_name("model", models), _by_name("optimizer", [each.optimizer for each in own]), others

    def _load_models(self, found: TrainerTag, given: Mapping[str, Any]) -> None:
        """Load all models and optimizers, or none, with those of the ``given`` options that are options of a load."""
        options, _ = split_options(LoadOptions, given)
        if not found.is_sealed:
            model, optimizer, _ = self._objects()
            load_checkpoint(found.directory, found.tag, model, optimizer, **options)
            return
        models = [self.unwrap_model(model) for model in self._models]
        for index, (model, wrapped) in enumerate(zip_longest(models, self._optimizers)):
            optimizer = None if wrapped is None else wrapped.optimizer
            named = (parameter_names(each, optimizer) for each in models) if model is None else ()
            tag = f"{STATE}_{index}" if index else STATE
            names = next(filter(None, named), None)
            load_checkpoint(found.directory, tag, model, optimizer, **{"param_names": names, **options})

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
    def _bare(self, optimizers: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
        """Let accelerate save and load only its other files within the block, in the directory it is given.

        Of the optimizers that are these.

        Yields the attributes that this object lacks meanwhile, by name.
        """
        names = ("_models", "_optimizers", "_save_model_state_pre_hook", "_load_model_state_pre_hook")
        attributes = {name: getattr(self, name) for name in names}
        project = self.project_configuration
        automatic = self.project_configuration.automatic_checkpoint_naming
        for name, value in attributes.items():
            setattr(self, name, type(value)())
        self._optimizers = list(optimizers)
        project.automatic_checkpoint_naming = False
        try:
            yield attributes
        finally:
            project.automatic_checkpoint_naming = automatic
            for name, value in attributes.items():
                setattr(self, name, value)

    def _saves_to(self, output_dir: str | None, agreement: Agreement) -> tuple[TrainerSaves, str]:
        """Return the saves to the directory around ``output_dir``, or of the project, and the checkpoint's name there.
        """
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            directory = self._checkpoints
            # A new process counts from 0 again, and accelerate takes the highest number for the newest.
            free = decided_by_rank0(agreement, partial(self._next_number, directory))
            project.iteration = max(project.iteration, free)
            name = f"checkpoint_{project.iteration}"
        elif output_dir is None:
            raise InvalidArgument("save_state() needs output_dir, or automatic_checkpoint_naming in the project")
        else:
            directory, name = os.path.split(os.path.abspath(directory_of(output_dir)))
        # accelerate takes everything in the folder of a project's checkpoints for one.
        hidden = project.automatic_checkpoint_naming
        return self._saves_in(agreement, directory, _NUMBERED, _ACCELERATES, hidden), name

    @staticmethod
    def _next_number(directory: str) -> int:
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        return next_number(directory, _NUMBERED)

    @property
    def _project(self) -> str:
        """The project's directory. Raises InvalidArgument for none, and for a URL."""
        if self.project_dir is None:
            raise InvalidArgument("automatic_checkpoint_naming needs the project's directory: pass project_dir")
        return directory_of(self.project_dir)

    @property
    def _checkpoints(self) -> str:
        """The folder of the project's checkpoints."""
        return os.path.abspath(os.path.join(self._project, _CHECKPOINTS))

    def _latest(self) -> str:
        """Return the project's newest checkpoint."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise InvalidArgument("load_state() needs input_dir, or automatic_checkpoint_naming in the project")
        checkpoints = oldest_first(self._checkpoints, _NUMBERED)
        if not checkpoints:
            raise CheckpointNotFound(f"{self._checkpoints}: there is no checkpoint yet")
        return os.path.join(self._checkpoints, checkpoints[-1])

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
        for placed in filter(is_placed, self._custom_objects):
            raise UnsupportedState(
                f"a registered {type(placed).__qualname__} has DTensors, and accelerate writes the main process's part "
                "of them, which all ranks would load: prepare it as a model, or give its state_dict() whole tensors"
            )

    @property
    def _writes(self) -> bool:
        """True if accelerate writes the files of the job on this rank."""
        each_node = self.project_configuration.save_on_each_node
        return bool(self.is_local_main_process if each_node else self.is_main_process)

    def _setting(self) -> dict[str, Any]:
        return {WORLD_SIZE: self.num_processes, "precision": self.mixed_precision}

    def _counts(self) -> dict[str, Any]:
        return {"number of models": len(self._models)}

    def _classes(self) -> dict[str, Any]:
        return {"optimizers": [type(optimizer.optimizer).__qualname__ for optimizer in self._optimizers]}


def _by_name(kind: str, objects: Sequence[Any]) -> Any:
    """Return the only one of the objects, several by name, or None."""
    if len(objects) < 2:
        return next(iter(objects), None)
    return {f"{kind}_{index}": one for index, one in enumerate(objects)}
