"""A store without renames: two jobs that meet in it, and ranks that do not agree, come late or are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from nxd_ckpt.errors import DirectoryInUse, SaveFailed
from nxd_ckpt.testing.storage import MemoryStorage
from tests.protocol.job import HANGS
from tests.protocol.states import PATIENCE, lose_patience
from tests.protocol.stores import Moment, Process, before, bury, strays, values

pytestmark = [pytest.mark.plain, pytest.mark.once]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns; all run at once."""
    results: dict[int, Any] = {}

    def run(number: int, call: Callable[[], Any]) -> None:
        results[number] = call()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
    return [results[number] for number in range(len(calls))]


def ranks(store: MemoryStorage, run: str, timeout: float = PATIENCE) -> list[Process]:
    """The two ranks of a job that has saved "first"."""
    processes = [Process(store, rank, 2, run, timeout=timeout) for rank in range(2)]
    assert [None, None] == save_all(processes, "first", 1)
    return processes


def save_all(processes: Sequence[Process], tag: str, value: int, **options: Any) -> list[Any]:
    return together(*(lambda process=process: process.save(tag, value, **options) for process in processes))


def end_all(processes: Sequence[Process]) -> None:
    together(*(process.end for process in processes))


def test_a_second_live_job_is_refused() -> None:
    """It says who is there, and writes nothing; the first one goes on."""
    store = MemoryStorage()
    first = ranks(store, "one")
    before_it = store.keys
    refused = Process(store, run="two")
    error = refused.save("second", 2)
    assert DirectoryInUse is type(error)
    assert "run one" in str(error)
    assert {*store.keys} <= {*before_it}  # the first may still tidy up
    assert [None, None] == save_all(first, "second", 3)
    end_all([refused, *first])
    assert {"first": 1, "second": 3} == values(store, 2)


SUSPENDED: list[tuple[str, Moment]] = [
    ("its intent", before("link_new", "t/checkpoint")),
    ("its data", before("create", ".pt")),
    ("the end of its data", before("close", ".pt")),
    ("its index", before("link_new", ".json")),
    ("its manifest", before("link_new", "manifest.json")),
    ("its done", before("link_new", "t/done")),
]


@pytest.mark.parametrize("moment", [moment for _, moment in SUSPENDED], ids=[name for name, _ in SUSPENDED])
@pytest.mark.parametrize("tag", ["t", "other"])
def test_a_job_that_was_taken_over_and_wakes_up_publishes_nothing(moment: Moment, tag: str) -> None:
    """It publishes nothing and overwrites nothing, whether its successor saves the same tag or another one."""
    store = MemoryStorage()
    sleeper = Process(store)
    assert None is sleeper.save("first", 1)
    awake = threading.Event()
    sleeper.suspend(moment, awake)
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(sleeper.save("t", 2)))
    thread.start()
    assert sleeper.reached.wait(HANGS)
    bury(store)
    successor = Process(store)
    assert None is successor.save(tag, 3)
    awake.set()
    thread.join(HANGS)
    assert isinstance(outcome[0], SaveFailed)
    assert {"first": 1, tag: 3} == values(store)
    assert None is successor.save("t", 4, overwrite=True)
    sleeper.end()
    successor.end()
    assert {"first": 1, tag: 3, "t": 4} == values(store)


def test_the_done_of_a_job_that_wakes_up_to_die_is_no_tag() -> None:
    """Its ``done``, beside which all else was removed, makes no tag; the name can be saved to."""
    store = MemoryStorage()
    sleeper = Process(store)
    assert None is sleeper.save("first", 1)
    awake = threading.Event()

    def sleep() -> None:
        awake.wait()
        sleeper.arm(before("sync_dir", "t"))

    sleeper.arm(before("link_new", "t/done"), sleep)
    thread = threading.Thread(target=sleeper.save, args=("t", 2))
    thread.start()
    assert sleeper.reached.wait(HANGS)
    bury(store)
    successor = Process(store)
    assert None is successor.save("other", 3)
    awake.set()
    thread.join(HANGS)
    assert ["t/done"] == [key for key in store.keys if key.startswith("t/")]
    assert {"first": 1, "other": 3} == values(store)
    assert None is successor.save("t", 4, overwrite=True)
    sleeper.end()
    successor.end()
    assert {"first": 1, "other": 3, "t": 4} == values(store)


