"""What plug-ins cost beyond direct calls: ``python -m tools.bench.plugins --mib 512 --rounds 9``.

One process saves a model and AdamW's state by each trainer's plug-in, and as directly as that can be: by
``save_checkpoint``, for transformers after ``save_pretrained``, whose files are then synced. Both save in turn, and who
begins changes. It is the save of a run: an earlier one has taken the directory, and memory from the system, which may
take thirty times as long as the copy into it. Of each round: how many times the direct call a plug-in took, which says
little on a busy machine; and the plug-in's own time, which is what it takes beside its calls of these two functions and
of the trainer's own that write what the direct call does not (random states, schedules, its arguments). "in the
background" is what a save with ``async_save`` holds up.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from nxd_ckpt import close_checkpointers, finalize_checkpoint, save_checkpoint
from nxd_ckpt.integrations.accelerate import Accelerator
from nxd_ckpt.integrations.lightning import CheckpointIO
from nxd_ckpt.integrations.transformers import Trainer
from nxd_ckpt.storage.system import sync_path

WIDTH = 2048
LAYER = 3 * 4 * WIDTH * WIDTH
"""Bytes of a layer and its moments, in float32."""

Save = Callable[[Path], Any]
"""Saves below a directory of its own; may return what waits until that is done."""


class Config(PretrainedConfig):  # type: ignore[misc]
    model_type = "bench"


class Model(PreTrainedModel):  # type: ignore[misc]
    """As many square layers as ``config.layers``."""

    config_class = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(config.layers))


def trained(layers: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model and its optimizer after a step."""
    model = Model(Config(layers=layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def lightning(model: Any, optimizer: Any) -> tuple[Save, Save]:
    plugin = CheckpointIO()

    def saved(place: Path) -> None:
        state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1}
        plugin.save_checkpoint(state, place / "step=1.ckpt")

    return saved, lambda place: save_checkpoint(place, "step=1.ckpt", model, optimizer, user_content={"epoch": 1})


def accelerate(model: Any, optimizer: Any) -> tuple[Save, Save]:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    return (
        lambda place: accelerator.save_state(str(place / "step_1")),
        lambda place: save_checkpoint(place, "step_1", model, optimizer),
    )


def transformers(model: Any, optimizer: Any, kind: Any = Trainer) -> tuple[Save, Save]:
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trainer = kind(model, TrainingArguments("out", report_to=[], use_cpu=True), optimizers=(optimizer, schedule))
    trainer.state.global_step = 1

    def saved(place: Path) -> Any:
        trainer.args.output_dir = str(place)
        trainer._save_checkpoint(model, None)
        return trainer._settle

    def directly(place: Path) -> None:
        model.save_pretrained(place / "checkpoint-1")
        if not kind.async_save:
            for path in (*place.glob("checkpoint-1/*"), place / "checkpoint-1"):
                sync_path(path)
        save_checkpoint(place, "step_1", optimizer=optimizer, scheduler=schedule, async_save=kind.async_save)

    return saved, directly


class Background(Trainer):
    """Saves in the background."""

    async_save = True


def in_the_background(model: Any, optimizer: Any) -> tuple[Save, Save]:
    return transformers(model, optimizer, Background)


class Watch:
    """How long the calls take that a plug-in shares with the direct save or with the trainer alone, in seconds."""

    def __init__(self) -> None:
        self.seconds, self.trainers = 0.0, 0.0
        self._direct = [
            "nxd_ckpt.integrations.lightning.save_checkpoint",
            "nxd_ckpt.integrations.trainer_tags.Checkpointer.save",
            f"{__name__}.Model.save_pretrained",
        ]
        self._trainers = [
            "accelerate.accelerator.save_accelerator_state",
            "transformers.trainer.Trainer._save_rng_state",
            "transformers.trainer.TrainerState.save_to_json",
            "transformers.trainer.torch.save",
        ]
        self._within = False

    def timed(self, function: Callable[..., Any], attribute: str) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if self._within:
                return function(*args, **options)
            started, self._within = time.monotonic(), True
            try:
                return function(*args, **options)
            finally:
                self._within = False
                setattr(self, attribute, getattr(self, attribute) + time.monotonic() - started)

        return called

    def own(self, save: Save, place: Path) -> tuple[float, float, float]:
        """Seconds of a save; of these its own; and those in which the trainer writes what is its own."""
        self.seconds = self.trainers = 0.0
        with ExitStack() as stack:
            for attribute, names in (("seconds", self._direct), ("trainers", self._trainers)):
                for name in names:
                    function = self.timed(pkgutil.resolve_name(name), attribute)
                    stack.enter_context(mock.patch(name, function))
            seconds = timed(save, place)
        return seconds, seconds - self.seconds - self.trainers, self.trainers


def timed(save: Save, place: Path) -> float:
    """Seconds of a save, one of many into a directory: it is taken, and memory is there. What was saved is removed."""
    os.sync()
    started = time.monotonic()
    finish = save(place)
    found = time.monotonic() - started
    if callable(finish):
        finish()
    finalize_checkpoint()
    for saved in place.glob("[!.]*"):
        shutil.rmtree(saved)
    return found


def rounds(saves: tuple[Save, Save], count: int, directory: Path) -> list[tuple[float, float, float, float]]:
    """Seconds of the plug-in and of the direct save, the plug-in's own, and the trainer's, after a round that does not
    count."""
    found, watch, (plugged, directly) = [], Watch(), saves
    places = [directory / "plugged", directory / "direct"]
    for place in places:
        place.mkdir()
    for number in range(count + 1):
        first = timed(directly, places[1]) if number % 2 else 0.0
        seconds, own, trainers = watch.own(plugged, places[0])
        found.append((seconds, first or timed(directly, places[1]), own, trainers))
    close_checkpointers()
    for place in places:
        shutil.rmtree(place)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=512, help="size of model and optimizer in MiB (default: 512)")
    parser.add_argument("--rounds", type=int, default=9, help="of each, in turn (default: 9)")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    args = parser.parse_args()
    model, optimizer = trained(max(1, round(args.mib * 2**20 / LAYER)))
    with tempfile.TemporaryDirectory(prefix="bench_plugins_", dir=args.directory) as name:
        print(f"{args.mib:.0f} MiB, {args.rounds} rounds")
        for of in (lightning, accelerate, transformers, in_the_background):
            found = rounds(of(model, optimizer), args.rounds, Path(name))
            ratio = statistics.median(seconds / direct for seconds, direct, *_ in found)
            direct, own, trainers = (statistics.median(one[at] for one in found) for at in (1, 2, 3))
            share = f"{own * 1000:.1f} ms, {own / direct:.1%} of {direct:.2f} s; the trainer's {trainers * 1000:.1f} ms"
            print(f"  {of.__name__:17} {ratio:.2f} x direct; its own time {share}")
    print(f"load {', '.join(f'{each:.1f}' for each in os.getloadavg())}")


if __name__ == "__main__":
    main()
