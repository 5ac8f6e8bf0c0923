"""One job, one directory: ranks that do not mean the same one, and jobs that meet in one."""

import errno
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Tier, Topology
from nxd_ckpt.commit import session
from nxd_ckpt.coordination.control_files import LEASE, VOTES
from nxd_ckpt.errors import (
    CheckpointError,
    DirectoryInUse,
    DirectoryNotShared,
    DirectoryTakenOver,
    InvalidArgument,
    RanksDisagree,
    SaveFailed,
)
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation, failing
from tests.protocol.job import HANGS, Died, Job, Raised, outcome_of, until
from tests.protocol.states import PATIENCE, SHORT, checkpointer, save, saved_value, visible_tags


def second_saves(rank: int, path: Path) -> list[BaseException | None]:
    """Saves on which two ranks disagree, after a first on which they agree; then one more on which they do."""
    saver = checkpointer(path, rank, 2)
    save(saver, "first", 1)
    model = {"weight": torch.ones(3)}
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    calls = [
        partial(saver.save, ("left", "right")[rank], model),
        partial(saver.save, "xser", model, use_xser=rank == 1),
        partial(saver.save, "optimizer", model, optimizer if rank else None),
    ]
    errors = [outcome_of(call) for call in calls]
    save(saver, "last", 2)
    saver.close()
    return errors


def test_ranks_that_disagree_in_a_later_save_are_told(tmp_path: Path) -> None:
    """On the tag, the format, or what there is to save: RanksDisagree on all, naming the values; all goes on.

    A tag of an earlier step would be a save that one rank left out.
    """
    for errors in Job(2, second_saves, tmp_path, group=True).values():
        assert [RanksDisagree] * 3 == [type(error) for error in errors]
        assert "'left'" in str(errors[0])
        assert "'right'" in str(errors[0])
    assert ["first", "last"] == visible_tags(tmp_path)
    assert 2 == saved_value(tmp_path, None, 2)


class Elsewhere(LocalStorage):
    """A directory that has the same name on every host, and is another one on each."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path / str(rank))
        self.url = str(path)


def saves_elsewhere(rank: int, path: Path, same_name: bool) -> BaseException | None:
    storage = Elsewhere(path, rank) if same_name else None
    topology = Topology(dp=2, rank=rank)
    session._SEEN_WITHIN = 2.0
    saver = Checkpointer(path / str(rank), topology=topology, storage=storage)
    error = outcome_of(lambda: saver.save("t", {"weight": torch.ones(3)}))
    saver.close()
    return error


@pytest.mark.parametrize("same_name", [True, False])
def test_a_directory_that_is_not_shared_is_refused(tmp_path: Path, same_name: bool) -> None:
    """Paths that differ, or one path on disks of their own: said on all ranks, before any data are written."""
    errors = Job(2, saves_elsewhere, tmp_path, same_name, group=True).values()
    assert [DirectoryNotShared] * 2 == [type(error) for error in errors]
    assert "rank 1 does not see" in str(errors[1])
    assert [] == list(tmp_path.rglob("*.pt"))
    assert [] == list(tmp_path.rglob("lease.json"))


def saves_until_told(rank: int, path: Path, stop: Path) -> None:
    saver = checkpointer(path, rank, 2)
    save(saver, "first", 1)
    (stop.parent / f"saved_{rank}").touch()
    until(stop.exists)
    save(saver, "second", 2)
    saver.close()


def comes_second(rank: int, path: Path) -> list[Any]:
    """An evaluation; then jobs that are going to save, at each of their first calls."""
    outcomes: list[Any] = [checkpointer(path, rank, 2).load(None, {})["value"]]
    loaded: dict[str, Any] = {}

    def enter() -> None:
        with checkpointer(path, rank, 2, preemption=True):
            raise AssertionError("the training began")

    for call in (
        enter,
        lambda: checkpointer(path, rank, 2, num_kept_ckpts=1).load_latest(loaded),
        lambda: save(checkpointer(path, rank, 2, on_save_failure="warn"), "other", 3),
    ):
        outcomes.append(outcome_of(call))
    return [*outcomes, len(loaded)]


def started(folder: Path) -> Job:
    """A job of two ranks that has saved once and goes on until ``stop`` exists."""
    job = Job(2, saves_until_told, folder / "ckpt", folder / "stop", group=True)
    until(lambda: all((folder / f"saved_{rank}").exists() for rank in range(2)))
    return job


def test_a_second_live_job_is_refused(tmp_path: Path) -> None:
    """On all its ranks, before it loads, with nothing touched, also if failed saves are tolerated; the first job never
    notices. One that only loads is not refused."""
    first = started(tmp_path)
    both = Job(2, comes_second, tmp_path / "ckpt", group=True).values()
    (tmp_path / "stop").touch()
    first.values()
    for value, *errors, loaded in both:
        assert (1, 0) == (value, loaded)
        assert [DirectoryInUse] * 3 == [type(error) for error in errors]
        assert "pid" in str(errors[0])
        assert "make it without preemption=" in str(errors[0])
    assert ["first", "second"] == visible_tags(tmp_path / "ckpt")


ABROAD = {"run_id": "abroad", "host": "another/boot/namespace", "pid": 1, "born": "1"}


def lease_of_another_host(path: Path) -> None:
    LocalStorage(path).write(LEASE, json.dumps(ABROAD).encode())


def test_a_job_whose_directory_was_taken_over_stops_publishing(tmp_path: Path) -> None:
    """It was silent for too long, and is back: it neither publishes nor takes the new holder's lease away."""
    take_over, looked = threading.Event(), threading.Semaphore(0)

    def look(operation: Operation) -> None:
        if operation == Operation("read", LEASE) and threading.current_thread().name == "nxd_ckpt-lease":
            if take_over.is_set():
                take_over.clear()
                lease_of_another_host(tmp_path)
            looked.release()

    storage = HookedStorage(LocalStorage(tmp_path), look)
    with Checkpointer(tmp_path, storage=storage, timeout=0.6, on_save_failure="warn") as saver:
        saver.save("first", {"weight": torch.ones(3)})
        take_over.set()
        while take_over.is_set():
            assert looked.acquire(timeout=HANGS)
        error = outcome_of(lambda: saver.save("second", {"weight": torch.ones(3)}))
        for _ in range(2):  # beats after the take-over
            assert looked.acquire(timeout=HANGS)
    assert DirectoryTakenOver is type(error), "no tolerated failure: no later save could succeed"
    assert "abroad" in str(error)
    assert ["first"] == visible_tags(tmp_path)
    assert "abroad" == json.loads((tmp_path / ".nxd_ckpt" / "lease.json").read_bytes())["run_id"]


