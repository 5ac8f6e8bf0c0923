"""Two jobs in one output directory: the second is refused before it touches anything of the first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.coordination.agreement import SingleProcessAgreement
from nxd_ckpt.errors import CorruptCheckpoint, DigestMismatch, DirectoryInUse, PartLost, SaveFailed
from nxd_ckpt.integrations.sealed import SealedDirectory, verify_files
from nxd_ckpt.integrations.written_files import WrittenFiles
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations import accelerate_run, transformers_run

pytestmark = [pytest.mark.plain, pytest.mark.once]


def save(root: Path, name: str, marks: Path, *, stop: bool) -> None:
    """A save of a job with files and a tag; with ``stop`` it waits for ever once its files are written."""
    directory = SealedDirectory(str(root), name)
    directory.begin()
    (Path(directory.staged) / "weights").write_bytes(b"weights")
    (marks / f"{name}.written").touch()
    while stop:
        time.sleep(0.01)
    with directory.publishing(True) as saves:
        saves.append(save_checkpoint(directory.tags, "state", {"w": torch.ones(2)}))
    directory.wait(SingleProcessAgreement())


def job(root: Path, name: str, marks: Path) -> int:
    """Another process that makes a whole save, and then writes the files of the next one and stands still."""
    pid = os.fork()
    if pid == 0:
        try:
            save(root, f"{name}-1", marks, stop=False)
            save(root, f"{name}-2", marks, stop=True)
        finally:
            os._exit(1)
    return pid


def await_mark(path: Path, pid: int) -> None:
    deadline = time.monotonic() + 600
    while not path.exists():
        assert (0, 0) == os.waitpid(pid, os.WNOHANG)
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("first_save", [True, False], ids=["before the first tag", "later"])
def test_a_second_job_is_refused_before_it_touches_anything(tmp_path: Path, first_save: bool) -> None:
    """Until the first one is dead: then it finishes what that left, and saves."""
    root = tmp_path / "out"
    pid = os.fork() if first_save else job(root, "a", tmp_path)
    if pid == 0:
        try:
            save(root, "a-2", tmp_path, stop=True)
        finally:
            os._exit(1)
    try:
        await_mark(tmp_path / "a-2.written", pid)
        with pytest.raises(DirectoryInUse, match="give each an output directory of its own"):
            save(root, "b-1", tmp_path, stop=False)
        [weights] = root.glob(".incomplete/*/a-2/weights")
        assert b"weights" == weights.read_bytes()
        assert not (tmp_path / "b-1.written").exists()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    save(root, "b-1", tmp_path, stop=False)
    close_checkpointers()
    verify_files(str(root / "b-1"), "state")
    assert not weights.exists()
    if not first_save:
        verify_files(str(root / "a-1"), "state")


def written(root: Path, name: str) -> SealedDirectory:
    """A save whose library has written its files."""
    directory = SealedDirectory(str(root), name)
    directory.begin()
    (Path(directory.staged) / "sub").mkdir()
    for file in ("weights", "sub/scheduler"):
        (Path(directory.staged) / file).write_bytes(file.encode())
    directory.record()
    return directory


def finish(directory: SealedDirectory) -> None:
    with directory.publishing(True) as saves:
        saves.append(save_checkpoint(directory.tags, "state", {"w": torch.ones(2)}))
    directory.wait(SingleProcessAgreement())


CHANGES: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "sub/scheduler vanished": (lambda root: (root / "sub/scheduler").unlink(), PartLost),
    "sub vanished": (lambda root: shutil.rmtree(root / "sub"), PartLost),
    "sub/other appeared": (lambda root: (root / "sub/other").write_bytes(b"x"), CorruptCheckpoint),
    "weights changed": (lambda root: (root / "weights").write_bytes(b"WEIGHTS"), DigestMismatch),
    "sub/scheduler was replaced": (lambda root: replaced(root / "sub/scheduler"), DigestMismatch),
}


def replaced(path: Path) -> None:
    """By a file of the same size and time."""
    other = path.with_name("new")
    other.write_bytes(path.read_bytes().swapcase())
    shutil.copystat(path, other)
    other.rename(path)


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_is_not_what_was_written_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Between the library's writing and the seal; nothing becomes visible, and the next save works."""
    directory = written(tmp_path, "one")
    CHANGES[name][0](Path(directory.staged))
    with pytest.raises(SaveFailed, match=name.partition(" ")[0]):
        finish(directory)
    assert not (tmp_path / "one").exists()
    finish(written(tmp_path, "one"))
    close_checkpointers()
    verify_files(str(tmp_path / "one"), "state")


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_changes_after_it_was_sealed_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While tags are saved, before the directory becomes visible."""
    seal = WrittenFiles.seal

    def disturbed(files: WrittenFiles) -> dict[str, list[int]]:
        digests = seal(files)
        CHANGES[name][0](Path(directory.staged))
        return digests

    directory = written(tmp_path, "one")
    monkeypatch.setattr(WrittenFiles, "seal", disturbed)
    with pytest.raises(SaveFailed, match=name.partition(" ")[0]):
        finish(directory)
    assert not (tmp_path / "one").exists()
    close_checkpointers()


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sealed")
    finish(written(root, "one"))
    close_checkpointers()
    return root / "one"


@pytest.mark.parametrize("name", [*CHANGES, "state/optim/other appeared"])
def test_verifying_compares_both_ways(name: str, sealed: Path, tmp_path: Path) -> None:
    """A missing, an added and a changed file are each said by name, by a resume and by the command."""
    one = shutil.copytree(sealed, tmp_path / "one")
    assert () == verify_checkpoint(one, "state").problems
    if name in CHANGES:
        CHANGES[name][0](one)
        with pytest.raises(CHANGES[name][1], match=name.partition(" ")[0]):
            verify_files(str(one), "state")
    else:
        (one / "state/optim").mkdir()
        (one / "state/optim/other").touch()
    [problem] = verify_checkpoint(one, "state").problems
    assert name.partition(" ")[0] in problem


def test_every_difference_is_said(sealed: Path, tmp_path: Path) -> None:
    """At once; files that callbacks add, hidden ones and statistics are none."""
    one = shutil.copytree(sealed, tmp_path / "one")
    (one / ".DS_Store").touch()
    (one / "metrics.json").touch()
    verify_files(str(one), "state", ["metrics.json"])
    (one / "weights").unlink()
    with pytest.raises(PartLost, match=r"weights was saved.*metrics\.json was not saved"):
        verify_files(str(one), "state")
    (one / "digests.json").write_text("{")
    assert 1 == len(verify_checkpoint(one, "state").problems)


def test_a_seal_of_an_older_version_verifies(sealed: Path, tmp_path: Path) -> None:
    """It does not name its tags."""
    one = shutil.copytree(sealed, tmp_path / "one")
    seal = json.loads((one / "digests.json").read_text())
    (one / "digests.json").write_text(json.dumps({name: seal[name] for name in seal if "manifest" not in name}))
    verify_files(str(one), "state")
    assert () == verify_checkpoint(one, "state").problems


@pytest.mark.parametrize("at", ["before the tag is saved", "before old ones are removed"])
def test_a_job_that_was_taken_over_changes_nothing(at: str, tmp_path: Path) -> None:
    """It stood still until another host's job took it for dead; that one may have ended since."""
    for number in range(3):
        finish(written(tmp_path, f"checkpoint-{number}"))
    directory = written(tmp_path, "checkpoint-3")
    file = tmp_path / ".incomplete/tags/.nxd_ckpt/output/.nxd_ckpt/lease.json"

    def taken_over() -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), "run_id": "another", "host": "another"}))

    def retire() -> None:
        taken_over()
        directory.retire(r"checkpoint-(\d+)", "model", 1)

    if at == "before the tag is saved":
        taken_over()
    with directory.publishing(True) as saves:
        saves.append(save_checkpoint(directory.tags, "state", {"w": torch.ones(2)}))
    with pytest.raises(DirectoryInUse, match="taken over by run another"):
        directory.wait(SingleProcessAgreement(), retire)
    close_checkpointers()
    assert all((tmp_path / f"checkpoint-{number}").exists() for number in range(3))
    assert (tmp_path / "checkpoint-3").exists() == (at != "before the tag is saved")


