"""The simulated disk: the contract of storages, and what a crash leaves."""

import errno
import time
from collections.abc import Callable

import pytest

from nxd_ckpt.storage.base import Storage
from nxd_ckpt.testing.contract import StorageContract
from tests.simulation.world import Change, Disk, DiskStorage, contents


class TestDiskStorage(StorageContract):
    """It is a storage as any other."""

    @pytest.fixture
    def storage(self) -> Storage:
        return DiskStorage(Disk(time.time))


def crashed(disk: Disk, lasts: Callable[[Change], bool] = lambda change: False) -> DiskStorage:
    """The disk after a loss of power of which those changes survive that ``lasts`` says, and no bytes but synced ones.
    """
    disk.crash(lasts, lambda file: file.synced)
    return DiskStorage(disk)


def test_a_name_lasts_from_the_sync_of_its_directory_on() -> None:
    """The bytes last from the end of the write on, the name only then."""
    disk = Disk(time.time)
    storage = DiskStorage(disk)
    storage.make_dir("a")
    storage.write("a/lost", b"1")
    assert not crashed(disk).is_file("a/lost")
    storage.write("a/kept", b"1")
    storage.sync_dir("a")
    assert b"1" == crashed(disk).read("a/kept")


def test_a_rename_is_there_or_not_and_lasts_once_its_directory_is_synced() -> None:
    """Until then either name may be what a crash leaves, never both or none."""
    for survives in (False, True):
        disk = Disk(time.time)
        storage = DiskStorage(disk)
        storage.make_dir("a/old")
        storage.rename("a/old", "a/new")
        after = crashed(disk, lambda change, survives=survives: survives)  # type: ignore[misc]
        assert [survives, not survives] == [after.is_dir("a/new"), after.is_dir("a/old")]
    storage.sync_dir("a")
    assert crashed(disk).is_dir("a/new")


def test_what_is_not_synced_may_be_torn() -> None:
    """A crash leaves of a file what was synced, all of it, a part, or zeros."""
    disk = Disk(time.time)
    storage = DiskStorage(disk)
    writer = storage.create("file", 4)
    writer.write_at(0, b"1234")
    writer.settle()
    file = disk.file("file")
    assert [b"", b"1234", b"12", b"12\0\0", b"\0\0\0\0"] == contents(file)


def test_a_sync_that_failed_drops_the_pages() -> None:
    """The next one succeeds, and brings nothing to the disk."""

    def turn(call: str, path: str) -> None:
        if call == "fsync":
            raise OSError(errno.EIO, "Input/output error", path)

    disk = Disk(time.time)
    writer = DiskStorage(disk, turn).create("file", 4)
    writer.write_at(0, b"1234")
    file = disk.file("file")
    with pytest.raises(OSError, match="Input/output error"):
        writer.close()
    file.sync()
    assert b"" == file.synced


def test_changes_of_one_name_keep_their_order() -> None:
    """One that is lost takes those of the same name that follow with it."""
    disk = Disk(time.time)
    storage = DiskStorage(disk)
    storage.make_dir("a")
    storage.make_dir("b")
    disk.create("a/file")
    storage.rename("a/file", "b/file")
    assert not crashed(disk, lambda change: change.what.startswith("rename")).is_file("b/file")
