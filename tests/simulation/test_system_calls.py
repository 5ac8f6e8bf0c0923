"""Our own LocalStorage on a simulated disk: what its system calls do there, and what a loss of power leaves."""

import errno
import mmap
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.contract import StorageContract
from tests.simulation.__main__ import counted
from tests.simulation.crashes import enumerated
from tests.simulation.disk_schedule import DiskSchedule
from tests.simulation.lease_schedule import LeaseSchedule
from tests.simulation.saves import SAVES
from tests.simulation.schedule import run
from tests.simulation.world import Disk, DiskStorage, SystemCalls

EVERY, MOST = 97, 6
SCHEDULES = 24


@pytest.fixture
def disk() -> Disk:
    return Disk(time.time)


@pytest.fixture
def calls() -> Iterator[SystemCalls]:
    calls = SystemCalls()
    with calls.installed():
        yield calls
    assert [] == calls.left_open


def crashed(disk: Disk) -> DiskStorage:
    """The disk after a loss of power of which nothing survives that was not synced."""
    disk.crash(lambda change: False, lambda file: file.synced)
    return DiskStorage(disk)


def test_what_is_below_the_simulated_root_alone_is_simulated(calls: SystemCalls, disk: Disk, tmp_path: Path) -> None:
    """Other paths and descriptors go to the system, and its functions are back afterwards."""
    (tmp_path / "real").write_bytes(b"1")
    storage = LocalStorage(calls.mount(disk))
    storage.write("a/simulated", b"2")
    assert ["real"] == os.listdir(tmp_path)
    assert ["simulated"] == os.listdir(storage.path("a"))
    assert ["a/simulated"] == disk.files("")


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("swaps", [True, False])
def test_names_are_taken_and_exchanged(calls: SystemCalls, disk: Disk, swaps: bool, links: bool) -> None:
    """On file systems with and without hard links, and with and without an exchange of names."""
    storage = LocalStorage(calls.mount(disk, swaps=swaps, links=links))
    assert [True, True, False] == [storage.link_new(f"a/{name}", name.encode()) for name in "121"]
    assert storage.exchange("a/1", b"1", b"newer")
    assert not storage.exchange("a/1", b"1", b"newest")
    assert swaps == storage.swap("a/1", "a/2")
    assert (b"2" if swaps else b"newer") == storage.read("a/1")


class TestLocalStorageOnASimulatedDisk(StorageContract):
    """The same as on a real disk, also where a call moves half of what it could."""

    @pytest.fixture
    def storage(self, calls: SystemCalls, disk: Disk) -> LocalStorage:
        return LocalStorage(calls.mount(disk))


def test_a_directory_that_is_made_lasts_with_what_leads_to_it(calls: SystemCalls, disk: Disk) -> None:
    """And so does the root of a storage, whoever made it."""
    root = Path(calls.mount(disk), "runs", "first")
    root.mkdir(parents=True)
    storage = LocalStorage(root)
    storage.make_dir("")
    storage.make_dir("tag/model")
    after = crashed(disk)
    assert after.is_dir("runs/first/tag/model")


def test_a_file_lasts_once_its_directory_is_synced(calls: SystemCalls, disk: Disk) -> None:
    storage = LocalStorage(calls.mount(disk))
    storage.make_dir("a")
    storage.write("a/kept", b"1")
    storage.sync_dir("a")
    storage.write("a/lost", b"1")
    after = crashed(disk)
    assert b"1" == after.read("a/kept")
    assert not after.is_file("a/lost")