TRAINERS = {
    "transformers": ("rng_state.pth", "trainer_state.json", "model.safetensors"),
    "accelerate": ("random_states_0.pkl", "scheduler.bin"),
}


def train(trainer: str, root: Path, then: Callable[[], object], first: int = 0) -> None:
    """Two saves of a real trainer; ``then`` is called in each, when its files are written and no tag is saved yet.
    accelerate numbers them from ``first`` on."""
    publishing = SealedDirectory.publishing

    def disturbed(directory: SealedDirectory, is_rank_0: bool) -> Any:
        then()
        return publishing(directory, is_rank_0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SealedDirectory, "publishing", disturbed)
        if trainer == "transformers":
            transformers_run.trained(root)
        else:
            job = accelerate_run.Job(root)
            job.accelerator.project_configuration.iteration = first
            job.run(2)


def checkpoints(root: Path) -> list[Path]:
    return [path for path in [*root.glob("checkpoint*-*"), *root.glob("checkpoints/*")] if path.is_dir()]


@pytest.mark.parametrize(("trainer", "file"), [(trainer, file) for trainer in TRAINERS for file in TRAINERS[trainer]])
def test_a_file_of_a_trainer_that_vanishes_is_missed(trainer: str, file: str, tmp_path: Path) -> None:
    """By name, and nothing becomes visible."""

    def remove() -> None:
        for path in [*tmp_path.glob(f".incomplete/*/*/{file}"), *tmp_path.parent.glob(f".*.incomplete/*/*/{file}")]:
            path.unlink()

    with pytest.raises(SaveFailed, match=f"{file} vanished"):
        train(trainer, tmp_path, remove)
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_second_trainer_is_refused_while_the_first_one_saves(trainer: str, tmp_path: Path) -> None:
    """Before its first tag and later; what the first one saved is whole, and goes on."""
    root = tmp_path / "run"

    def second() -> None:
        pid = os.fork()
        if pid == 0:
            try:
                train(trainer, root, lambda: None, first=5)
            except DirectoryInUse:
                os._exit(7)
            finally:
                os._exit(1)
        assert 7 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    train(trainer, root, second)
    assert 2 == len(checkpoints(root))
    for directory in checkpoints(root):
        verify_files(str(directory), "training_state")
        assert () == verify_checkpoint(directory, "training_state").problems
    assert [] == [*root.parent.glob("*incomplete/attempt-*"), *root.glob(".incomplete/attempt-*")]


def test_each_attempt_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """What one that failed has left is removed by the next."""
    staged = [written(tmp_path, "one").staged for _ in range(2)]
    assert [False, True] == [os.path.exists(path) for path in staged]
    finish(written(tmp_path, "one"))
    close_checkpointers()
    assert not [path for path in os.listdir(tmp_path / ".incomplete") if path.startswith("attempt-")]
