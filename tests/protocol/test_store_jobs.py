"""A store without renames: two jobs that meet in it, and ranks that do not agree, come late or are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.testing.storage import MemoryStorage
from tests.protocol.job import HANGS
from tests.protocol.states import PATIENCE, lose_patience
from tests.protocol.stores import Moment, Process, before, strays, values

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
