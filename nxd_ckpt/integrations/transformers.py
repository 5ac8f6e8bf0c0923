"""Checkpoints of transformers' Trainer: Hugging Face's files, complete or invisible, with the optimizer as a tag.

Written for transformers 4.50 to 4.57; works with 5.23. One line changes::

    from nxd_ckpt.integrations.transformers import Trainer  # in place of transformers.Trainer

A checkpoint is the directory ``checkpoint-500``, as ever: ``from_pretrained`` reads it, ``resume_from_checkpoint``
resumes it, ``save_total_limit`` and the best model count. The optimizer and the scheduler are the tag
``training_state`` in it, and ``digests.json`` has digests of all other files. All is written out of sight, and renamed
when it is complete.

transformers 5 makes checkpoints of its own at SIGTERM (``enable_jit_checkpoint``): a directory ``checkpoint-N`` with a
sentinel in it, which it removes after the save. It never looks for one afterwards: `Trainer.train` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from signal import SIGTERM
from typing import Any, ClassVar

import transformers
from transformers.trainer import TRAINER_STATE_NAME

from nxd_ckpt.api import close_checkpointers, load_checkpoint, save_checkpoint
from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.coordination.worker_shield import kept
from nxd_ckpt.core.option_classes import plain_options
from nxd_ckpt.errors import CheckpointNotFound, IncompatibleState, OptimizerMismatch, UnsupportedState
from nxd_ckpt.integrations.resume_checks import WORLD_SIZE, parameter_names, require_same, require_same_setting
from nxd_ckpt.integrations.sealed import (
    SealedDirectory,
    directory_of,
    is_ours,
    is_sealed,
    oldest_first,
    place_in,
    require_one_writer,
    verify_files,
)
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT, CheckpointerOptions
from nxd_ckpt.save.options import SaveOptions
from nxd_ckpt.save.pending import PendingSave

STATE = "training_state"
"""Tag in a checkpoint's directory."""

SENTINEL = "checkpoint-is-incomplete.txt"

_NUMBERED = r"checkpoint-(\d+)"


def _make_way(directory: str) -> None:
    """Remove transformers' directory for a checkpoint that is now written out of sight; never a checkpoint."""
    if not os.path.isfile(sentinel := os.path.join(directory, SENTINEL)):
        return
    if os.listdir(directory) == [SENTINEL]:
        os.remove(sentinel)
        os.rmdir(directory)
    elif is_sealed(directory, STATE):
        os.remove(sentinel)


def _last_complete(run: str) -> str | None:
    """Return the newest checkpoint in ``run`` that is not interrupted; None if there is none.

    Raises:
        CheckpointNotFound: all of them are interrupted.
    """
    paths = [os.path.join(run, name) for name in oldest_first(run, _NUMBERED, STATE)]
    complete = [path for path in paths if not _is_interrupted(path)]
    if paths and not complete:
        _refuse_interrupted(paths[-1])
    return complete[-1] if complete else None


def _refuse_interrupted(directory: str) -> None:
    """Raise CheckpointNotFound for a directory whose save was interrupted."""
    if _is_interrupted(directory):
        raise CheckpointNotFound(
            f"{directory} holds {SENTINEL}: transformers began to save it at SIGTERM, and was ended before it was "
            "complete. Remove the directory, and resume from the checkpoint before it"
        )


def _is_interrupted(directory: str) -> bool:
    """Return whether the save was interrupted. A checkpoint of ours is complete, whatever other files are in it."""
    return os.path.isfile(os.path.join(directory, SENTINEL)) and not is_sealed(directory, STATE)


