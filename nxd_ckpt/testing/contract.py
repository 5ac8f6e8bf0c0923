"""The tests that every `Storage` passes; needs pytest.

Subclass them for your own::

    from nxd_ckpt.testing.contract import StorageContract

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def storage(self, tmp_path):
            return MyStorage(tmp_path)

Each test gets an empty storage of its own. Promises that only a local disk can keep (no links, no FIFOs, durability)
are not tested.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from threading import Barrier

import pytest

from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import DirEntry, Storage, Version, Writer
from nxd_ckpt.storage.s3.upload import PART

LARGE = os.urandom(2 * PART + 12_345)
"""More bytes than a store takes by one request."""


class StorageContract:
    """Tests of the promises of `nxd_ckpt.storage.base`, one test a promise."""

    notices_a_taken_large_key = True
    """True if closing a large file raises FileExistsError for a key that was taken meanwhile, as for a small one.

    False for a store that streams large files and cannot tell.
    """

    @pytest.fixture
    def storage(self) -> Storage:
        """The storage under test, empty. Override it."""
        raise NotImplementedError(f"{type(self).__name__}: override the fixture `storage`, to return yours, empty")

    def test_a_small_file_is_written_whole_and_replaced_at_once(self, storage: Storage) -> None:
        """Files, empty ones too, are told apart from directories."""
        storage.make_dir("a")
        storage.write("a/b", b"first")
        storage.write("a/b", b"second")
        storage.write("a/empty", b"")
        assert b"second" == storage.read("a/b")
        assert b"" == storage.read("a/empty")
        assert [6, 0] == [storage.size("a/b"), storage.size("a/empty")]
        assert [True, False] == [storage.is_file("a/b"), storage.is_dir("a/b")]
        assert [False, True] == [storage.is_file("a"), storage.is_dir("a")]
        storage.sync_dir("a")

    def test_a_file_that_is_longer_than_expected_is_not_read(self, storage: Storage) -> None:
        """MalformedFile, which names the key."""
        storage.write("file", b"0123456789")
        assert b"0123456789" == storage.read("file", limit=10)
        with pytest.raises(MalformedFile, match="file"):
            storage.read("file", limit=9)

    @pytest.mark.parametrize("cuts", [[], [100], [PART], [PART - 1, PART, PART + 1, 2 * PART + 7]])
    def test_a_large_file_is_written_in_pieces_of_any_order(self, storage: Storage, cuts: list[int]) -> None:
        """Cut a file at no place, at one, and at edges of parts."""
        _write(storage, "folder/large", LARGE, cuts)
        assert len(LARGE) == storage.size("folder/large")
        assert LARGE == storage.read("folder/large")

    def test_memory_may_change_once_a_writer_has_settled(self, storage: Storage) -> None:
        """Change the memory of complete and of incomplete parts."""
        memory = bytearray(LARGE)
        writer = storage.create("file", len(LARGE) + 10)
        writer.write_at(0, memoryview(memory))
        writer.settle()
        memory[:] = bytes(len(memory))
        writer.write_at(len(LARGE), b"0123456789")
        writer.close()
        assert LARGE + b"0123456789" == storage.read("file")

    def test_what_is_not_synced_is_seen_by_all(self, storage: Storage) -> None:
        """Write without syncs, if the storage can leave them out, what the storage itself reads and lists."""
        storage.without_syncs().write("folder/note", b"1")
        assert b"1" == storage.read("folder/note")
        assert [DirEntry("note", False)] == storage.list("folder")

    def test_a_duplicate_lives_on_without_its_source(self, storage: Storage) -> None:
        """Duplicate the requested version, under a free key, and nothing else, if the storage can."""
        if not storage.duplicates:
            pytest.skip("it cannot")

        def duplicated(version: Version, target: str) -> bool:
            with suppress(OSError):
                return storage.duplicate("one/file", version, target)
            return False

        data = LARGE[: 2**16]
        _write(storage, "one/file", data, [])
        storage.write("taken", b"x")
        version = storage.version("one/file")
        assert len(data) == version.nbytes
        assert duplicated(version, "other/file")
        assert version == storage.version("one/file")
        assert not duplicated(version, "taken")
        storage.remove("one")
        assert data == storage.read("other/file")
        assert not duplicated(version, "third")
        storage.write("one/file", bytes(len(data)))
        assert not duplicated(version, "third")
        assert [False, b"x"] == [storage.is_file("third"), storage.read("taken")]

    @pytest.mark.parametrize("nbytes", [10, len(LARGE)])
    @pytest.mark.parametrize("missing", [1, -1])
    def test_a_file_of_the_wrong_length_is_refused(self, storage: Storage, nbytes: int, missing: int) -> None:
        """Too short or too long is an OSError, when it is closed at the latest."""
        writer = storage.create("file", nbytes + missing)
        with pytest.raises(OSError, match="file"):  # noqa: PT012
            writer.write_at(0, LARGE[:nbytes])
            writer.close()
        writer.abort()

    @pytest.mark.parametrize("nbytes", [10, len(LARGE)])
    def test_a_writer_that_gives_up_leaves_no_file(self, storage: Storage, nbytes: int) -> None:
        """None that claims to be complete, and the key can be written."""
        writer = storage.create("file", nbytes)
        writer.write_at(0, LARGE[: nbytes - 1])
        writer.abort()
        writer.abort()
        assert not storage.is_file("file")
        _write(storage, "file", b"other", [])
        assert b"other" == storage.read("file")

    def test_a_writer_that_expects_nothing_writes_an_empty_file(self, storage: Storage) -> None:
        """Without any ``write_at``."""
        storage.create("file", 0).close()
        assert b"" == storage.read("file")

    def test_any_ranges_are_read_in_any_order(self, storage: Storage) -> None:
        """Near each other or far apart; past the end is EOFError, which names the key."""
        _write(storage, "file", LARGE, [])
        ranges = [(0, 10), (10, 0), (15, 5), (500_000, 3_000_000), (len(LARGE) - 4, 4), (7, 9)]
        assert [LARGE[offset : offset + length] for offset, length in ranges] == _read(storage, "file", ranges)
        memory = bytearray(8)
        storage.read_into("file", 100, memoryview(memory))
        assert LARGE[100:108] == memory
        for offset in (len(LARGE) - 7, len(LARGE) + 7):
            with pytest.raises(EOFError, match="file"):
                storage.read_into("file", offset, memoryview(memory))

    def test_a_reader_never_mixes_two_files(self, storage: Storage) -> None:
        """Read on after another file took the key: the reader reads its own file, or raises OSError."""
        storage.write("file", b"a" * 100)
        memory = bytearray(100)
        with closing(storage.open("file")) as reader:
            time.sleep(0.002)  # some tell versions apart by the time of writing
            storage.write("file", b"b" * 100)
            try:
                reader.read_ranges([(0, memoryview(memory))])
            except OSError:
                return
        assert b"a" * 100 == memory

    def test_a_missing_key_is_named(self, storage: Storage) -> None:
        """Get FileNotFoundError; an absent directory is empty, and removing it is fine."""
        memory = memoryview(bytearray(1))
        calls: list[Callable[[str], object]] = [storage.read, storage.size, storage.time, storage.open]
        calls.append(lambda key: storage.read_into(key, 0, memory))
        for call in calls:
            with pytest.raises(FileNotFoundError, match="absent"):
                call("absent")
        assert [] == storage.list("absent")
        assert [False, False] == [storage.is_file("absent"), storage.is_dir("absent")]
        storage.remove("absent")
        storage.discard_unfinished("absent")

    def test_a_listing_holds_the_names_directly_below_in_order(self, storage: Storage) -> None:
        """Names that merely begin alike are others."""
        for key in ("run/b", "run/a/x", "run/a/y/z", "run-2", "running/c"):
            storage.write(key, b"1")
        assert [DirEntry("a", True), DirEntry("b", False)] == storage.list("run")
        assert [DirEntry("x", False), DirEntry("y", True)] == storage.list("run/a")
        assert [DirEntry("run", True), DirEntry("run-2", False), DirEntry("running", True)] == storage.list()

    def test_a_directory_is_removed_with_all_below_and_nothing_beside(self, storage: Storage) -> None:
        """A file is removed likewise."""
        for key in ("run/b", "run/a/x", "run/a/y/z", "run-2"):
            storage.write(key, b"1")
        storage.remove("run/a")
        assert [DirEntry("b", False)] == storage.list("run")
        storage.remove("run/b")
        storage.remove("run")
        assert [DirEntry("run-2", False)] == storage.list()

    def test_times_are_seconds_since_the_epoch(self, storage: Storage) -> None:
        """Get the time of the last change, to the second, or 0 if unknown; only file systems let it be set."""
        before = time.time()
        storage.write("file", b"1")
        seconds = storage.time("file")
        assert seconds == 0 or before - 1.5 <= seconds <= time.time() + 1.5
        storage.set_time("file", 1_000_000_000)
        assert (storage.time("file") == 1_000_000_000) == storage.renames

    def test_a_directory_is_renamed_where_the_storage_can(self, storage: Storage) -> None:
        """Never over another; a store that cannot refuses, and changes nothing."""
        storage.write("a/x", b"1")
        if not storage.renames:
            with pytest.raises(OSError, match="rename"):
                storage.rename("a", "b")
            assert b"1" == storage.read("a/x")
            return
        storage.rename("a", "b")
        assert b"1" == storage.read("b/x")
        storage.write("a/x", b"2")
        with pytest.raises(FileExistsError):
            storage.rename("a", "b")

    def test_only_one_links_a_new_file(self, storage: Storage) -> None:
        """Let eight threads try at once."""
        storage.make_dir("folder")
        contents = [bytes([number]) for number in range(8)]
        won = _at_once([partial(storage.link_new, "folder/key", data) for data in contents])
        assert [storage.read("folder/key")] == [data for data, first in zip(contents, won, strict=True) if first]
        assert not storage.link_new("folder/key", b"later")

    def test_only_one_exchanges(self, storage: Storage) -> None:
        """Let eight threads expect the same content; other contents, and a missing file, are refused."""
        storage.write("key", b"before")
        contents = [bytes([number]) for number in range(8)]
        won = _at_once([partial(storage.exchange, "key", b"before", data) for data in contents])
        assert [storage.read("key")] == [data for data, first in zip(contents, won, strict=True) if first]
        assert not storage.exchange("key", b"before", b"later")
        assert not storage.exchange("absent", b"before", b"later")
        assert not storage.is_file("absent")

    @pytest.mark.parametrize("key", ["folder", "folder/key"])
    def test_what_is_to_stay_is_not_removed(self, storage: Storage, key: str) -> None:
        """Remove a file or a directory, and refuse at the last moment. An absent key is not asked about."""
        storage.write("folder/key", b"1")
        assert not storage.remove_if(key, lambda: False)
        assert b"1" == storage.read("folder/key")
        assert storage.remove_if(key, lambda: True)
        assert not storage.is_file("folder/key")
        assert storage.remove_if("absent", lambda: True)

    @pytest.mark.parametrize("key", ["folder", "folder/key"])
    def test_what_comes_while_it_is_decided_is_not_removed(self, storage: Storage, key: str) -> None:
        """Write another file under the same key, and one beside it, if the storage can tell."""
        if type(storage).remove_if is Storage.remove_if:
            pytest.skip("this storage cannot tell what came since")

        def change() -> bool:
            storage.write("folder/key", b"other")
            storage.write("folder/new", b"new")
            return True

        storage.write("folder/key", b"1")
        storage.write("folder/old", b"1")
        assert storage.remove_if(key, change)
        assert (b"other", b"new") == (storage.read("folder/key"), storage.read("folder/new"))
        assert (key == "folder") != storage.is_file("folder/old")

    @pytest.mark.parametrize("nbytes", [10, 40 * 2**20])
    def test_a_key_that_was_taken_meanwhile_stays_with_whoever_came_first(self, storage: Storage, nbytes: int) -> None:
        """The second writer is refused, when it begins or when it closes. Either file is whole in any case."""
        tells = nbytes == 10 or self.notices_a_taken_large_key
        first = storage.create("key", nbytes)
        first.write_at(0, b"1" * nbytes)
        with pytest.raises(FileExistsError, match="key") if tells else suppress(FileExistsError):
            _come_second(storage, nbytes, first)
        assert storage.read("key") in ([b"1" * nbytes] if tells else [b"1" * nbytes, b"2" * nbytes])

    def test_many_threads_write_and_read_files_of_their_own(self, storage: Storage) -> None:
        """Eight at once."""

        def there_and_back(number: int) -> bool:
            data = LARGE[number * 1000 :][:300_000]
            _write(storage, f"folder/{number}", data, [1000])
            return data == storage.read(f"folder/{number}")

        assert [True] * 8 == _at_once([partial(there_and_back, number) for number in range(8)])

    def test_it_says_how_many_reads_at_once_serve_it(self, storage: Storage) -> None:
        """At least one; and of how many bytes."""
        assert storage.concurrency >= 1
        assert storage.read_nbytes >= 1


def _write(storage: Storage, key: str, data: bytes, cuts: Sequence[int]) -> None:
    """Write ``data`` in pieces that end at ``cuts``, the last piece first."""
    writer = storage.create(key, len(data))
    for begin, end in reversed(list(pairwise([0, *cuts, len(data)]))):
        writer.write_at(begin, memoryview(data)[begin:end])
    writer.close()


def _read(storage: Storage, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes at each (offset, length)."""
    memories = [bytearray(length) for _, length in ranges]
    with closing(storage.open(key)) as reader:
        reader.read_ranges([(offset, memoryview(memory)) for (offset, _), memory in zip(ranges, memories, strict=True)])
    return [bytes(memory) for memory in memories]


def _at_once(calls: Sequence[Callable[[], bool]]) -> list[bool]:
    """Return the results of all calls, started together."""
    start = Barrier(len(calls))

    def run(call: Callable[[], bool]) -> bool:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def _come_second(storage: Storage, nbytes: int, first: Writer) -> None:
    try:
        second = storage.create("key", nbytes)
    finally:
        first.close()
    second.write_at(0, b"2" * nbytes)
    try:
        second.close()
    finally:
        second.abort()
