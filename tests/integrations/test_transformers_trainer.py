"""transformers' Trainer with our checkpoints: what is in them, what it resumes, and what killed saves leave."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerCallback

from examples.train_transformers import main
from nxd_ckpt import list_checkpoints, load_checkpoint, open_checkpoint
from nxd_ckpt.commit.publication import Staged
from nxd_ckpt.errors import (
    CheckpointError,
    DigestMismatch,
    IncompatibleState,
    InvalidArgument,
    OptimizerMismatch,
    PartNotFound,
    SaveFailed,
)
from nxd_ckpt.integrations.transformers import Trainer
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations.killed import in_a_process
from tests.integrations.transformers_run import Background, Quick, Tiny, TinyConfig, losses, trained, weights
from tests.support.damage import flip
from tests.support.slow_disks import slow_renames


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of four steps that nothing interrupts; its checkpoints are in ``args.output_dir``."""
    return trained(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def saved(whole: Any, tmp_path: Path) -> Path:
    """A copy of its checkpoint of two steps."""
    return Path(shutil.copytree(Path(whole.args.output_dir) / "checkpoint-2", tmp_path / "saved" / "checkpoint-2"))


def test_a_resumed_run_is_the_same_run(saved: Path, tmp_path: Path, whole: Any) -> None:
    """Losses, under dropout and shuffling, and weights equal those of a run that was not stopped."""
    resumed = trained(tmp_path, kind=Background, resume=str(saved), seed=2)
    assert losses(whole) == losses(resumed)
    assert weights(whole) == weights(resumed)
    assert ["checkpoint-4"] == names(tmp_path)


class Failing(TrainerCallback):  # type: ignore[misc]
    """Ends the training before its third step."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if args[1].global_step == 2:
            raise ZeroDivisionError


def test_a_run_that_failed_goes_on_in_the_same_process(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the save that was under way, also if the disk is slow."""
    slow_renames(monkeypatch, 1)
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, kind=Background, callbacks=[Failing()])
    resumed = trained(tmp_path, kind=Background, resume=True, seed=2)
    assert (losses(whole), weights(whole)) == (losses(resumed), weights(resumed))


def test_a_checkpoint_is_hugging_faces_and_a_tag(whole: Any) -> None:
    """``from_pretrained`` reads each; the optimizer's state has the names of the parameters; all carries digests."""
    directory = Path(whole.args.output_dir)
    model = Tiny.from_pretrained(directory / "checkpoint-4")
    assert weights(whole) == [parameter.flatten().tolist() for parameter in model.parameters()]
    assert "optim/net.0.weight/exp_avg" in open_checkpoint(directory / "checkpoint-4").metadata
    assert names(directory) == [tag.tag for tag in list_checkpoints(directory)]
    for name in names(directory):
        assert ((), ()) == ((found := verify_checkpoint(directory / name)).problems, found.guests)
    assert not (directory / "checkpoint-4" / "optimizer.pt").exists()


