"""A store without renames: whenever a job dies, or an operation fails, what is visible is complete, and nothing stays.

A save is rehearsed, then done once for each of its operations, with the death or failure just before it: for all of
them in make soak, for some elsewhere.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Any

import pytest

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.testing.storage import MemoryStorage
from tests.protocol.stores import Process, bury, nth, strays, values

pytestmark = [pytest.mark.plain, pytest.mark.once]

Save = Callable[[Process], Any]


def new(process: Process) -> Any:
    """A tag that is not there yet."""
    return process.save("new", 3)


def over(process: Process) -> Any:
    """Over a tag of this job."""
    return process.save("old", 3, overwrite=True)


def retaining(process: Process) -> Any:
    """A new tag, which makes one too many."""
    return process.save("new", 3, num_kept_ckpts=2)


BEFORE = {"older": 1, "old": 2}
# What there may be after each save: where it did not happen, half-way, and where it did.
AFTER: dict[Save, list[dict[str, int]]] = {
    new: [BEFORE, {**BEFORE, "new": 3}],
    over: [BEFORE, {"older": 1}, {"older": 1, "old": 3}],
    retaining: [BEFORE, {**BEFORE, "new": 3}, {"old": 2, "new": 3}],
}


def started() -> tuple[MemoryStorage, Process]:
    """A job that saved twice."""
    store = MemoryStorage()
    process = Process(store)
    assert [None, None] == [process.save("older", 1), process.save("old", 2)]
    return store, process


def operations_of(save: Save) -> int:
    """How many operations there are in it and after it, up to the end of the job."""
    _, process = started()
    process.arm(lambda operation: False)
    assert None is save(process)
    process.end()
    return len(process.log)


@pytest.fixture(params=[3, pytest.param(1, marks=pytest.mark.soak)], ids=["some", "all"])
def moments(save: Save, request: pytest.FixtureRequest) -> range:
    """The operations of the save before which something happens; which ones differs from run to run."""
    begin, count = random.randrange(request.param), operations_of(save)
    assert count > 30
    print("from operation", begin)
    return range(begin, count, request.param)


@pytest.mark.parametrize("save", AFTER, ids=lambda save: save.__name__)
@pytest.mark.one_in(2)
def test_what_is_visible_after_a_death_anywhere_is_complete(save: Save, moments: range) -> None:
    """What is visible then is complete; the next job's first save leaves no key of the dead one's."""
    for number in moments:
        store, process = started()
        process.arm(nth(number))
        save(process)
        process.end()
        assert values(store) in AFTER[save], number
        bury(store)
        successor = Process(store)
        assert None is successor.save("next", 9)
        successor.end()
        found = values(store)
        assert 9 == found.pop("next")
        assert found in AFTER[save], number
        assert [] == strays(store), number


@pytest.mark.parametrize("save", AFTER, ids=lambda save: save.__name__)
@pytest.mark.parametrize("again", ["same", "another"])
@pytest.mark.one_in(2)
def test_after_a_failure_anywhere_a_save_knows_its_outcome(save: Save, again: str, moments: range) -> None:
    """The save says whether its tag is there, and the same job's next one, of that tag or another, leaves no stray."""

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    for number in moments:
        store, process = started()
        process.arm(nth(number), fail)
        error = save(process)
        found = values(store)
        assert found in AFTER[save], number
        assert (error is None) == (3 in found.values()), (number, error)
        assert error is None or isinstance(error, CheckpointError), number
        tag = "another" if again == "another" else ("old" if save is over else "new")
        if process.reached.is_set():
            assert None is process.save(tag, 4, overwrite=True), number
            assert 4 == values(store)[tag], number
            process.end()
            assert [] == strays(store), number
        else:
            process.end()


@pytest.mark.parametrize("save", AFTER, ids=lambda save: save.__name__)
@pytest.mark.one_in(3)
def test_death_while_the_next_job_cleans_up(save: Save, moments: range) -> None:
    """However far it came with it, the job after it ends it."""
    for number in moments[::5]:
        for further in range(0, 40, 6):
            store, process = started()
            process.arm(nth(number))
            save(process)
            process.end()
            bury(store)
            second = Process(store)
            second.arm(nth(further))
            second.save("next", 8)
            second.end()
            assert {"older", "old", "new", "next"} >= values(store).keys()
            bury(store)
            third = Process(store)
            assert None is third.save("last", 9), (number, further)
            third.end()
            assert [] == strays(store), (number, further)
