"""Two jobs in one output directory: the second is refused before it touches anything of the first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from nxd_ckpt import save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.integrations.sealed import SealedDirectory, verify_files

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
    directory.wait(None)


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
        assert b"weights" == (root / ".incomplete" / "a-2" / "weights").read_bytes()
        assert not (tmp_path / "b-1.written").exists()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    save(root, "b-1", tmp_path, stop=False)
    close_checkpointers()
    verify_files(str(root / "b-1"), "state")
    assert not (root / ".incomplete" / "a-2").exists()
    if not first_save:
        verify_files(str(root / "a-1"), "state")