def test_a_file_that_is_written_past_the_page_cache_lasts_too(calls: SystemCalls, disk: Disk) -> None:
    """Direct writes reach the disk, and its size does not: that takes a sync, as for any other file."""
    storage, nbytes = LocalStorage(calls.mount(disk)), 2**20
    with mmap.mmap(-1, nbytes) as memory:
        memory[:] = bytes(range(256)) * (nbytes // 256)
        writer = storage.create("a/large", nbytes)
        with memoryview(memory) as view:
            writer.write_at(0, view)
            assert vars(writer)["_direct"] >= 0
            writer.close()
            for folder in ("a", ""):
                storage.sync_dir(folder)
            assert bytes(view) == crashed(disk).read("a/large")


def test_flags_of_open_mean_what_they_mean(calls: SystemCalls, disk: Disk) -> None:
    """A file is made by O_CREAT alone, is refused by O_EXCL where it is, and written to only if it was opened so."""
    path = os.path.join(calls.mount(disk), "file")
    with pytest.raises(FileNotFoundError):
        os.open(path, os.O_WRONLY)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.pwrite(fd, b"1234", 0)
    os.close(fd)
    with pytest.raises(FileExistsError):
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.pwrite(fd, b"5", 0)
    os.close(fd)
    with pytest.raises(NotADirectoryError):
        os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def test_a_tree_that_is_renamed_while_it_is_removed_goes_all_the_same(calls: SystemCalls, disk: Disk) -> None:
    """shutil.rmtree works by descriptors of directories, which stay what they are."""
    moved: list[Callable[[], None]] = []

    def turn(call: str, path: str) -> None:
        if call == "unlink" and moved:
            moved.pop()()

    root = calls.mount(disk, turn)
    LocalStorage(root).write("a/b/one", b"1")
    LocalStorage(root).write("a/b/two", b"2")
    moved.append(lambda: disk.rename("a/b", "a/c"))
    shutil.rmtree(os.path.join(root, "a"), ignore_errors=True)
    assert [] == disk.files("")


def test_a_lease_that_is_moved_aside_comes_back_before_anybody_takes_its_name() -> None:
    """Of jobs that take a dead one's lease at the same time, one thought that it held what another one had."""
    for seed in (371, 424, 756):
        run(LeaseSchedule.of(seed))
    for seed in (226, 424, 543):
        run(LeaseSchedule.of_system_calls(seed))


def test_what_was_moved_aside_and_is_another_one_comes_back(calls: SystemCalls, disk: Disk) -> None:
    """Somebody else replaces a file between the look and the rename."""
    other = LocalStorage(calls.mount(disk))
    swapped: list[str] = []

    def turn(call: str, path: str) -> None:
        if call == "rename" and not swapped:
            swapped.append(path)
            other.write("file", b"another")

    storage = LocalStorage(calls.mount(disk, turn))
    other.write("file", b"old")
    assert not storage.exchange("file", b"old", b"new")
    assert b"another" == other.read("file")
    assert ["file"] == disk.files("")


def test_a_seed_is_replayed_exactly() -> None:
    traces = [run(DiskSchedule.of_system_calls(4)).trace for _ in range(2)]
    assert len(traces[0]) > 100
    assert traces[0] == traces[1]


def test_the_promises_hold_under_any_schedule() -> None:
    """``python -m tests.simulation --place local`` runs more of them."""
    assert [] == counted("local", range(SCHEDULES)).failures


def test_the_lease_is_held_by_one_in_any_schedule() -> None:
    for seed in range(30):
        run(LeaseSchedule.of_system_calls(seed))


def test_names_do_not_depend_on_other_threads() -> None:
    with SystemCalls().installed():
        first = uuid.uuid4()
        other = threading.Thread(target=uuid.uuid4)
        other.start()
        other.join()
        assert uuid.uuid4().int - first.int == 1 << 80


def test_the_promises_hold_in_states_that_a_crash_leaves() -> None:
    """At some of the moments at which power may be lost during a save."""
    count = enumerated(SAVES[2], every=EVERY, most=MOST, local=True)
    assert [] == count.failures
    assert 1 < count.looked_at


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("work", SAVES, ids=lambda work: work.name)
def test_the_promises_hold_in_every_state_that_a_crash_leaves(work: object) -> None:
    assert [] == enumerated(work, local=True).failures  # type: ignore[arg-type]