def saves_as_run(rank: int, path: Path, run_id: str | None, timeout: float = PATIENCE) -> BaseException | None:
    saver = checkpointer(path, rank, 3, run_id=run_id, timeout=timeout)

    def both() -> None:
        save(saver, f"tag_{run_id}", 1, async_save=True)
        save(saver, f"again_{run_id}", 2)
        saver.close()

    return outcome_of(both)


def test_a_run_id_stands_for_a_process_group(tmp_path: Path) -> None:
    """Processes that know nothing of each other save together; a second launch takes a new one."""
    assert [None] * 3 == Job(3, saves_as_run, tmp_path, "launch-1").values()
    assert [None] * 3 == Job(3, saves_as_run, tmp_path, "launch-2").values()
    assert ["tag_launch-1", "again_launch-1", "tag_launch-2", "again_launch-2"] == visible_tags(tmp_path)
    assert (1, 2) == (saved_value(tmp_path, "tag_launch-1", 3), saved_value(tmp_path, None, 3))


def test_a_run_id_is_used_once(tmp_path: Path) -> None:
    """A later launch under the same one is refused on all ranks: it could take the earlier one's votes for its."""
    assert [None] * 3 == Job(3, saves_as_run, tmp_path, "same").values()
    errors = Job(3, saves_as_run, tmp_path, "same", SHORT).values()
    assert [InvalidArgument] * 3 == [type(error) for error in errors]
    for error in errors:
        assert "'same'" in str(error)


def killed_in_its_first_save(rank: int, path: Path) -> None:
    saver = checkpointer(path, rank, 3, run_id="same")
    save(saver, "first", 1)
    signal.pause()


def test_a_run_id_of_a_job_that_was_killed_is_used_up_too(tmp_path: Path) -> None:
    """A requeued job that forgets to change it is told so on every rank, in time."""
    job = Job(3, killed_in_its_first_save, tmp_path)
    until(lambda: visible_tags(tmp_path) == ["first"])
    job.kill_all()
    errors = Job(3, saves_as_run, tmp_path, "same", SHORT).values()
    assert [InvalidArgument] * 3 == [type(error) for error in errors]
    assert ["first"] == visible_tags(tmp_path)


def saves_after_a_killed_job(rank: int, path: Path, dies: bool) -> BaseException | None:
    full = failing("close", "*/manifest.json", OSError(errno.ENOSPC, "No space left on device"))
    saver = checkpointer(path, rank, 2, full if rank == 0 and not dies else None, run_id="same")
    outcome = outcome_of(lambda: save(saver, "first" if dies else "second", 1))
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome


def test_votes_of_a_dead_job_under_the_same_run_id_count_for_nothing(tmp_path: Path) -> None:
    """In a process group a run_id may come again: no rank takes the earlier job's verdict for its own."""
    assert [Died, Died] == [
        type(outcome) for outcome in Job(2, saves_after_a_killed_job, tmp_path, True, group=True).outcomes()
    ]
    errors = Job(2, saves_after_a_killed_job, tmp_path, False, group=True).values()
    assert [SaveFailed, SaveFailed] == [type(error) for error in errors]
    assert ["first"] == visible_tags(tmp_path)


