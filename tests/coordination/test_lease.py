"""At most one live job holds a directory."""

import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nxd_ckpt import Checkpointer, list_checkpoints
from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.control_files import HEARTBEAT, LEASE, PLACE
from nxd_ckpt.coordination.lease import Heartbeat, Lease
from nxd_ckpt.errors import DirectoryInUse, StorageError
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, failing
from tests.protocol.job import Job


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path)
    storage.make_dir(".nxd_ckpt")
    return storage


ABROAD = Lease("abroad", "another/boot/namespace", 1, "1")
"""That of a job on another host."""


def document(held: Lease, **more: int) -> bytes:
    return json.dumps({"run_id": held.run_id, "host": held.host, "pid": held.pid, "born": held.born, **more}).encode()


def write(storage: Storage, held: Lease) -> None:
    storage.write(LEASE, document(held))


def beat(storage: Storage, holder: Lease, number: int) -> None:
    """What the holder's heartbeat does."""
    storage.write(HEARTBEAT, document(holder, beat=number))


def test_a_lease_is_taken_and_given_back(storage: LocalStorage) -> None:
    """A free directory is taken and given back; its holder is this process."""
    held = lease.acquire(storage, "one", 1.0)
    assert held == lease.read(storage)
    assert held.holder_runs_here()
    assert lease.job_lives(storage, 1.0)
    lease.release(storage, held)
    assert None is lease.read(storage)
    assert not lease.job_lives(storage, 1.0)


def test_the_same_process_is_told_apart(storage: LocalStorage) -> None:
    """A second Checkpointer of this process gets a message of its own; the same run may ask again."""
    lease.acquire(storage, "one", 1.0)
    lease.acquire(storage, "one", 1.0)
    with pytest.raises(DirectoryInUse, match="this process already saves here as run one"):
        lease.acquire(storage, "two", 1.0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "no answer")], ids=["interrupt", "error"])
def test_what_an_acquisition_took_before_it_failed_is_given_back(storage: LocalStorage, error: BaseException) -> None:
    """Else the directory would be in use by this very process, until it ends."""
    failing_once = HookedStorage(storage, failing("sync_dir", ".nxd_ckpt", error))
    with pytest.raises(type(error)):
        lease.acquire(failing_once, "one", 1.0)
    assert None is lease.read(storage)


def acquire_and_end(rank: int, path: Path) -> Lease:
    return lease.acquire(LocalStorage(path), "dead", 1.0)


def test_a_dead_process_of_this_host_is_replaced_at_once(storage: LocalStorage) -> None:
    """However long the patience."""
    (dead,) = Job(1, acquire_and_end, storage.root).values()
    assert dead == lease.read(storage)
    assert not dead.holder_runs_here()
    assert lease.acquire(storage, "new", 1000.0) == lease.read(storage)


def test_a_reused_pid_is_not_the_holder(storage: LocalStorage) -> None:
    """Another process has the dead holder's number now: the time it was born tells."""
    mine = Lease.of_this_process("earlier")
    write(storage, replace(mine, born="1"))
    assert os.getpid() == mine.pid
    assert "new" == lease.acquire(storage, "new", 1000.0).run_id


def test_a_beating_holder_on_another_host_is_not(storage: LocalStorage) -> None:
    """The message names it, and what to do if it is known to be gone."""
    beats = itertools.count()

    def live(operation: Operation) -> None:
        if operation == Operation("read", HEARTBEAT):  # whoever looks twice sees another beat
            beat(storage, ABROAD, next(beats))

    write(storage, ABROAD)
    with pytest.raises(DirectoryInUse, match=r"run abroad \(pid 1 on another\).*remove .*lease\.json"):
        lease.acquire(HookedStorage(storage, live), "new", 2.0)


