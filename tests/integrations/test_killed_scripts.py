"""A script of each trainer, killed in its saves and started again: its losses are those of a run that was not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt.integrations.lightning import CheckpointIO
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations.accelerate_run import Job
from tests.integrations.killed import SAVES, killed_three_times, note
from tests.integrations.lightning_run import BATCHES, Module, every_epoch, fit
from tests.integrations.transformers_run import Background, trained
from tests.support.processes import run_program

pytestmark = pytest.mark.filterwarnings("ignore:::pytorch_lightning", "ignore:::lightning_fabric")


def with_transformers(directory: Path, log: Path) -> None:
    """Each step is saved."""

    class Noted(Background):
        def training_step(self, *args: Any, **options: Any) -> Any:
            loss = super().training_step(*args, **options)
            note(log, self.state.global_step + 1, loss.item())
            return loss

    begun = any(directory.glob("checkpoint-*"))
    trained(directory, kind=Noted, resume=begun, max_steps=SAVES, save_steps=1, save_total_limit=2)


class Done:
    """How many steps are done."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def with_accelerate(directory: Path, log: Path) -> None:
    """Each step is saved, under the name that is next. Nobody sets a number."""
    job, done = Job(directory), Done()
    job.accelerator.register_for_checkpointing(done)
    if any(directory.glob("checkpoints/*")):
        job.accelerator.load_state()
    while done.steps < SAVES:
        loss = job.step()
        done.steps += 1
        note(log, done.steps, loss)
        job.accelerator.save_state()
    job.accelerator.end_training()


def with_lightning(directory: Path, log: Path) -> None:
    """Each epoch is saved, as the last one and, if it is, as one of the best two."""

    class Noted(Module):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            note(log, self.global_step + 1, loss.item())
            return loss

    checkpoints = every_epoch(directory, save_top_k=2, monitor="loss", mode="max")
    last = "last" if (directory / "last.ckpt").exists() else None
    fit(checkpoints, epochs=SAVES, ckpt_path=last, io=CheckpointIO(async_save=True), kind=Noted)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize(
    ("script", "steps", "where", "kept"),
    [
        (with_transformers, SAVES, ".", ["checkpoint-7", "checkpoint-8"]),
        (with_accelerate, SAVES, "checkpoints", ["checkpoint_6", "checkpoint_7"]),
        (with_lightning, BATCHES * SAVES, ".", ["last.ckpt"]),
    ],
    ids=["transformers", "accelerate", "lightning"],
)
def test_a_script_that_is_killed_three_times(
    script: Any, steps: int, where: str, kept: list[str], tmp_path: Path
) -> None:
    """It goes on by itself, and leaves the checkpoints that its limit allows; all of them are whole."""
    whole, killed = killed_three_times(script, tmp_path)
    assert list(range(1, steps + 1)) == sorted(whole)
    assert whole == killed
    found = tmp_path / "killed" / where
    assert {*kept} <= {*names(found)}  # Lightning itself does not know what it saved after its last one
    assert script is with_lightning or kept == names(found)
    for name in names(found):
        whole_checkpoint = (found, name) if script is with_lightning else (found / name,)
        assert not verify_checkpoint(*whole_checkpoint).problems


OLD = Path(sys.prefix, "torchtitan-0.2.2")


@pytest.mark.parametrize("release", [pytest.param("0.3", marks=pytest.mark.soak), "0.2.2"])
def test_a_script_of_torchtitan_that_is_killed_three_times(release: str, tmp_path: Path) -> None:
    """Its manager, as its trainers call it. They end while the last save is under way; it is complete."""
    pytest.importorskip("torchtitan")
    source = """
import json, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from tests.integrations import titan
from tests.integrations.killed import killed_three_times
print(json.dumps([titan._titan_file(), *killed_three_times(titan.script, Path(sys.argv[1]))]))
"""
    ended = run_program(source, tmp_path, *([OLD] if release == "0.2.2" else []))
    assert 0 == ended.returncode, ended.stderr
    file, whole, killed = json.loads(ended.stdout.splitlines()[-1])
    assert (str(OLD) in file) == (release == "0.2.2")
    assert SAVES == len(whole)
    assert whole == killed
    for run in ("whole", "killed"):
        assert ["step-7", "step-8"] == names(tmp_path / run / "checkpoint")
        assert not verify_checkpoint(tmp_path / run / "checkpoint").problems
