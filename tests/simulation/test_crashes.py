"""The promises, in every state in which a loss of power may leave the disk; and that these are the states."""

import time

import pytest

from tests.simulation.conversions import CONVERSIONS
from tests.simulation.crashes import Work, enumerated
from tests.simulation.drains import DRAINS
from tests.simulation.saves import SAVES
from tests.simulation.world import Disk, DiskStorage, Seen, crash_states

EVERY, MOST = 61, 12
"""`make test` looks at one in so many moments, and at most at so many states of it; `make soak` at all."""


def disk_with_changes() -> Disk:
    """A disk on which ``a/old`` was renamed to ``a/new``, and ``a/file`` is not synced."""
    disk = Disk(time.time)
    storage = DiskStorage(disk)
    storage.make_dir("a/old")
    storage.sync_dir("a")
    storage.rename("a/old", "a/new")
    writer = storage.create("a/file", 2)
    writer.write_at(0, b"12")
    writer.settle()
    return disk


def test_every_state_is_there_once() -> None:
    """A rename lasts or not, a new name does or does not, and bytes come in each way that is possible."""
    states, disk = set(), disk_with_changes()
    for remains in crash_states(disk, Seen()):
        assert remains is not None
        storage = DiskStorage(remains.disk(time.time))
        names = tuple(entry.name for entry in storage.list("a"))
        state = names, storage.read("a/file") if "file" in names else None
        assert state not in states
        states.add(state)
    contents = (None, b"", b"12", b"1", b"1\0", b"\0\0")
    assert states == {
        ((*(["file"] if data is not None else []), folder), data) for folder in ("old", "new") for data in contents
    }


def test_what_nobody_looks_at_tells_no_states_apart() -> None:
    """Nor does what is in a directory that is removed whole."""
    for look, expected in ((lambda storage: storage.is_dir("a/new"), 2), (lambda storage: storage.remove("a"), 1)):
        states = []
        for remains in crash_states(disk_with_changes(), Seen()):
            assert remains is not None
            states.append(look(DiskStorage(remains.disk(time.time))))
        assert expected == len(states)


def test_a_state_that_equals_an_earlier_one_is_not_looked_at_again() -> None:
    seen = Seen()
    for again in (False, True):
        for remains in crash_states(disk_with_changes(), seen):
            assert again is (remains is None)
            if remains is not None:
                DiskStorage(remains.disk(time.time)).list("a")


@pytest.mark.parametrize("work", [*SAVES[::2], *CONVERSIONS, *DRAINS], ids=lambda work: work.name)
def test_the_promises_hold_in_states_that_a_crash_leaves(work: Work) -> None:
    """At some of the moments at which power may be lost: during a save, during a conversion, whose output is the old or
    the new one and can be made once more, and while a tag is copied to a lower tier."""
    count = enumerated(work, every=EVERY, most=MOST)
    assert [] == count.failures
    assert 1 < count.looked_at


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("work", [*SAVES, *CONVERSIONS, *DRAINS], ids=lambda work: work.name)
def test_the_promises_hold_in_every_state_that_a_crash_leaves(work: Work) -> None:
    assert [] == enumerated(work, interleavings=10).failures
