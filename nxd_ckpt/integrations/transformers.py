"""Checkpoints of transformers' Trainer: Hugging Face's files, complete or invisible, with the optimizer as a tag.

Written for transformers 4.50 to 4.57; works with 5.23. One line changes::

    from nxd_ckpt.integrations.transformers import Trainer  # in place of transformers.Trainer

A checkpoint is the directory ``checkpoint-500``, as ever: ``from_pretrained`` reads it, ``resume_from_checkpoint``
resumes it, ``save_total_limit`` and the best model count. It is a tag of the output directory, with the optimizer and
the scheduler, and Hugging Face's files are files of others that it was given. All is written out of sight, and renamed
when it is complete.

transformers 5 makes checkpoints of its own at SIGTERM (``enable_jit_checkpoint``): a directory ``checkpoint-N`` with a
sentinel in it, which it removes after the save. It never looks for one afterwards: `Trainer.train` does.
"""

from __future__ import annotations

import os
from signal import SIGTERM
from typing import Any

import transformers
from transformers.trainer import TRAINER_STATE_NAME

from nxd_ckpt.api import load_checkpoint
from nxd_ckpt.checkpoint import open_checkpoint
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.coordination.worker_shield import shield
from nxd_ckpt.errors import CheckpointNotFound, IncompatibleState, OptimizerMismatch, UnsupportedState
from nxd_ckpt.integrations.trainer_tags import (
    WORLD_SIZE,
    SavesTags,
    TrainerSaves,
    directory_of,
    end_earlier_runs,
    oldest_first,
    parameter_names,
    require_one_writer,
    require_same,
    require_same_setting,
    tag_of,
)
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT

SENTINEL = "checkpoint-is-incomplete.txt"

_NUMBERED = r"checkpoint-(\d+)"

_TRANSFORMERS = (
    *("model*.safetensors*", "pytorch_model*", "optimizer*", "scaler.pt", "rng_state*.pth"),
    *("trainer_state.json", "training_args.bin", "global_step*", SENTINEL),
)
"""Names of files in transformers' own checkpoints: none is left of one that is replaced."""


def _make_way(directory: str) -> None:
    """Remove the empty directory of a checkpoint that is now written out of sight."""
    if os.path.isdir(directory) and os.listdir(directory) == [SENTINEL]:
        os.remove(os.path.join(directory, SENTINEL))
        os.rmdir(directory)


def _last_complete(run: str) -> str | None:
    """Return the newest checkpoint in ``run`` that is not interrupted; None if there is none.

    Raises:
        CheckpointNotFound: all of them are interrupted.
    """
    paths = [os.path.join(run, name) for name in oldest_first(run, _NUMBERED)]
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
    tag = tag_of(directory)
    return os.path.isfile(os.path.join(directory, SENTINEL)) and not (tag is not None and tag.is_complete)


