"""At most so many ranks of a host write at the same time, and no dead or stuck one blocks the others for ever."""

import os
import signal
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.commit import session
from nxd_ckpt.commit.session import forget_slots, writing_slot
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import try_lock
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.protocol.job import Job
from tests.support.clock import Clock


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def note(log: Path, mark: str) -> None:
    """Append to a file that several processes share, at once."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, mark.encode())
    os.close(fd)


def saves_and_notes(rank: int, path: Path, log: Path, run_id: str, num_workers: int | None) -> None:
    """Rank of four, each with a file of its own; noted are the first and the last thing it does with that file.

    Nothing later can stand for the end: a rank that gave its slot back may not run again for long.
    """

    def hook(operation: Operation) -> None:
        if not operation.key.endswith("_pp_rank_00.pt"):
            return
        if operation.name == "create":
            note(log, "+")
            time.sleep(0.1)
        elif operation.name == "close":
            note(log, "-")

    topology = Topology(tp=4, rank=rank)
    storage = HookedStorage(LocalStorage(path), hook)
    with Checkpointer(path, topology=topology, storage=storage, run_id=run_id, timeout=600) as saver:
        saver.save("t", {"weight": torch.ones(3)}, num_workers=num_workers)


def most_at_once(log: Path) -> int:
    writing, most = 0, 0
    for mark in log.read_text():
        writing += 1 if mark == "+" else -1
        most = max(most, writing)
    assert 0 == writing
    return most


@pytest.mark.parametrize("num_workers", [1, 2])
def test_no_more_ranks_write_at_once_than_allowed(tmp_path: Path, run_id: str, num_workers: int) -> None:
    """``num_workers`` of a host's four ranks; all get their turn."""
    Job(4, saves_and_notes, tmp_path / "ckpt", tmp_path / "log", run_id, num_workers).values()
    assert 8 == len((tmp_path / "log").read_text())
    assert most_at_once(tmp_path / "log") <= num_workers


def holds(rank: int, run_id: str, log: Path) -> None:
    with writing_slot(run_id, 1, 5.0):
        note(log, "+")
        signal.pause()


def test_a_killed_holder_frees_its_slot(tmp_path: Path, run_id: str) -> None:
    """The kernel does; nobody has to notice."""
    job = Job(1, holds, run_id, tmp_path / "log")
    while not (tmp_path / "log").exists():
        time.sleep(0.01)
    waiting = threading.Event()

    def wait_for_it() -> None:
        with writing_slot(run_id, 1, 600.0):
            waiting.set()

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    blocked = not waiting.wait(0.2)
    job.kill_all()
    thread.join()
    forget_slots(run_id)
    assert blocked
    assert waiting.is_set()


def test_a_slot_that_is_held_stays_when_the_run_is_forgotten(run_id: str) -> None:
    """Of two jobs of one ``run_id``, or two ranks, the first that ends gives the others no more slots."""
    with writing_slot(run_id, 1, 5.0):
        forget_slots(run_id)
        with pytest.raises(TimeoutError), writing_slot(run_id, 1, 0.2):
            pass
    forget_slots(run_id)


def test_a_slot_that_was_removed_while_it_was_opened_counts_for_nothing(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file that nobody else finds excludes nobody: the slot is taken anew."""
    opened: list[Path] = []

    def removed_meanwhile(fd: int, path: Path) -> bool:
        if not opened:
            path.unlink()
        opened.append(path)
        return try_lock(fd, path)

    monkeypatch.setattr("nxd_ckpt.commit.session.try_lock", removed_meanwhile)
    with writing_slot(run_id, 1, 5.0), pytest.raises(TimeoutError), writing_slot(run_id, 1, 0.2):
        pass
    forget_slots(run_id)


def test_a_stuck_holder_is_given_up(run_id: str) -> None:
    """Whoever waits raises after the timeout; its vote then fails the save on all ranks."""
    with (
        writing_slot(run_id, 1, 5.0),
        pytest.raises(TimeoutError, match="made no progress for 0 s"),
        writing_slot(run_id, 1, 0.2),
    ):
        pass
    forget_slots(run_id)


def test_a_holder_that_moves_is_waited_for(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes."""
    clock, holder = Clock(), ExitStack()
    monkeypatch.setattr(session, "effects", clock)
    moved = holder.enter_context(writing_slot(run_id, 1, 5.0))

    def move() -> None:
        time.sleep(0.02)  # what the file system's own clock takes to tick
        moved()

    for number in range(1, 5):
        clock.at(0.9 * number, move)
    clock.at(4.5, holder.close)
    with writing_slot(run_id, 1, 1.0):
        pass
    forget_slots(run_id)
    assert clock.now >= 4.5


def test_without_a_limit_no_slot_is_taken(run_id: str) -> None:
    """``None`` takes no slot at all."""
    with writing_slot(run_id, None, 0.0) as one, writing_slot(run_id, None, 0.0) as other:
        one()
        other()
