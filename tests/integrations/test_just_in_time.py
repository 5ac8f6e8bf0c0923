"""Checkpoints that transformers 5 makes at SIGTERM: by our Trainer, and what an interrupted one leaves."""

import multiprocessing
import os
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from nxd_ckpt.errors import CheckpointNotFound
from nxd_ckpt.integrations.transformers import SENTINEL
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations.killed import in_a_process
from tests.integrations.transformers_run import Background, Quick, trained, weights

of_transformers_5 = pytest.mark.skipif(
    not hasattr(transformers.TrainingArguments, "enable_jit_checkpoint"),
    reason="transformers saves at SIGTERM from 5 on",
)


class AtOnce:
    """Saves as soon as it is told to end: transformers would wait for three seconds."""

    callback_handler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        callbacks = self.callback_handler.callbacks
        (manager,) = (each.jit_manager for each in callbacks if hasattr(each, "jit_manager"))
        manager.kill_wait = 0
        callbacks.sort(key=lambda each: not isinstance(each, Told))  # what tells it comes before what listens


class Ours(AtOnce, Background):
    """In the background, but what is saved at SIGTERM."""


class Fails(AtOnce, transformers.Trainer):  # type: ignore[misc]
    """transformers' own, in the middle of its save at SIGTERM."""

    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == 3:
            raise InterruptedError
        super()._save_rng_state(output_dir)


class Told(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells the process to end at the beginning or the end of a step: "3 ends"."""

    def __init__(self, at: str) -> None:
        self._at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self._tell(f"{state.global_step} begins")

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        self._tell(f"{state.global_step} ends")

    def _tell(self, moment: str) -> None:
        if moment == self._at:
            signal.raise_signal(signal.SIGTERM)
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer):
                    thread.join()


class WorkersAreTold(transformers.TrainerCallback):  # type: ignore[misc]
    """Sends SIGTERM to the data loader's workers at the end of the first step."""

    def __init__(self) -> None:
        self._others, self.pids = multiprocessing.active_children(), list[int]()

    def on_step_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
        if not self.pids:
            self.pids = [each.pid for each in multiprocessing.active_children() if each not in self._others]  # type: ignore[misc]
            for pid in self.pids:
                os.kill(pid, signal.SIGTERM)


class JustInTime(Quick):
    """With what transformers 5 calls ``enable_jit_checkpoint``, whichever version it is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.enable_jit_checkpoint = True


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint*"))


def terminated(directory: Path, at: str, kind: Any = Ours) -> Any:
    return trained(directory, kind=kind, callbacks=[Told(at)], enable_jit_checkpoint=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of four steps that nothing interrupts, of which each is saved in ``args.output_dir``."""
    return trained(tmp_path_factory.mktemp("whole"), save_steps=1)


@pytest.fixture
def interrupted(whole: Any, tmp_path: Path) -> Path:
    """A directory whose last checkpoint is what transformers' own Trainer leaves that is killed in such a save."""
    shutil.copytree(Path(whole.args.output_dir) / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-3").mkdir()
    for name in (SENTINEL, "config.json", "model.safetensors"):
        (tmp_path / "checkpoint-3" / name).write_bytes(b"in progress")
    return tmp_path


def test_the_one_before_an_interrupted_checkpoint_is_resumed(interrupted: Path, whole: Any) -> None:
    """The run from there is the whole run, and the interrupted one is replaced by a complete one."""
    assert weights(whole) == weights(trained(interrupted, kind=Background, resume=True, seed=2))
    assert ["checkpoint-2", "checkpoint-3", "checkpoint-4"] == names(interrupted)
    assert not list(interrupted.glob(f"*/{SENTINEL}"))


def test_an_interrupted_checkpoint_is_refused(interrupted: Path) -> None:
    """By its path, and where there is no other. A directory without any is left to transformers."""
    with pytest.raises(CheckpointNotFound, match=f"checkpoint-3 holds {SENTINEL}"):
        trained(interrupted, resume=str(interrupted / "checkpoint-3"))
    shutil.rmtree(interrupted / "checkpoint-2")
    with pytest.raises(CheckpointNotFound, match=f"checkpoint-3 holds {SENTINEL}"):
        trained(interrupted, resume=True)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trained(interrupted / "checkpoint-3", resume=True)


def test_a_complete_checkpoint_with_a_sentinel_is_resumed(interrupted: Path, whole: Any) -> None:
    """transformers puts one into a checkpoint of the same step that is there already; ours has digests of all of it."""
    shutil.rmtree(interrupted / "checkpoint-3")
    (interrupted / "checkpoint-2" / SENTINEL).touch()
    assert weights(whole) == weights(trained(interrupted, kind=Quick, resume=True, seed=2))


def test_workers_pass_over_a_sigterm_for_all(tmp_path: Path) -> None:
    """Without them the training would end before the save."""
    told = WorkersAreTold()
    trained(tmp_path, kind=JustInTime, callbacks=[told], dataloader_num_workers=2, dataloader_persistent_workers=True)
    assert (2, ["checkpoint-2", "checkpoint-4"]) == (len(told.pids), names(tmp_path))


@of_transformers_5
@pytest.mark.parametrize("at", ["2 begins", "2 ends", "3 ends"])
def test_what_is_saved_at_sigterm_is_complete(at: str, tmp_path: Path, whole: Any) -> None:
    """And the run from there is the whole run."""
    terminated(tmp_path, at)
    assert ["checkpoint-2", "checkpoint-3"][: int(at[0]) - 1] == names(tmp_path)
    assert not list(tmp_path.glob(f"*/{SENTINEL}"))
    for name in names(tmp_path):
        assert not verify_checkpoint(tmp_path / name).problems
    assert weights(whole) == weights(trained(tmp_path, kind=Background, resume=True, seed=2))


@of_transformers_5
@pytest.mark.parametrize("at", ["2 begins", "3 ends"])
@pytest.mark.parametrize("part", [1, 5, 9])
def test_a_killed_save_at_sigterm_is_no_checkpoint(part: int, at: str, tmp_path: Path, whole: Any) -> None:
    """Whichever change to the storage it is killed at, the last complete one is resumed, as the same run."""
    changes = in_a_process(partial(terminated, tmp_path / "rehearsal", at))
    run = tmp_path / "run"
    assert -signal.SIGKILL == in_a_process(partial(terminated, run, at), changes // 2 + part * changes // 20)
    assert {"checkpoint-2"} <= {*names(run)} <= {"checkpoint-2", "checkpoint-3"}
    for name in names(run):
        assert not verify_checkpoint(run / name).problems
    assert weights(whole) == weights(trained(run, kind=Background, resume=True, seed=2))


@of_transformers_5
def test_what_transformers_leaves_is_recognised(tmp_path: Path, whole: Any) -> None:
    """The sentinel of its own interrupted save is the one that is looked for."""
    with pytest.raises(InterruptedError):
        terminated(tmp_path, "3 ends", Fails)
    assert ["checkpoint-2", "checkpoint-3"] == names(tmp_path)
    assert weights(whole) == weights(trained(tmp_path, kind=Background, resume=True, seed=2))