class Trainer(SavesTags, transformers.Trainer):  # type: ignore[misc]
    """A replacement of ``transformers.Trainer``. For a trainer that extends it: ``class Mine(Trainer, SFTTrainer)``.

    A run also resumes from checkpoints that transformers' own trainer wrote. It works on one process, with data
    parallelism (DDP), or FSDP2, where each rank writes and reads its shards, and the tag has the model too. The first
    FSDP and DeepSpeed are refused.
    """

    _staged: str | None = None
    """Directory to which transformers writes a checkpoint now."""

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
        if resume_from_checkpoint:
            end_earlier_runs()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_complete(self.args.output_dir) or True
        elif resume_from_checkpoint:
            resume_from_checkpoint = directory_of(resume_from_checkpoint)
            _refuse_interrupted(resume_from_checkpoint)
        if getattr(self.args, "enable_jit_checkpoint", False):
            shield(SIGTERM)
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._close()
        return output

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and not self.accelerator.is_fsdp2):
            raise UnsupportedState(
                "nxd_ckpt's Trainer saves with one process, data parallelism or FSDP2: set fsdp_version to 2 in "
                "accelerate's configuration, or use transformers.Trainer"
            )
        run = os.path.abspath(self._get_output_dir(trial=trial))  # each trial of a search for hyperparameters has one
        agreement = self._meet()
        saves = self._saves_in(agreement, run, _NUMBERED, _TRANSFORMERS, hidden=False)
        name = f"checkpoint-{self.state.global_step}"
        final = os.path.join(saves.directory, name)
        self._staged = staged = saves.begin(agreement, name)
        try:
            if self.args.process_index == 0:
                _make_way(final)
            super()._save_checkpoint(model, trial)
        finally:
            self._staged = None
        if self.state.best_model_checkpoint == staged:  # from now on it is there
            self.state.best_model_checkpoint = final
            if self.args.should_save:
                self.state.save_to_json(os.path.join(staged, TRAINER_STATE_NAME))
        self._save_rest(saves, agreement)
        if not self.async_save or self.control.should_training_stop:
            self._settle()

    def _save_rest(self, saves: TrainerSaves, agreement: Agreement) -> None:
        """Save everything that is not in Hugging Face's files, and these."""
        whole = not self.args.save_only_model
        best = self.state.best_model_checkpoint
        optimizer = _unwrapped(self.optimizer)
        saves.save(
            agreement,
            self.model if self.is_fsdp_enabled else None,
            optimizer if whole else None,
            self.lr_scheduler if whole else None,
            {"runs_with": {**self._setting(), "optimizer": type(optimizer).__qualname__}},
            param_names=parameter_names(self.model, optimizer) if whole else None,
            async_save=self.async_save,
            limit=self.args.save_total_limit,
            best=os.path.basename(best) if best else None,
        )

    def _meet(self) -> Agreement:
        met = meet(self.args.process_index, self.args.world_size, DEFAULT_TIMEOUT, "checkpoint")
        return met or SingleProcessAgreement()

    def _get_output_dir(self, trial: Any) -> str:
        if self._staged is not None:
            return os.path.dirname(self._staged)
        self._settle()  # the caller looks for checkpoints there
        run: str = super()._get_output_dir(trial=trial)
        return run

    def _load_best_model(self) -> None:
        self._settle()
        best = tag_of(self.state.best_model_checkpoint)
        if self.is_fsdp_enabled and best is not None:
            load_checkpoint(best.directory, best.tag, self.model)
        else:
            super()._load_best_model()

    def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
        """Do nothing: the save removes surplus checkpoints, once the new one is complete."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save nothing: these are saved last."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check a checkpoint of ours, but load nothing yet.

        There may be no optimizer so far, and it may differ from the saved one.
        """
        found = tag_of(resume_from_checkpoint)
        if found is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        tag = open_checkpoint(found.directory, found.tag)
        runs_with = tag.user_content()["runs_with"]
        require_same_setting(resume_from_checkpoint, runs_with, self._setting(), self.any_world_size)
        found.verify_files()
        if self.is_fsdp_enabled and not tag.parts.model:
            raise IncompatibleState(
                f"{resume_from_checkpoint} was saved without FSDP: its model is only in Hugging Face's files, and "
                "not in shards. Resume without FSDP, or begin a new run from its model"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load also the model of a checkpoint of ours, once nothing can be refused any more."""
        found = tag_of(checkpoint) if checkpoint is not None else None
        if checkpoint is None or found is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        tag = open_checkpoint(found.directory, found.tag)
        model = self.model if tag.parts.model else None
        if tag.parts.optimizer is not None:
            optimizer = _unwrapped(self.optimizer)
            own = {"optimizer": type(optimizer).__qualname__}
            require_same(checkpoint, tag.user_content()["runs_with"], own, OptimizerMismatch)
            names = parameter_names(self.model, optimizer)
            load_checkpoint(found.directory, found.tag, model, optimizer, self.lr_scheduler, param_names=names)
        elif model is not None:  # save_only_model: transformers, too, continues without the rest
            load_checkpoint(found.directory, found.tag, model)
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
