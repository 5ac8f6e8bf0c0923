"""What ``nxd_ckpt.storage.base`` promises, of every storage there is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import pytest

from nxd_ckpt.storage.base import DirEntry, Storage, Writer
from nxd_ckpt.storage.s3.upload import PART
from nxd_ckpt.testing.memory import MemoryStorage
from tests.rigs.s3_server import S3Server
from tests.storage.storages import MAKERS

pytestmark = [pytest.mark.plain, pytest.mark.once]

LARGE = os.urandom(2 * PART + 12_345)


@pytest.fixture(params=list(MAKERS))
def storage(request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> Storage:
    return MAKERS[request.param](tmp_path / "run", s3_server)


def write(storage: Storage, key: str, data: bytes, cuts: list[int]) -> None:
    """Write ``data`` in pieces that end at ``cuts``, the last piece first."""
    writer = storage.create(key, len(data))
    edges = [0, *cuts, len(data)]
    for begin, end in reversed(list(pairwise(edges))):
        writer.write_at(begin, memoryview(data)[begin:end])
    writer.close()


def read(storage: Storage, key: str, places: list[tuple[int, int]]) -> list[bytes]:
    """What lies at each (offset, length)."""
    memories = [bytearray(length) for _, length in places]
    with closing(storage.open(key)) as reader:
        reader.read_ranges([(offset, memoryview(memory)) for (offset, _), memory in zip(places, memories, strict=True)])
    return [bytes(memory) for memory in memories]


def at_once(calls: list[Callable[[], bool]]) -> list[bool]:
    """What each returns, all started together."""
    start = Barrier(len(calls))

    def run(call: Callable[[], bool]) -> bool:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def test_small_files(storage: Storage) -> None:
    """Are written whole, replaced at once, and told apart from directories."""
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


@pytest.mark.parametrize("cuts", [[], [100], [PART], [PART - 1, PART, PART + 1, 2 * PART + 7]])
def test_large_files(storage: Storage, cuts: list[int]) -> None:
    """In one piece or in several, in any order, at edges of parts or not."""
    write(storage, "folder/large", LARGE, cuts)
    assert LARGE == storage.read("folder/large")
    assert len(LARGE) == storage.size("folder/large")


def test_memory_may_change_once_a_writer_has_settled(storage: Storage) -> None:
    """Whether the part that it belongs to was complete or not."""
    memory = bytearray(LARGE)
    writer = storage.create("file", len(LARGE) + 10)
    writer.write_at(0, memoryview(memory))
    writer.settle()
    memory[:] = bytes(len(memory))
    writer.write_at(len(LARGE), b"0123456789")
    writer.close()
    assert LARGE + b"0123456789" == storage.read("file")


@pytest.mark.parametrize("nbytes", [10, len(LARGE)])
@pytest.mark.parametrize("missing", [1, -1])
def test_a_file_of_the_wrong_length(storage: Storage, nbytes: int, missing: int) -> None:
    """Is an error when it is closed, at the latest."""
    writer = storage.create("file", nbytes + missing)
    with pytest.raises(OSError, match="file"):  # noqa: PT012
        writer.write_at(0, LARGE[:nbytes])
        writer.close()
    writer.abort()


@pytest.mark.parametrize("nbytes", [10, len(LARGE)])
def test_a_writer_that_gives_up(storage: Storage, nbytes: int) -> None:
    """Leaves no file that claims to be complete, and the key can be written."""
    writer = storage.create("file", nbytes)
    writer.write_at(0, LARGE[: nbytes - 1])
    writer.abort()
    writer.abort()
    assert not storage.is_file("file")
    write(storage, "file", b"other", [])
    assert b"other" == storage.read("file")


def test_empty_file(storage: Storage) -> None:
    """A writer that gets nothing and expects nothing."""
    storage.create("file", 0).close()
    assert b"" == storage.read("file")


def test_ranges(storage: Storage) -> None:
    """Any ranges in any order, near each other or far apart; past the end is EOFError."""
    write(storage, "file", LARGE, [])
    places = [(0, 10), (10, 0), (15, 5), (500_000, 3_000_000), (len(LARGE) - 4, 4), (7, 9)]
    assert [LARGE[offset : offset + length] for offset, length in places] == read(storage, "file", places)
    memory = bytearray(8)
    storage.read_into("file", 100, memoryview(memory))
    assert LARGE[100:108] == memory
    with pytest.raises(EOFError, match="file"):
        storage.read_into("file", len(LARGE) - 7, memoryview(memory))
    with pytest.raises(EOFError, match="file"):
        storage.read_into("file", len(LARGE) + 7, memoryview(memory))


def test_two_files_are_never_mixed(storage: Storage) -> None:
    """A reader goes on with the file that it opened, or says that it is gone."""
    storage.write("file", b"a" * 100)
    with closing(storage.open("file")) as reader:
        time.sleep(0.002)  # some tell versions apart by the time of writing
        storage.write("file", b"b" * 100)
        memory = bytearray(100)
        if storage.url.startswith(("s3:", "memory:")) and not isinstance(storage, MemoryStorage):
            with pytest.raises(OSError, match="replaced"):
                reader.read_ranges([(0, memoryview(memory))])
        else:
            reader.read_ranges([(0, memoryview(memory))])
            assert b"a" * 100 == memory


def test_missing(storage: Storage) -> None:
    """FileNotFoundError, which names the key; an absent directory is empty, and removing it is fine."""
    memory = memoryview(bytearray(1))
    for call in (storage.read, storage.size, storage.time, storage.open, lambda key: storage.read_into(key, 0, memory)):
        with pytest.raises(FileNotFoundError, match="absent"):
            call("absent")
    assert [] == storage.list("absent")
    assert [False, False] == [storage.is_file("absent"), storage.is_dir("absent")]
    storage.remove("absent")
    storage.discard_unfinished("absent")


def test_listing(storage: Storage) -> None:
    """Names directly below, sorted; names that merely begin alike are others."""
    for key in ("run/b", "run/a/x", "run/a/y/z", "run-2", "running/c"):
        storage.write(key, b"1")
    assert [DirEntry("a", True), DirEntry("b", False)] == storage.list("run")
    assert [DirEntry("x", False), DirEntry("y", True)] == storage.list("run/a")
    assert [DirEntry("run", True), DirEntry("run-2", False), DirEntry("running", True)] == storage.list()


def test_removing(storage: Storage) -> None:
    """A file, or a directory with all that lies below it, and nothing beside it."""
    for key in ("run/b", "run/a/x", "run/a/y/z", "run-2"):
        storage.write(key, b"1")
    storage.remove("run/a")
    assert [DirEntry("b", False)] == storage.list("run")
    storage.remove("run/b")
    storage.remove("run")
    assert [DirEntry("run-2", False)] == storage.list()


def test_times(storage: Storage) -> None:
    """Seconds since the epoch; those of a store have whole seconds and cannot be set."""
    before = time.time()
    storage.write("file", b"1")
    assert before - 1.5 <= storage.time("file") <= time.time() + 1.5
    storage.set_time("file", 1_000_000_000)
    assert (storage.time("file") == 1_000_000_000) == storage.renames


def test_renaming(storage: Storage) -> None:
    """Moves a directory where the storage can; where not, it is refused."""
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


def test_only_one_links_a_new_file(storage: Storage) -> None:
    """Of eight that try at once."""
    storage.make_dir("folder")
    contents = [bytes([number]) for number in range(8)]
    won = at_once([lambda data=data: storage.link_new("folder/key", data) for data in contents])  # type: ignore[misc]
    assert [storage.read("folder/key")] == [data for data, first in zip(contents, won, strict=True) if first]
    assert not storage.link_new("folder/key", b"later")


def test_only_one_exchanges(storage: Storage) -> None:
    """Of eight that expect the same; others, and those of a missing file, are told."""
    storage.write("key", b"before")
    contents = [bytes([number]) for number in range(8)]
    won = at_once([lambda data=data: storage.exchange("key", b"before", data) for data in contents])  # type: ignore[misc]
    assert [storage.read("key")] == [data for data, first in zip(contents, won, strict=True) if first]
    assert not storage.exchange("key", b"before", b"later")
    assert not storage.exchange("absent", b"before", b"later")
    assert not storage.is_file("absent")


def test_a_key_that_was_taken_meanwhile(storage: Storage) -> None:
    """Whoever comes second is refused, when it begins or when it closes, and the file of the first stays."""
    refuses_the_second(storage, 10)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "fsspec"])  # that one streams, and cannot tell
def test_a_large_file_whose_key_was_taken_meanwhile(name: str, tmp_path: Path, s3_server: S3Server) -> None:
    """As a small one, which takes another way where files go up in parts."""
    refuses_the_second(MAKERS[name](tmp_path / "run", s3_server), 40 * 2**20)


def refuses_the_second(storage: Storage, nbytes: int) -> None:
    first = storage.create("key", nbytes)
    first.write_at(0, b"1" * nbytes)
    with pytest.raises(FileExistsError, match="key"):
        come_second(storage, nbytes, first)
    assert b"1" * nbytes == storage.read("key")


def come_second(storage: Storage, nbytes: int, first: Writer) -> None:
    try:
        second = storage.create("key", nbytes)
    finally:
        first.close()
    second.write_at(0, b"2" * nbytes)
    try:
        second.close()
    finally:
        second.abort()


def test_many_threads(storage: Storage) -> None:
    """Write and read files of their own."""

    def there_and_back(number: int) -> bool:
        data = LARGE[number * 1000 :][:300_000]
        write(storage, f"folder/{number}", data, [1000])
        return data == storage.read(f"folder/{number}")

    assert [True] * 8 == at_once([lambda number=number: there_and_back(number) for number in range(8)])  # type: ignore[misc]


def test_it_says_how_many_reads_serve_it(storage: Storage) -> None:
    """At least one."""
    assert storage.concurrency >= 1