def test_a_checkpoint_loads_its_model_and_optimizer(saved: Path) -> None:
    """Without the trainer, from a tag whose model is a file that the trainer wrote."""
    expected = Tiny.from_pretrained(saved)
    for by_path in (True, False):
        model = Tiny(TinyConfig())
        groups = [[each for each in model.parameters() if (each.dim() > 1) is decays] for decays in (True, False)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups])
        where, tag = (saved, None) if by_path else (saved.parent, saved.name)
        load_checkpoint(where, tag, model=model, optimizer=optimizer)
        for name, value in expected.state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
        assert [entries["step"].item() for entries in optimizer.state_dict()["state"].values()] == [2] * 4
    flip(saved / "model.safetensors", -1)
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        load_checkpoint(saved.parent, saved.name, model=Tiny(TinyConfig()))


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Callbacks that write a file of some name into each checkpoint as soon as transformers says that it was saved. The
    first checkpoint is not visible by then; the last one is."""
    written, publish = Event(), Staged.publish

    def late(publication: Staged, *args: Any) -> None:
        assert publication.tag == "checkpoint-4" or written.wait(60)
        publish(publication, *args)

    monkeypatch.setattr(Staged, "publish", late)

    class Adding(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            self.name = name

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / self.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"of step {state.global_step}")
            written.set()

    return Adding


def test_what_a_callback_adds_to_a_checkpoint_stays(tmp_path: Path, whole: Any, adding: Callable[[str], Any]) -> None:
    """Before it is visible, and later. It has no digest, and a resume does not mind it."""
    trained(tmp_path, kind=Background, callbacks=[adding("metrics/of.json")])
    for step in (2, 4):
        assert f"of step {step}" == (tmp_path / f"checkpoint-{step}" / "metrics/of.json").read_text()
        assert ("metrics/of.json",) == verify_checkpoint(tmp_path / f"checkpoint-{step}").guests
    resumed = trained(tmp_path, kind=Background, resume=str(tmp_path / "checkpoint-2"), seed=2)
    assert weights(whole) == weights(resumed)


def test_a_file_of_the_checkpoint_is_the_trainers(tmp_path: Path, adding: Callable[[str], Any]) -> None:
    """Whatever a callback wrote under its name before."""
    trained(tmp_path, kind=Background, callbacks=[adding("config.json")])
    assert not verify_checkpoint(tmp_path / "checkpoint-2").problems
    assert "tiny" in (tmp_path / "checkpoint-2/config.json").read_text()


@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_same_checkpoints_stay_as_without_it(limit: int, tmp_path: Path) -> None:
    """The newest and the best, of which the best is loaded at the end."""
    found = []
    options: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    for place, kind in [(tmp_path / "plain", transformers.Trainer), (tmp_path / "ours", Background)]:
        trainer = trained(place, kind=kind, save_steps=1, save_total_limit=limit, **options)
        best = Path(trainer.state.best_model_checkpoint)
        assert place == best.parent
        found.append((names(place), best.name, weights(trainer)))
    assert found[0] == found[1]


def test_a_run_of_transformers_own_checkpoints_goes_on(tmp_path: Path, whole: Any) -> None:
    """With those that follow as ours, also in place of its own. The limit counts all."""
    trained(tmp_path, kind=transformers.Trainer, max_steps=4, save_steps=1)
    resumed = trained(tmp_path, resume=str(tmp_path / "checkpoint-3"), seed=2, save_total_limit=2)
    assert weights(whole) == weights(resumed)
    assert ["checkpoint-3", "checkpoint-4"] == names(tmp_path)
    assert ["checkpoint-4"] == [tag.tag for tag in list_checkpoints(tmp_path) if tag.complete]
    assert ((), ()) == ((found := verify_checkpoint(tmp_path / "checkpoint-4")).problems, found.guests)


def test_the_newest_is_the_one_saved_last(tmp_path: Path) -> None:
    """Not that of the highest step, if the run went on from an earlier one: it is resumed, and the limit keeps it."""
    options: dict[str, Any] = {"save_steps": 1, "save_total_limit": 2}
    trained(tmp_path, max_steps=4, **options)
    trained(tmp_path, max_steps=2, save_steps=2, seed=3)
    assert ["checkpoint-2", "checkpoint-3", "checkpoint-4"] == names(tmp_path)
    resumed = trained(tmp_path, max_steps=3, resume=True, **options)
    assert [3] == [step for step in losses(resumed) if step > 2]
    assert ["checkpoint-2", "checkpoint-3"] == names(tmp_path)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [({"bf16": True}, IncompatibleState), ({"optim": "sgd"}, OptimizerMismatch)],
    ids=["precision", "optimizer"],
)
def test_another_run_is_refused(
    changed: dict[str, Any], kind: type[Exception], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than one that only looks like the same. The model is then as it was."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # transformers changes it
    made: list[Quick] = []

    class Noted(Quick):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    torch.manual_seed(5)
    before = [parameter.flatten().tolist() for parameter in Tiny(TinyConfig()).parameters()]
    with pytest.raises(kind, match="was saved with"):
        trained(tmp_path, kind=Noted, resume=str(saved), seed=5, **changed)
    assert before == weights(made[0])


def test_damaged_files_are_refused(saved: Path, tmp_path: Path) -> None:
    """Hugging Face's too: one that has changed, or is gone."""
    flip(saved / "model.safetensors", -1)
    with pytest.raises(DigestMismatch, match=r"model\.safetensors"):
        trained(tmp_path, resume=str(saved))
    (saved / "rng_state.pth").unlink()
    (saved / "model.safetensors").unlink()
    with pytest.raises(PartNotFound, match=r"rng_state\.pth is missing|model\.safetensors is missing"):
        trained(tmp_path, resume=str(saved))


@pytest.mark.parametrize("lost", ["done", "manifest.json"])
def test_a_tag_that_was_copied_in_part_is_refused(lost: str, saved: Path, tmp_path: Path) -> None:
    """The run does not begin with a new optimizer."""
    (saved / lost).unlink()
    with pytest.raises(CheckpointError, match=f"checkpoint-2.*{lost}"):
        trained(tmp_path, resume=str(saved))


