"""``on_save_failure="warn"``: training goes on after a failed save, but not after too many in a row."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, save_checkpoint
from nxd_ckpt.errors import InvalidArgument, SaveFailed, StorageError
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.protocol.job import Job, outcome_of
from tests.protocol.states import checkpointer, save, visible_tags

STATE = {"weight": torch.ones(3)}


class Disk:
    """A hook: files of the model cannot be made while it is full, nothing at all while it is gone."""

    def __init__(self) -> None:
        self.full = self.gone = False

    def __call__(self, operation: Operation) -> None:
        if self.gone or (self.full and operation.name == "create" and "/model/" in operation.key):
            raise OSError(28, "No space left on device")


def warning(path: Path, **options: Any) -> tuple[Disk, Checkpointer]:
    disk = Disk()
    storage = HookedStorage(LocalStorage(path, durable=False), disk)
    return disk, Checkpointer(path, storage=storage, on_save_failure="warn", **options)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_is_warned_of(tmp_path: Path, async_save: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised, then or at the end. Who asks the save itself is told, and the count begins anew."""
    disk, saver = warning(tmp_path)
    counts = []
    with saver, caplog.at_level(logging.WARNING, "nxd_ckpt"):
        for tag, disk.full in (("a", False), ("b", True), ("c", False), ("d", True), ("e", True)):
            pending = saver.save(tag, STATE, async_save=async_save)
            saver.wait()
            counts.append((saver.failed_in_a_row, type(pending.error)))
    assert [(0, type(None)), (1, SaveFailed), (0, type(None)), (1, SaveFailed), (2, SaveFailed)] == counts
    assert ["a", "c"] == visible_tags(tmp_path)
    assert [logging.WARNING] * 3 == [record.levelno for record in caplog.records]
    assert "(2 in a row; the 3. is raised): SaveFailed: save of 'e' failed: rank 0 failed: " in caplog.messages[-1]
    with pytest.raises(SaveFailed):
        pending.result()


def test_too_many_in_a_row_are_an_error(tmp_path: Path) -> None:
    """The last of them is raised by its own call, or if it was async by the next; so is each that follows."""
    disk, saver = warning(tmp_path, max_failed_saves=2)
    saver.save("a", STATE)
    disk.full = True
    saver.save("b", STATE)
    with pytest.raises(SaveFailed, match="'c'"):
        saver.save("c", STATE)
    saver.save("d", STATE, async_save=True)
    with pytest.raises(SaveFailed, match="'d'"):
        saver.save("e", STATE, async_save=True)
    saver.save("f", STATE, async_save=True)
    with pytest.raises(SaveFailed, match="'f'"):
        saver.wait()
    disk.full = False
    saver.save("g", STATE)
    disk.full = True
    saver.save("h", STATE)
    saver.close()
    assert ["a", "g"] == visible_tags(tmp_path)


def test_the_first_save_may_fail_too(tmp_path: Path) -> None:
    """Where the directory cannot be claimed; the next save tries again."""
    disk, saver = warning(tmp_path, max_failed_saves=2)
    disk.gone = True
    assert isinstance(saver.save("a", STATE).error, StorageError)
    with pytest.raises(StorageError, match="No space left"):
        saver.save("b", STATE)
    disk.gone = False
    assert saver.save("c", STATE).done()
    saver.close()
    assert ["c"] == visible_tags(tmp_path)


def test_what_cannot_be_saved_counts_as_any_failure(tmp_path: Path) -> None:
    """The state, or an option, on one rank fails the save on all: so none may treat it otherwise."""
    with Checkpointer(tmp_path, on_save_failure="warn", max_failed_saves=3, durable=False) as saver:
        saver.save("a", STATE)
        assert isinstance(saver.save("b", STATE, user_content=object()).error, SaveFailed)
        assert isinstance(saver.save("c", STATE, num_kept_ckpts=0).error, SaveFailed)
        with pytest.raises(SaveFailed, match="UnsafePickle"):
            saver.save("d", STATE, user_content=object())
    assert ["a"] == visible_tags(tmp_path)


def saves_on_a_disk_that_fills(rank: int, path: Path) -> list[str]:
    """What each of five saves raises; from the second on rank 1's disk is full."""
    disk = Disk()
    saver = checkpointer(path, rank, 2, disk, on_save_failure="warn", max_failed_saves=3)
    told = []
    for number in range(5):
        disk.full = rank == 1 and 1 <= number < 4
        error = outcome_of(partial(save, saver, f"step_{number}", number))
        told.append(f"{type(error).__name__} {saver.failed_in_a_row}")
    saver.close()
    return told


def test_all_ranks_go_on_together(tmp_path: Path) -> None:
    """The rank that failed warns as the others do, and all raise at the same save."""
    told = ["NoneType 0", "NoneType 1", "NoneType 2", "SaveFailed 3", "NoneType 0"]
    assert [told, told] == Job(2, saves_on_a_disk_that_fills, tmp_path, group=True).values()
    assert ["step_0", "step_4"] == visible_tags(tmp_path)


@pytest.mark.parametrize(
    "options", [{"on_save_failure": "ignore"}, {"on_save_failure": True}, {"max_failed_saves": 0}], ids=str
)
def test_what_is_no_policy_is_refused(tmp_path: Path, options: Any) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        save_checkpoint(tmp_path / "run", "t", STATE, **options)
    assert not (tmp_path / "run").exists()
