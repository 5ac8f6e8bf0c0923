"""What each rank of a group does with the small model of transformers', under DDP or FSDP2."""

import os
from pathlib import Path
from typing import Any

import transformers

from tests.integrations.accelerate_run import fresh, whole_state
from tests.integrations.transformers_run import Background, held, losses, trained

Seen = tuple[dict[int, float], list[list[float]]]
"""Losses by step, and what a rank holds of the weights."""


def run(directory: Path, form: str, **options: Any) -> Any:
    """A run of four steps, with DDP ("ddp"), or FSDP2 whose model files are "sharded" or "full"."""
    with fresh():
        if form != "ddp":
            files = f"{form.upper()}_STATE_DICT"
            os.environ |= {"FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": files}  # for transformers 4
            options |= {"fsdp": "full_shard", "fsdp_config": {"version": 2, "state_dict_type": files}}
        return trained(directory, **options)


def seen(trainer: Any) -> Seen:
    return losses(trainer), held(trainer)


def whole(rank: int, directory: Path, form: str) -> Seen:
    """A run that nothing interrupts."""
    return seen(run(directory, form))


def resumed(rank: int, directory: Path, form: str, own: bool) -> Seen:
    """One that was stopped after two steps, ``own``: which transformers saved."""
    run(directory / "first", form, kind=transformers.Trainer if own else Background)
    return seen(run(directory, form, kind=Background, resume=str(directory / "first" / "checkpoint-2"), seed=2))


def best(rank: int, directory: Path, form: str) -> tuple[str, list[list[float]]]:
    """The best checkpoint's name, and the weights that are loaded from it at the end."""
    options: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = run(directory, form, save_steps=1, save_total_limit=1, learning_rate=3.0, **options)
    return Path(trainer.state.best_model_checkpoint).name, held(trainer)


class AnyWorldSize(Background):
    """Allows another world size."""

    any_world_size = True


class Begin(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps the whole state that a run begins with."""

    def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **of: Any) -> None:
        self.state = whole_state(model, optimizer)


def saved(rank: int, directory: Path, form: str) -> list[list[float]]:
    """The whole state after two steps, which are saved."""
    trainer = run(directory, form, kind=Background, max_steps=2)
    return whole_state(trainer.model, trainer.optimizer)


def taken_over(rank: int, directory: Path, form: str, allowed: bool) -> list[list[float]]:
    """The whole state that is loaded, by one that allows another world size or not. It then goes on to step four."""
    begin = Begin()
    kind = AnyWorldSize if allowed else Background
    trainer = run(directory, form, kind=kind, resume=True, seed=2, callbacks=[begin])
    assert begin.state != whole_state(trainer.model, trainer.optimizer)
    return begin.state