class OwnFiles(transformers.Trainer):  # type: ignore[misc]
    """Writes files of its own at every second save, and calls transformers' method at the others."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step % 2:
            place = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            place.mkdir(parents=True, exist_ok=True)
            (place / "adapter.bin").write_bytes(b"weights")
        else:
            super()._save_checkpoint(model, trial)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_trainer_that_writes_its_own_files(asynchronous: bool, tmp_path: Path, whole: Any) -> None:
    """In place of transformers', as LLaVA's does: they are the checkpoint, with the tag, and the others are whole."""

    class Mine(Quick, OwnFiles):
        async_save = asynchronous

    trained(tmp_path, kind=Mine, save_steps=1)
    found = sorted(path.name for path in (tmp_path / "checkpoint-3").iterdir())
    assert "adapter.bin" in found
    assert not {"model.safetensors", "trainer_state.json"} & {*found}
    for name in names(tmp_path):
        assert ((), ()) == ((seen := verify_checkpoint(tmp_path / name)).problems, seen.guests)
    resumed = trained(tmp_path / "again", resume=str(tmp_path / "checkpoint-2"), seed=2)
    assert weights(whole) == weights(resumed)


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    """Whatever it is that has a checkpoint's name."""
    (tmp_path / "checkpoint-2").write_text("mine")
    with pytest.raises(InvalidArgument, match="checkpoint-2 is a file"):
        trained(tmp_path, max_steps=2)
    assert "mine" == (tmp_path / "checkpoint-2").read_text()


@pytest.mark.parametrize("url", ["s3://bucket/run", "s3:/bucket/run", "gs://bucket/run"])
def test_a_url_is_refused_at_once(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """As a place to save to, before a directory of that name is made, and as one to resume from."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments = transformers.TrainingArguments("run", use_cpu=True, report_to=[])
    arguments.output_dir = url
    for positional, named in [([arguments], {}), ([], {"args": arguments})]:
        with pytest.raises(InvalidArgument, match=r"is a URL.*copies them to the store"):
            Quick(Tiny(TinyConfig()), *positional, **named)
    assert before == sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidArgument, match="copies one back to resume from it"):
        trained(tmp_path, resume=url)


def test_a_url_of_the_local_file_system_is_a_directory(tmp_path: Path) -> None:
    """As everywhere in this package."""
    trained(f"file://{tmp_path}/run", max_steps=2)
    assert ["checkpoint-2"] == names(tmp_path / "run")


@pytest.mark.parametrize("kind", [Trainer, Quick])
def test_the_training_thread_syncs_no_file(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are synced before they are visible; none is with ``durable=False``."""
    synced: list[tuple[str, bool]] = []
    sync = os.fsync

    def noted(fd: int) -> None:
        synced.append((os.path.basename(os.readlink(f"/proc/self/fd/{fd}")), current_thread() is main_thread()))
        sync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    trained(tmp_path, kind=kind, max_steps=2)
    manifest = open_checkpoint(tmp_path / "checkpoint-2").manifest
    assert manifest is not None
    files = {*manifest.guests}
    assert {"model.safetensors", "trainer_state.json"} <= files
    assert (files if kind is Trainer else set()) == {name for name, _ in synced if name in files}
    assert not any(on_main for name, on_main in synced if name in files)


@pytest.mark.parametrize("kind", [Quick, Background])
def test_a_save_that_fails_leaves_nothing(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint is visible, and the run ends with what failed."""

    def create(self: LocalStorage, key: str, nbytes: int) -> Any:
        raise OSError(errno.ENOSPC, "no space left", key)

    monkeypatch.setattr(LocalStorage, "create", create)
    with pytest.raises(SaveFailed, match="no space left"):
        trained(tmp_path, kind=kind)
    assert [] == names(tmp_path)


def test_the_example_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """examples/train_transformers.py, twice."""
    for steps in ("2", "4"):
        main(["--directory", str(tmp_path), "--steps", steps])
    assert ["checkpoint-2", "checkpoint-4"] == names(tmp_path)
    assert "went on from step 2" in capsys.readouterr().out


def saving(directory: Path) -> Any:
    """Four steps, of which each is saved, and the last two stay."""
    return trained(directory, kind=Background, save_steps=1, save_total_limit=2)


def test_a_kill_in_the_first_save_leaves_an_empty_directory(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Scripts of transformers refuse one that has anything else than checkpoints. The next save removes what is left
    beside it."""
    changes = in_a_process(partial(saving, tmp_path_factory.mktemp("rehearsal")))
    assert -signal.SIGKILL == in_a_process(partial(saving, tmp_path), changes // 8)
    assert [] == [*tmp_path.iterdir()]
    trained(tmp_path, save_steps=2)
    assert ["checkpoint-2", "checkpoint-4"] == sorted(path.name for path in tmp_path.iterdir())
    assert not tmp_path.with_name(f".{tmp_path.name}.nxd_ckpt").exists()


def test_a_directory_that_is_not_empty_is_written_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is a mount, or a link: what is beside those may be on another disk."""
    monkeypatch.setattr(LocalStorage, "drop_empty", lambda storage, key: None)  # what a job leaves is seen then
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    for place in (tmp_path, tmp_path / "link"):
        trained(place, max_steps=2)
        assert (place / ".nxd_ckpt").is_dir()
        assert not place.with_name(f".{place.name}.nxd_ckpt").exists()