def test_a_key_that_another_job_took_meanwhile_stays_its() -> None:
    """Is an error of the save, and stays that job's."""
    store = MemoryStorage()
    process = Process(store)
    assert None is process.save("first", 1)
    key = "t/model/dp_rank_00_tp_rank_00_pp_rank_00.pt"
    process.arm(before("close", key), lambda: store.write(key, b"theirs"))
    error = process.save("t", 2)
    assert SaveFailed is type(error)
    assert "FileExistsError" in str(error)
    process.end()
    assert {"first": 1} == values(store)


@pytest.mark.parametrize("taken", ["done", "manifest.json", "checkpoint"])
def test_a_marker_that_another_job_wrote_is_not_overwritten(taken: str) -> None:
    """The save fails and says so; nothing of theirs is overwritten."""
    store = MemoryStorage()
    process = Process(store)
    assert None is process.save("first", 1)
    process.arm(before("link_new", f"t/{taken}"), lambda: store.write(f"t/{taken}", b"theirs"))
    error = process.save("t", 2)
    assert SaveFailed is type(error)
    assert "else meanwhile" in str(error) or "another job" in str(error)
    if taken == "done":  # to us a complete tag, which nobody removes
        assert b"theirs" == store.read("t/done")
    process.end()


@pytest.mark.parametrize("key", ["t/done", "t/manifest.json", "t/checkpoint"])
def test_a_lost_reply_does_not_hide_whether_the_tag_is_there(key: str) -> None:
    """A marker that was written though the storage said that it failed: the save knows whether its tag is there."""
    store = MemoryStorage()
    process = Process(store)
    assert None is process.save("first", 1)
    inner = process.saver.storage.inner  # type: ignore[attr-defined]

    def lose() -> None:
        link_new = inner.link_new

        def once(at: str, data: bytes) -> bool:
            inner.link_new = link_new
            link_new(at, data)
            raise OSError("the reply was lost")

        inner.link_new = once

    process.arm(before("link_new", key), lose)
    error = process.save("t", 2)
    visible = values(store)
    assert (key == "t/done") == (error is None) == ("t" in visible)
    assert None is process.save("t", 3, overwrite=True)
    process.end()
    assert {"first": 1, "t": 3} == values(store)
    assert [] == strays(store)


def test_nothing_is_written_where_rank_0_refuses() -> None:
    """A tag that exists: SaveFailed on every rank, and no rank has created a file."""
    store = MemoryStorage()
    processes = ranks(store, "one")
    for process in processes:
        process.arm(lambda operation: False)
    errors = save_all(processes, "first", 2)
    assert [SaveFailed] * 2 == [type(error) for error in errors]
    for error, process in zip(errors, processes, strict=True):
        assert "first exists" in str(error)
        assert "overwrite=True" in str(error)
        assert [] == [operation for operation in process.log if operation.name == "create"]
    assert [None, None] == save_all(processes, "second", 3)
    end_all(processes)
    assert {"first": 1, "second": 3} == values(store, 2)
    assert [] == strays(store)


def test_the_others_write_once_rank_0_has_begun() -> None:
    """While rank 0 still makes room they create no file, however early they come."""
    store = MemoryStorage()
    processes = ranks(store, "one")
    created_before: list[str] = []
    later = threading.Event()

    def hold() -> None:
        later.wait(0.3)
        created_before.extend(operation.key for operation in processes[1].log if operation.name == "create")

    processes[0].arm(before("write", "/begin"), hold)
    processes[1].arm(lambda operation: False)
    assert [None, None] == save_all(processes, "first", 2, overwrite=True)
    end_all(processes)
    assert processes[0].reached.is_set()
    assert [] == created_before
    assert [] != [operation.key for operation in processes[1].log if operation.name == "create"]
    assert {"first": 2} == values(store, 2)