_RANDOM_STATE = "rng_state_{}.pth"
"""File that each of several ranks writes, by its rank; all others are rank 0's."""


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A replacement of ``transformers.Trainer``. For a trainer that extends it: ``class Mine(Trainer, SFTTrainer)``.

    A run also resumes from checkpoints that transformers' own trainer wrote. It works on one process, with data
    parallelism (DDP), or FSDP2, where each rank writes and reads its shards, and the tag has the model too. The first
    FSDP and DeepSpeed are refused.
    """

    async_save: ClassVar[bool] = False
    """Write the optimizer in the background; the checkpoint appears when that is done."""

    checkpoint_options: ClassVar[Mapping[str, Any]] = {}
    """Keywords of `nxd_ckpt.save_checkpoint`, such as ``durable`` and ``memory_cap``."""

    any_world_size: ClassVar[bool] = False
    """Resume also from another number of processes. Random states are then those of ranks that both have."""

    files_added_later: ClassVar[Sequence[str]] = ()
    """Glob patterns of files that callbacks add to a checkpoint after it was saved: a resume ignores them."""

    _staging: SealedDirectory | None = None
    """Directory to which transformers writes now."""
    _has_written_own = False
    """True if this rank wrote its random state there: a trainer that extends transformers' may write other files."""
    _saving: SealedDirectory | None = None
    """The checkpoint that is not known to be visible yet."""
    _saved: SealedDirectory | None = None
    """The last checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for given in (*args, *kwargs.values()):
            if isinstance(given, transformers.TrainingArguments):
                given.output_dir = directory_of(given.output_dir)
        super().__init__(*args, **kwargs)
        if self.args.save_on_each_node:
            require_one_writer(self._meet(), self.args.should_save)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers does, until the last checkpoint is complete. True resumes from the last complete one.

        Raises:
            CheckpointError: a save failed in the background; or the checkpoint to resume from is incomplete, damaged,
                or of another world size, precision or optimizer; the model is then unchanged.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_complete(self.args.output_dir) or True
        elif resume_from_checkpoint:
            resume_from_checkpoint = directory_of(resume_from_checkpoint)
            _refuse_interrupted(resume_from_checkpoint)
        with kept(SIGTERM) if getattr(self.args, "enable_jit_checkpoint", False) else nullcontext():
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._settle()
        close_checkpointers()
        if self._saved is not None and self.args.process_index == 0:
            self._saved.end_run()
        return output

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.accelerator.is_fsdp2):
            raise UnsupportedState(
                "nxd_ckpt's Trainer saves with one process, data parallelism or FSDP2: set fsdp_version to 2 in "
                "accelerate's configuration, or use transformers.Trainer"
            )
        options = plain_options(self.checkpoint_options, SaveOptions, CheckpointerOptions)
        name = f"checkpoint-{self.state.global_step}"
        run, agreement = self._get_output_dir(trial=trial), self._meet()
        root, name, incomplete = decided_by_rank0(agreement, partial(place_in, run, name))
        directory = SealedDirectory(root, name, options.get("durable", True), incomplete)
        on_all(agreement, directory.refuse_a_file)  # transformers would write into a directory of that name
        directory.begin_together(agreement)
        if self.args.process_index == 0:
            _make_way(directory.path)
        self._staging, self._has_written_own = directory, False
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        self._keep_best(directory)
        own = self._own_file() if self._has_written_own else ""
        self._record(directory, {own} - {""})
        self.accelerator.wait_for_everyone()  # until all ranks' files are there
        directory.complete(agreement, own)
        with directory.publishing(self.args.process_index == 0) as saves:
            saves.append(self._save_rest(directory))
        self._saving = self._saved = directory
        if not self.async_save or self.control.should_training_stop:
            self._settle()

    def _own_file(self) -> str:
        """Return the name of the file with this rank's random state."""
        return "rng_state.pth" if self.args.world_size == 1 else _RANDOM_STATE.format(self.args.process_index)

    def _record(self, directory: SealedDirectory, required: Iterable[str] = ()) -> None:
        """Record the files written so far as complete."""
        if self.args.process_index == 0:
            directory.record(_RANDOM_STATE.format("[1-9]*"), required)

    def _keep_best(self, directory: SealedDirectory) -> None:
        """Name the best checkpoint by its final path, not by the path where it is written."""
        if self.state.best_model_checkpoint == directory.staged:
            self.state.best_model_checkpoint = directory.path
            if self.args.should_save:
                self.state.save_to_json(os.path.join(directory.staged, TRAINER_STATE_NAME))

    def _save_rest(self, directory: SealedDirectory) -> PendingSave:
        """Save everything that is not in Hugging Face's files."""
        whole = not self.args.save_only_model
        optimizer = _unwrapped(self.optimizer)
        return save_checkpoint(
            directory.tags,
            STATE,
            self.model if self.is_fsdp_enabled else None,
            optimizer=optimizer if whole else None,
            scheduler=self.lr_scheduler if whole else None,
            user_content={"runs_with": {**self._setting(), "optimizer": type(optimizer).__qualname__}},
            param_names=parameter_names(self.model, optimizer) if whole else None,
            async_save=self.async_save,
            **self.checkpoint_options,
        )

    def _settle(self) -> None:
        """Wait until the unfinished checkpoint is visible, and surplus ones are removed. Raises its failure."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        best = self.state.best_model_checkpoint
        stay = [os.path.basename(best)] if best else []
        saving.wait(self._meet(), partial(saving.retire, _NUMBERED, STATE, self.args.save_total_limit, stay))
        self.accelerator.wait_for_everyone()

    def _meet(self) -> Agreement:
        met = meet(self.args.process_index, self.args.world_size, DEFAULT_TIMEOUT, "checkpoint")
        return met or SingleProcessAgreement()

    def _get_output_dir(self, trial: Any) -> str:
        if self._staging is None:
            self._settle()  # the caller looks for checkpoints there
        run: str = super()._get_output_dir(trial=trial)
        return run if self._staging is None else os.path.dirname(self._staging.staged)

    def _load_best_model(self) -> None:
        self._settle()
        best = self.state.best_model_checkpoint
        if self.is_fsdp_enabled and is_ours(best, STATE):
            load_checkpoint(best, STATE, self.model)
        else:
            super()._load_best_model()

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Do nothing: `_settle` removes surplus checkpoints, once the new one is complete."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save nothing: these are saved last. The model's files are complete now, and recorded."""
        if self._staging is not None:
            self._record(self._staging)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self._has_written_own = True

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check a checkpoint of ours, but load nothing yet.

        There may be no optimizer so far, and it may differ from the saved one.
        """
        if not is_ours(resume_from_checkpoint, STATE):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        tag = open_checkpoint(resume_from_checkpoint, STATE)
        runs_with = tag.user_content()["runs_with"]
        require_same_setting(resume_from_checkpoint, runs_with, self._setting(), self.any_world_size)
        verify_files(resume_from_checkpoint, STATE, (SENTINEL, *self.files_added_later))
        if self.is_fsdp_enabled and not tag.parts.model:
            raise IncompatibleState(
                f"{resume_from_checkpoint} was saved without FSDP: its model is only in Hugging Face's files, and "
                "not in shards. Resume without FSDP, or begin a new run from its model"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load also the model of a checkpoint of ours, once nothing can be refused any more."""
        if checkpoint is None or not is_ours(checkpoint, STATE):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        tag = open_checkpoint(checkpoint, STATE)
        model = self.model if tag.parts.model else None
        if tag.parts.optimizer is not None:
            optimizer = _unwrapped(self.optimizer)
            own = {"optimizer": type(optimizer).__qualname__}
            require_same(checkpoint, tag.user_content()["runs_with"], own, OptimizerMismatch)
            names = parameter_names(self.model, optimizer)
            load_checkpoint(checkpoint, STATE, model, optimizer, self.lr_scheduler, param_names=names)
        elif model is not None:  # save_only_model: transformers, too, continues without the rest
            load_checkpoint(checkpoint, STATE, model)
        if model is None:
            super()._load_from_checkpoint(checkpoint)

    def _setting(self) -> dict[str, Any]:
        dtypes = sorted({str(parameter.dtype) for parameter in self.model.parameters()})
        return {
            WORLD_SIZE: self.args.world_size,
            "precision": f"{self.accelerator.mixed_precision}, parameters of {', '.join(dtypes)}",
        }


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
