"""``nxd-ckpt watch``: saves in flight, and what becomes of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, close_checkpointers, finalize_checkpoint, save_checkpoint
from nxd_ckpt.cli import directory_commands
from nxd_ckpt.cli.main import main
from tests.cli.conftest import Run


def _save_as(directory: Path, tag: str, rank: int) -> None:
    """One rank's part of a save of two, in the background."""
    at = Topology(dp=2, rank=rank)
    save_checkpoint(directory, tag, {"w": torch.ones(1024)}, topology=at, run_id="run", async_save=True)


def _in_flight(directory: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What is seen once rank 0 has written its part."""
    while True:
        capsys.readouterr()
        assert 0 == main(["watch", str(directory), "--once", "--json"])
        saves: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["saves"]
        if saves and saves[0]["ranks_done"] == 1:
            return saves


def test_a_save_is_seen_until_it_is_a_tag(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rank 1 has not written yet; then the tag appears, and is replaced under its name; another one is removed.
    The last look is interrupted."""
    save_checkpoint(tmp_path, "before", {"w": torch.ones(4)})
    close_checkpointers()
    _save_as(tmp_path, "t", 0)
    (save,) = _in_flight(tmp_path, capsys)
    assert ("t", 1, False) == (save["tag"], save["ranks_done"], save["is_dead"])
    assert save["nbytes"] > 4096
    assert "t: is being saved: 1 rank done, " in run("watch", tmp_path, "--once").out

    def finish() -> None:
        _save_as(tmp_path, "t", 1)
        finalize_checkpoint()
        close_checkpointers()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def replace() -> None:
        save_checkpoint(tmp_path, "t", {"w": torch.ones(8)})
        close_checkpointers()

    steps = iter([finish, replace, lambda: shutil.rmtree(tmp_path / "before"), interrupt])
    monkeypatch.setattr(directory_commands, "sleep", lambda seconds: next(steps)())
    outcome = run("watch", tmp_path)
    first, saving, complete, replaced, removed = outcome.out.splitlines()
    assert 130 == outcome.code
    assert f"{tmp_path}: 1 complete tag, the latest is before" == first
    assert saving.startswith("t: is being saved")
    assert "t: complete, " in complete
    assert complete.endswith(" of dp=2")
    assert "t: complete, " in replaced
    assert replaced.endswith(" of 1 rank")
    assert "before: removed" in removed


def test_a_dead_jobs_save_is_told_from_a_live_one(tmp_path: Path, run: Run) -> None:
    """What a killed process of this host left is not in flight any more; nothing in flight is said, too."""
    save_checkpoint(tmp_path, "t", {"w": torch.ones(4)})
    close_checkpointers()
    assert "no save is in flight" in run("watch", tmp_path, "--once").out
    (tmp_path / ".nxd_ckpt" / "staging" / "gone-3" / "model").mkdir(parents=True)
    assert "attempt gone-3: its save failed: the process is gone" in run("watch", tmp_path, "--once").out


def test_the_first_save_is_waited_for(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory that does not exist yet; who looks once is told that there is none."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    def save() -> None:
        save_checkpoint(tmp_path / "run", "t", {"w": torch.ones(4)})
        close_checkpointers()

    steps = iter([save, interrupt])
    monkeypatch.setattr(directory_commands, "sleep", lambda seconds: next(steps)())
    assert "does not exist" in run("watch", tmp_path / "run", "--once").err
    first, complete = run("watch", tmp_path / "run").out.splitlines()
    assert "waiting for the first save" in first
    assert "t: complete, " in complete


def test_a_dead_jobs_replacement_is_left_as_it_is(tmp_path: Path, run: Run) -> None:
    """It is not for who only looks to finish or undo it; a list does, as every load."""
    save_checkpoint(tmp_path, "t", {"w": torch.ones(4)})
    close_checkpointers()
    journal = tmp_path / ".nxd_ckpt" / "journal.json"
    journal.parent.mkdir()
    journal.write_text('{"attempt": "gone-3", "tag": "t"}')
    assert "1 complete tag, the latest is t" in run("watch", tmp_path, "--once").out
    assert journal.exists()
    assert 0 == run("list", tmp_path).code
    assert not journal.exists()


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "1e12"])
def test_an_interval_is_one_that_can_be_waited(
    tmp_path: Path, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path), f"--interval={seconds}"])
    assert "--interval must be from 0 to 86400 seconds" in capsys.readouterr().err