def learns_late(rank: int, path: Path, others_saved: Path, closed: Path) -> str:
    """Rank 1 does not look for the verdict before a later job has saved over the tag."""

    def late(operation: Operation) -> None:
        if rank == 1 and operation.name == "list" and operation.key.endswith("/verdict") and (path / "t/done").exists():
            until(others_saved.exists)

    with checkpointer(path, rank, 2, late, run_id="first", timeout=60.0) as saver:
        save(saver, "t", 1)
    if rank == 0:
        closed.touch()
    return "saved"


def test_a_rank_that_is_slow_to_learn_the_verdict_learns_it_from_beside_the_next_job(tmp_path: Path) -> None:
    """Rank 0 closes without waiting for it, and another job replaces the tag: it still was saved, on all ranks."""
    path, others_saved, closed = tmp_path / "ckpt", tmp_path / "others_saved", tmp_path / "closed"
    job = Job(2, learns_late, path, others_saved, closed)
    until(closed.exists)
    with checkpointer(path, 0, 1) as saver:
        save(saver, "t", 2)
    others_saved.touch()
    assert ["saved", "saved"] == job.values()
    assert 2 == saved_value(path, "t", 1)
    for _ in range(2):
        with checkpointer(path, 0, 1) as saver:
            save(saver, "u", 3)
    assert not [entry.name for entry in LocalStorage(path).list(VOTES) if entry.name.startswith("first-")]


def test_several_ranks_need_a_group_or_a_run_id(tmp_path: Path) -> None:
    """Without either the message names both, on every rank."""
    errors = Job(3, saves_as_run, tmp_path, None).values()
    assert [InvalidArgument] * 3 == [type(error) for error in errors]
    assert "torch.distributed" in str(errors[1])
    assert "run_id=" in str(errors[1])


def first_save_without_rank_0(rank: int, path: Path, joined: Path) -> BaseException | None:
    """Rank 0, whose process holds the group's store, ends before the others' first save."""
    if rank == 0:
        until(joined.exists)  # the other still reads the store while it joins the group
        os._exit(0)
    joined.touch()
    time.sleep(0.3)
    return outcome_of(lambda: save(checkpointer(path, rank, 2), "other", 3))


def test_a_first_save_without_rank_0_names_it(tmp_path: Path) -> None:
    """The others get an error of ours that names rank 0, though it is gone with its store."""
    job = Job(2, first_save_without_rank_0, tmp_path / "ckpt", tmp_path / "joined", group=True)
    error = job.outcomes()[1]
    error = error.error if isinstance(error, Raised) else error
    assert isinstance(error, CheckpointError), error
    assert "rank 0" in str(error)


@pytest.mark.parametrize("used", [False, True], ids=["an empty directory", "a directory with tags"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_link_that_leads_elsewhere_meanwhile_splits_no_run(tmp_path: Path, asynchronous: bool, used: bool) -> None:
    """No later save goes to the other directory; back at its place the job goes on. The last save says it, too."""
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
    if used:
        save(other := checkpointer(tmp_path / "other", 0, 1), "theirs", 7)
        other.close()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "first")
    saver = checkpointer(link, 0, 1)
    save(saver, "1", 1)
    before = sorted(tmp_path.joinpath("other").rglob("*"))

    def lead_to(name: str) -> None:
        link.unlink()
        link.symlink_to(tmp_path / name)

    lead_to("other")
    with pytest.raises(SaveFailed, match="is not the directory that this job began with"):
        saver.save("2", {"weight": torch.full((3,), 2.0)}, async_save=asynchronous).wait()
    assert before == sorted(tmp_path.joinpath("other").rglob("*"))
    lead_to("first")
    save(saver, "3", 3)
    saver.close()
    assert ["1", "3"] == visible_tags(tmp_path / "first")
    assert (["theirs"] if used else []) == visible_tags(tmp_path / "other")


def test_a_tier_whose_link_leads_elsewhere_gets_no_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so, and the job goes on."""
    for name in ("near", "first", "other"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "first")
    saver = Checkpointer(tmp_path / "near", tiers=[Tier(tmp_path / "near"), Tier(link)])
    saver.save("1", {"weight": torch.ones(3)})
    saver.wait(1)
    link.unlink()
    link.symlink_to(tmp_path / "other")
    saver.save("2", {"weight": torch.ones(3)})
    saver.close()
    assert "2 was not copied to tier" in caplog.text
    assert [] == list(tmp_path.joinpath("other").rglob("*"))
    assert ["1", "2"] == sorted(visible_tags(tmp_path / "near"))