def test_a_holder_whose_first_beat_comes_while_one_watches_lives(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the lease just now; until then the heartbeat was another job's, or there was none."""
    for before in (None, b"{", document(Lease.of_this_process("earlier"), beat=5)):
        write(storage, ABROAD)
        storage.remove(HEARTBEAT)
        if before is not None:
            storage.write(HEARTBEAT, before)
        monkeypatch.setattr("nxd_ckpt.effects.sleep", lambda seconds: beat(storage, ABROAD, 1))
        assert lease.job_lives(storage, 60.0)


@pytest.mark.parametrize(
    "later", [b"", b"[]", b'{"beat": 7}', document(replace(ABROAD, run_id="x"), beat=7), document(ABROAD), None]
)
def test_what_is_no_beat_of_the_holder_is_no_sign_of_its_life(
    storage: LocalStorage, later: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged heartbeat, one that is gone, or the last of a job that woke up after it was taken over."""

    def become(seconds: float) -> None:
        slept.append(seconds)
        if later is None:
            storage.remove(HEARTBEAT)
        else:
            storage.write(HEARTBEAT, later)

    write(storage, ABROAD)
    beat(storage, ABROAD, 6)
    slept = list[float]()
    monkeypatch.setattr("nxd_ckpt.effects.monotonic", lambda: sum(slept))
    monkeypatch.setattr("nxd_ckpt.effects.sleep", become)
    assert not lease.job_lives(storage, 10.0)
    assert 20 == len(slept)


def test_the_heartbeat_is_there_before_the_lease(storage: LocalStorage) -> None:
    """NFS goes on to miss a file that was not there when it was asked for first: a holder would look dead. What is
    there already stays: it may be that of a live job."""
    log = list[Operation]()
    held = lease.acquire(HookedStorage(storage, log.append), "one", 1.0)
    assert [PLACE, HEARTBEAT, LEASE] == [done.key for done in log if done.name == "link_new"]
    assert 0 == lease.last_beat(storage, held)


@pytest.mark.parametrize("renames", [True, False])
def test_who_takes_over_beats_at_once(tmp_path: Path, renames: bool) -> None:
    """Instead of the dead job, whose last beat would say nothing of the new one."""
    place: Storage = LocalStorage(tmp_path, durable=False) if renames else MemoryStorage()
    write(place, ABROAD)
    beat(place, ABROAD, 7)
    held = lease.acquire(place, "two", 0.1)
    assert (0, None) == (lease.last_beat(place, held), lease.last_beat(place, ABROAD))


def test_a_heartbeat_that_is_no_file_is_set_aside(storage: LocalStorage, caplog: pytest.LogCaptureFixture) -> None:
    """A directory in its place would make a live job look dead."""
    storage.make_dir(HEARTBEAT)
    held = lease.acquire(storage, "one", 1.0)
    assert 0 == lease.last_beat(storage, held)
    assert f"{storage.url}/{HEARTBEAT} is damaged, and was" in caplog.text


def test_a_heartbeat_is_given_back_before_the_lease(storage: LocalStorage) -> None:
    """After it, it may be the next holder's."""
    held, log = lease.acquire(storage, "one", 1.0), list[Operation]()
    lease.release(HookedStorage(storage, log.append), held)
    assert [HEARTBEAT, LEASE] == [done.key for done in log if done.name == "remove"]


def test_a_heartbeat_that_cannot_be_changed_keeps_no_lease(storage: LocalStorage) -> None:
    """It is taken, and given back, without: the thread beats soon enough."""

    def fails(operation: Operation) -> None:
        if operation.key == HEARTBEAT and operation.name in ("write", "remove"):
            raise PermissionError(errno.EPERM, "another user's file")

    hooked = HookedStorage(storage, fails)
    held = lease.acquire(hooked, "one", 1.0)
    assert (held, 0) == (lease.read(storage), lease.last_beat(storage, held))
    lease.release(hooked, held)
    assert None is lease.read(storage)


def test_a_run_of_the_same_name_is_another_holder(storage: LocalStorage) -> None:
    """A scheduler may use a name again: who was taken over by such a run must not publish either."""
    held = lease.acquire(storage, "one", 1.0)
    write(storage, replace(ABROAD, run_id="one"))
    with pytest.raises(DirectoryInUse, match="taken over by run one"):
        lease.require(storage, held)


def test_a_copy_takes_a_lease_that_is_gone_for_lost(storage: LocalStorage) -> None:
    """Where it gathers nothing is swept, which would show that another job was there."""
    held = lease.acquire(storage, "one", 1.0)
    lease.require(storage, held, strictly=True)
    storage.remove(LEASE)
    lease.require(storage, held)
    with pytest.raises(DirectoryInUse, match="is gone: another job took over"):
        lease.require(storage, held, strictly=True)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"run_id": "one", "run_id": "two"}', None])
@pytest.mark.parametrize("renames", [True, False])
def test_a_lease_that_is_damaged_just_before_the_end_fails_no_copy(
    tmp_path: Path, renames: bool, damage: bytes | None
) -> None:
    """No heartbeat came since to write it anew. Nobody took over: who does so leaves a heartbeat of its own."""
    storage: Storage = LocalStorage(tmp_path, durable=False) if renames else MemoryStorage()
    held = lease.acquire(storage, "one", 1.0)
    if damage is None and renames:
        storage.remove(LEASE)
        storage.make_dir(LEASE)
    else:
        storage.write(LEASE, damage or b"")
    lease.require(storage, held, strictly=True)
    assert held == lease.read(storage)
    beat(storage, ABROAD, 0)
    storage.write(LEASE, damage or b"")
    with pytest.raises(DirectoryInUse, match="is gone: another job took over"):
        lease.require(storage, held, strictly=True)
    assert held != lease.read(storage)


@pytest.mark.parametrize("renames", [True, False])
def test_a_lease_that_is_damaged_at_the_very_end_is_given_back(tmp_path: Path, renames: bool) -> None:
    """The next job does not wait for a holder that nobody knows. What may be another job's stays."""
    storage: Storage = LocalStorage(tmp_path, durable=False) if renames else MemoryStorage()
    held = lease.acquire(storage, "one", 1.0)
    storage.write(LEASE, b"{")
    lease.release(storage, held)
    assert (None, False) == (lease.read(storage), storage.is_file(HEARTBEAT))
    held = lease.acquire(storage, "one", 1.0)
    beat(storage, ABROAD, 0)
    storage.write(LEASE, b"{")
    lease.release(storage, held)
    assert storage.is_file(LEASE)


WRONG = b'{"run_id": 5, "host": [], "pid": "x", "born": null, "beat": 0}'
DAMAGED = [b"", b"{", b"[]", b"null", b'{"run_id": "x"}', b"[" * 100_000, WRONG]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_lease_is_replaced(storage: LocalStorage, damaged: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can be asked, and nobody beats."""
    storage.write(LEASE, damaged)
    assert lease.acquire(storage, "new", 0.1) == lease.read(storage)
    assert f"{storage.url}/{LEASE} was damaged" in caplog.text


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)])
def test_what_is_no_lease_is_set_aside(
    storage: LocalStorage, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A directory, a FIFO or a link to itself is in nobody's way; a heartbeat finds its way around it, too."""
    make(storage.path(LEASE))
    held = lease.acquire(storage, "new", 0.1)
    assert held == lease.read(storage)
    assert f"{storage.url}/{LEASE} is damaged, and was" in caplog.text

    storage.remove(LEASE)
    make(storage.path(LEASE))
    lease.require(storage, held)
    heartbeat = Heartbeat(storage, held, 0.01)
    try:
        while not storage.is_file(LEASE):
            time.sleep(0.01)
    finally:
        heartbeat.stop()
    assert held.run_id == getattr(lease.read(storage), "run_id", None)


def beat_twice(held: Lease, storage: Storage) -> None:
    looks = threading.Semaphore(0)
    watched = HookedStorage(storage, lambda done: looks.release() if done == Operation("read", LEASE) else None)
    heartbeat = Heartbeat(watched, held, 0.01)
    for _ in range(3):  # each beat begins with one
        looks.acquire()
    heartbeat.stop()


def test_a_lost_lease_file_comes_back(storage: LocalStorage) -> None:
    """Someone removed it, or moved it for a moment: the live job claims it again."""
    held = lease.acquire(storage, "one", 1.0)
    storage.remove(LEASE)
    lease.require(storage, held)
    beat_twice(held, storage)
    found = lease.read(storage)
    assert found is not None
    assert "one" == found.run_id


@pytest.mark.parametrize("mark", [None, b"another directory's"])
def test_a_lease_does_not_come_back_in_another_directory(storage: LocalStorage, mark: bytes | None) -> None:
    """What the path leads to once it was unmounted is not the job's; where its lease is, the mark does not matter."""
    held = lease.acquire(storage, "one", 1.0)
    storage.remove(PLACE)
    if mark is not None:
        storage.write(PLACE, mark)
    lease.require(storage, held)
    data = storage.read(LEASE)
    storage.remove(LEASE)
    advised = "is not the directory that this job began with.*at the end of a job that took over while this one stood"
    with pytest.raises(StorageError, match=advised):
        lease.require(storage, held)
    beat_twice(held, storage)
    assert lease.read(storage) is None
    storage.write(LEASE, data)
    lease.require(storage, held)


def test_the_error_of_an_acquisition_is_told_and_not_that_of_giving_back(storage: LocalStorage) -> None:
    """What may have been taken cannot be looked up either."""

    def fail(operation: Operation) -> None:
        if operation.name in ("sync_dir", "read"):
            raise OSError(errno.EIO, operation.name)

    with pytest.raises(OSError, match="sync_dir"):
        lease.acquire(HookedStorage(storage, fail), "one", 1.0)


def test_a_lease_that_is_given_back_meanwhile_is_taken(storage: LocalStorage) -> None:
    """It was there when this job tried to make it, and gone when it looked whose it is."""
    write(storage, ABROAD)
    freed = HookedStorage(storage, lambda done: storage.remove(LEASE) if done[:2] == ("read", LEASE) else None)
    assert lease.acquire(freed, "new", 1.0) == lease.read(storage)


def test_a_lease_that_was_taken_over_lasts(storage: LocalStorage) -> None:
    """Its name is durable before anything relies on it."""
    write(storage, ABROAD)
    log = list[Operation]()
    lease.acquire(HookedStorage(storage, log.append), "new", 0.1)
    assert Operation("sync_dir", ".nxd_ckpt") == [done for done in log if done.name != "read"][-1]


def test_a_holder_is_watched_for_the_whole_patience(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times in it, and at least once a second."""
    write(storage, ABROAD)
    slept = list[float]()
    monkeypatch.setattr("nxd_ckpt.effects.monotonic", lambda: sum(slept))
    monkeypatch.setattr("nxd_ckpt.effects.sleep", slept.append)
    for patience, naps in ((10.0, [0.5] * 20), (40.0, [1.0] * 40)):
        slept.clear()
        assert False is lease.job_lives(storage, patience)
        assert naps == slept


def test_a_lease_that_is_given_back_while_it_is_watched_is_taken(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder ended well: that is no sign of life."""
    write(storage, ABROAD)
    monkeypatch.setattr("nxd_ckpt.effects.sleep", lambda seconds: storage.remove(LEASE))
    assert lease.acquire(storage, "new", 60.0) == lease.read(storage)


def test_a_lease_that_another_job_takes_while_it_is_watched_is_held(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is faster lives."""
    write(storage, ABROAD)
    monkeypatch.setattr("nxd_ckpt.effects.sleep", lambda seconds: write(storage, replace(ABROAD, run_id="faster")))
    assert True is lease.job_lives(storage, 60.0)


def test_who_watches_a_holder_shows_that_it_goes_on(storage: LocalStorage) -> None:
    """Each time that it looks: other ranks wait for it meanwhile."""
    write(storage, ABROAD)
    signs = list[Lease | None]()
    lease.acquire(storage, "new", 0.1, lambda: signs.append(lease.read(storage)))
    assert 1 < len(signs) <= 20
    assert {ABROAD} == {*signs}


def test_of_a_damaged_lease_nobody_is_the_holder(storage: LocalStorage) -> None:
    """Of no host, and no process."""
    storage.write(LEASE, b"{")
    found = lease.read(storage)
    assert found is not None
    assert Lease("unknown", "unknown", 0, "", known=False) == found


def test_on_a_store_a_lease_that_is_gone_is_lost(store: MemoryStorage) -> None:
    """Nobody but another job takes it away."""
    held = lease.acquire(store, "one", 1.0)
    lease.require(store, held)
    store.remove(LEASE)
    with pytest.raises(DirectoryInUse, match="is gone: another job took over from run one"):
        lease.require(store, held)


class AtOnce:
    """A thread that runs where it is started."""

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self.daemon, self.joined = daemon, False
        self._target = target

    def start(self) -> None:
        self._target()

    def join(self) -> None:
        self.joined = True


@pytest.fixture
def three_beats(monkeypatch: pytest.MonkeyPatch) -> list[AtOnce]:
    """A heartbeat beats three times, at once, and ends; its threads."""
    waits, threads = iter([False] * 3 + [True]), list[AtOnce]()

    def thread(**options: Any) -> AtOnce:
        threads.append(AtOnce(**options))
        return threads[-1]

    monkeypatch.setattr("nxd_ckpt.effects.Event", lambda: SimpleNamespace(wait=lambda seconds: next(waits), set=list))
    monkeypatch.setattr("nxd_ckpt.effects.Thread", thread)
    return threads


def test_a_heartbeat_ends_with_its_process_and_is_waited_for(storage: LocalStorage, three_beats: list[AtOnce]) -> None:
    """A daemon; who stops it knows that the lease is not written any more."""
    heartbeat = Heartbeat(storage, lease.acquire(storage, "one", 1.0), 1.0)
    (thread,) = three_beats
    assert [True, False] == [thread.daemon, thread.joined]
    heartbeat.stop()
    assert thread.joined


@pytest.mark.usefixtures("three_beats")
@pytest.mark.parametrize(("name", "key"), [("read", LEASE), ("write", HEARTBEAT)])
def test_a_heartbeat_that_fails_is_followed_by_others(storage: LocalStorage, name: str, key: str) -> None:
    """A full or absent disk shows in the save itself."""
    held, errors = lease.acquire(storage, "one", 1.0), iter([OSError(errno.ENOSPC, "full")])

    def fail_once(operation: Operation) -> None:
        if operation == Operation(name, key):
            for error in errors:
                raise error

    Heartbeat(HookedStorage(storage, fail_once), held, 1.0)
    assert 3 == lease.last_beat(storage, held)


@pytest.mark.usefixtures("three_beats")
@pytest.mark.parametrize("renames", [True, False])
def test_a_damaged_lease_is_written_anew_by_its_holder(tmp_path: Path, renames: bool) -> None:
    """And not twice."""
    place: Storage = LocalStorage(tmp_path, durable=False) if renames else MemoryStorage()
    held, log = lease.acquire(place, "one", 1.0), list[Operation]()
    place.write(LEASE, b"{")
    Heartbeat(HookedStorage(place, log.append), held, 1.0)
    beats = ["write" if renames else "exchange"] * 3
    assert ["exchange", *beats] == [done.name for done in log if done.name in ("write", "exchange", "link_new")]
    assert (held, 3) == (lease.read(place), lease.last_beat(place, held))


@pytest.mark.usefixtures("three_beats")
@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("damaged", [True, False])
def test_a_take_over_while_a_holder_beats_is_not_undone(tmp_path: Path, renames: bool, damaged: bool) -> None:
    """Not one between its look and its writing, of a lease that it would have written anew either."""
    place: Storage = LocalStorage(tmp_path, durable=False) if renames else MemoryStorage()
    held = lease.acquire(place, "one", 1.0)
    if damaged:
        place.write(LEASE, b"{")

    def taken_over(operation: Operation) -> None:
        if operation == Operation("exchange", LEASE) or (not damaged and operation.key == HEARTBEAT):
            write(place, ABROAD)

    Heartbeat(HookedStorage(place, taken_over), held, 1.0)
    assert ABROAD == lease.read(place)
    with pytest.raises(DirectoryInUse, match="taken over by run abroad"):
        lease.require(place, held)


@pytest.mark.usefixtures("three_beats")
def test_on_a_store_a_heartbeat_makes_no_lease_anew(store: MemoryStorage) -> None:
    """Somebody may have taken it over, and have ended."""
    held = lease.acquire(store, "one", 1.0)
    store.remove(LEASE)
    Heartbeat(store, held, 1.0)
    assert (None, 0) == (lease.read(store), lease.last_beat(store, held))


@pytest.mark.usefixtures("three_beats")
@pytest.mark.parametrize("renames", [True, False])
def test_a_heartbeat_that_is_gone_comes_back(tmp_path: Path, renames: bool) -> None:
    """Somebody removed it."""
    place: Storage = LocalStorage(tmp_path, durable=False) if renames else MemoryStorage()
    held = lease.acquire(place, "one", 1.0)
    place.remove(HEARTBEAT)
    Heartbeat(place, held, 1.0)
    assert 3 == lease.last_beat(place, held)


@pytest.mark.parametrize("spoil", [lambda mark: mark.write_bytes(bytes(2**21)), lambda mark: mark.mkdir()])
def test_a_mark_that_cannot_be_read_keeps_no_lease(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    """It counts as none: a job that ends gives the directory back, and the next one takes it."""
    mark = tmp_path / PLACE
    with Checkpointer(tmp_path) as saver:
        saver.save("one", {})
        mark.unlink()
        spoil(mark)
    with Checkpointer(tmp_path) as following:
        following.save("two", {})
    assert ["one", "two"] == [info.tag for info in list_checkpoints(tmp_path)]