def test_a_rank_that_ends_gives_rank_0_a_short_while() -> None:
    """After an exception it gives rank 0 a short while, not the timeout; it wrote nothing, and votes so."""
    store = MemoryStorage()
    processes = ranks(store, "one")
    processes[1].arm(lambda operation: False)
    pending = processes[1].saver.save("t", {"weight": torch.ones(1)}, async_save=True)
    leaver = threading.Thread(target=lambda: processes[1].saver.abandon(0.2))
    leaver.start()
    leaver.join(HANGS)
    assert not leaver.is_alive()
    assert [] == [operation for operation in processes[1].log if operation.name == "create"]
    assert SaveFailed is type(processes[0].save("t", 2))
    pending.wait_decided()
    end_all(processes)
    assert {"first": 1} == values(store, 2)
    assert [] == strays(store)


def test_ranks_that_mean_different_tags_are_told_both() -> None:
    """Said on both, with both names; the one that rank 0 does not mean is never written to."""
    store = MemoryStorage()
    processes = ranks(store, "one")
    processes[1].arm(lambda operation: False)
    errors = together(lambda: processes[0].save("a", 2), lambda: processes[1].save("first", 2))
    for error in errors:
        assert isinstance(error, SaveFailed)
        assert "'a'" in str(error)
        assert "'first'" in str(error)
    assert [] == [operation for operation in processes[1].log if operation.name == "create"]
    assert [None, None] == save_all(processes, "a", 3)
    end_all(processes)
    assert {"first": 1, "a": 3} == values(store, 2)
    assert [] == strays(store)


def test_the_next_save_waits_for_the_rank_that_still_writes() -> None:
    """The next save of the same tag waits until that one has left it: no key of the failed attempt is in its tag."""
    store = MemoryStorage()
    processes = ranks(store, "one")
    slow = threading.Event()

    def fail() -> None:
        raise OSError("No space left on device")

    processes[0].arm(before("create", ".pt"), fail)
    processes[1].arm(before("close", ".pt"), lambda: slow.wait(1.0))

    def twice(process: Process) -> list[Any]:
        return [process.save("t", 2), process.save("t", 3)]

    outcomes = together(*(lambda process=process: twice(process) for process in processes))
    assert [[SaveFailed, type(None)]] * 2 == [[type(first), type(second)] for first, second in outcomes]
    end_all(processes)
    assert {"first": 1, "t": 3} == values(store, 2)
    assert [] == strays(store)


def test_a_rank_that_dies_before_its_vote_is_named() -> None:
    """The save fails on the other within the timeout, naming it; the next job removes what was written."""
    store = MemoryStorage()
    processes = ranks(store, "one")
    for process in processes:
        lose_patience(process.saver, 1.0)
    processes[1].arm(before("write", ".vote.json"))
    errors = save_all(processes, "t", 2)
    assert SaveFailed is type(errors[0])
    assert "rank 1" in str(errors[0])
    end_all(processes)
    assert {"first": 1} == values(store, 2)
    following = Process(store, run="two")
    assert None is following.save("single", 9)
    following.end()
    assert [] == strays(store)


@pytest.mark.parametrize(
    ("moment", "error", "visible"),
    [(before("write", "/begin"), SaveFailed, False), (before("write", "verdict.json"), type(None), True)],
    ids=["before it begins", "before its verdict"],
)
def test_without_rank_0_others_know_whether_a_tag_is_there(moment: Moment, error: type[Any], visible: bool) -> None:
    """Who waits for it to begin writes nothing and fails; who waits for its verdict finds that the tag is there."""
    store = MemoryStorage()
    processes = ranks(store, "one")
    for process in processes:
        lose_patience(process.saver, 1.0)
    processes[0].arm(moment)
    processes[1].arm(lambda operation: False)
    errors = save_all(processes, "t", 2)
    assert error is type(errors[1])
    assert visible == any(operation.name == "create" for operation in processes[1].log)
    end_all(processes)
    assert ({"first": 1, "t": 2} if visible else {"first": 1}) == values(store, 2)
