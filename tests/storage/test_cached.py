"""Copies on a local disk that processes share: complete, of one version of a tag, and bounded in number."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nxd_ckpt.errors import PartNotFound
from nxd_ckpt.storage.cached import CachedStorage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, delaying, recording
from tests.support.processes import run_program

LARGE = bytes(range(256)) * 80_000
"""More than two pieces of 8 MiB."""
FILES = {"tag/model/a.pt": LARGE, "tag/model/b.pt": b"b" * 10, "tag/model/empty": b"", "tag/optim/c.pt": b"c" * 100}

KILLED = """
import sys
from nxd_ckpt.storage.cached import CachedStorage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, killing

inner = HookedStorage(LocalStorage(sys.argv[1]), killing("read_ranges", "*/a.pt"))
CachedStorage(inner, "tag", b"1", sys.argv[2]).fetch(["tag/model/a.pt"], lambda nbytes: None)
"""


def filled() -> MemoryStorage:
    storage = MemoryStorage()
    for key, data in FILES.items():
        storage.write(key, data)
    return storage


def ignore(nbytes: int) -> None:
    """Progress that nobody follows."""


def read_keys(log: list[Operation]) -> set[str]:
    return {operation.key for operation in log if operation.name in ("read", "read_into", "open")}


def test_what_was_fetched_is_read_from_the_copy(tmp_path: Path) -> None:
    """The same bytes, without asking the store again; what was not fetched still comes from there."""
    log: list[Operation] = []
    inner = HookedStorage(filled(), recording(log))
    progress: list[int] = []
    with CachedStorage(inner, "tag", b"1", tmp_path) as cached:
        keys = ["tag/model/a.pt", "tag/model/b.pt", "tag/model/empty"]
        assert len(LARGE) + 10 == cached.fetch(keys, progress.append) == sum(progress)
        log.clear()
        assert {key: FILES[key] for key in keys} == {key: cached.read(key) for key in keys}
        assert [len(LARGE), 10, 0] == [cached.size(key) for key in keys]
        assert set() == read_keys(log)
        assert FILES["tag/optim/c.pt"] == cached.read("tag/optim/c.pt")
        assert {"tag/optim/c.pt"} == read_keys(log)


def test_a_file_is_downloaded_once_for_all(tmp_path: Path) -> None:
    """Several that want the same files at once, and one that comes later, share one download of each."""
    log: list[Operation] = []
    inner = HookedStorage(HookedStorage(filled(), delaying("read_ranges", "*", 0.05)), recording(log))
    together = threading.Barrier(4)

    def fetch(_: int) -> int:
        with CachedStorage(inner, "tag", b"1", tmp_path) as cached:
            together.wait()
            nbytes = cached.fetch(FILES, ignore)
            assert dict(FILES) == {key: cached.read(key) for key in FILES}
            return nbytes

    with ThreadPoolExecutor(4) as threads:
        downloaded = list(threads.map(fetch, range(4)))
    with CachedStorage(inner, "tag", b"1", tmp_path) as cached:
        assert 0 == cached.fetch(FILES, ignore)
    total = sum(map(len, FILES.values()))
    assert total == sum(downloaded)
    assert total == sum(operation.nbytes for operation in log if operation.name == "read_ranges")


def test_a_downloader_that_dies_holds_up_nobody(tmp_path: Path) -> None:
    """Its lock is freed with it; the next one begins anew, and never takes half a file."""
    store, work = tmp_path / "store", tmp_path / "work"
    LocalStorage(store).write("tag/model/a.pt", LARGE)
    assert -signal.SIGKILL == run_program(KILLED, store, work).returncode
    assert [] == list(work.rglob("files/*"))
    with CachedStorage(LocalStorage(store), "tag", b"1", work) as cached:
        assert len(LARGE) == cached.fetch(["tag/model/a.pt"], ignore)
        assert LARGE == cached.read("tag/model/a.pt")


def test_a_tag_that_was_saved_again_is_another(tmp_path: Path) -> None:
    """Copies of its earlier version are not taken for it, and go when nobody reads them any more."""
    inner = filled()
    with CachedStorage(inner, "tag", b"1", tmp_path) as first:
        first.fetch(["tag/model/b.pt"], ignore)
        inner.write("tag/model/b.pt", b"new")
        with CachedStorage(inner, "tag", b"2", tmp_path) as second:
            second.fetch(["tag/model/b.pt"], ignore)
            assert (b"b" * 10, b"new") == (first.read("tag/model/b.pt"), second.read("tag/model/b.pt"))
    with CachedStorage(inner, "tag", b"2", tmp_path) as second:
        assert 0 == second.fetch(["tag/model/b.pt"], ignore)
        assert not first.folder.exists()


def test_one_tag_of_a_store_is_kept(tmp_path: Path) -> None:
    """Opening a tag removes the copies of others of the same store, but not those of another store."""
    one, other = filled(), filled()
    for inner in (one, other):
        with CachedStorage(inner, "tag", b"1", tmp_path) as cached:
            cached.fetch(["tag/model/b.pt"], ignore)
    with CachedStorage(one, "next", b"1", tmp_path):
        copies = list(tmp_path.rglob("files/tag/model/b.pt"))
    assert 1 == len(copies)


def test_discarded_copies_are_downloaded_anew(tmp_path: Path) -> None:
    """What turned out to be damaged must not be met again."""
    with CachedStorage(filled(), "tag", b"1", tmp_path) as cached:
        cached.fetch(["tag/model/b.pt"], ignore)
        (cached.folder / "files/tag/model/b.pt").write_bytes(b"damaged")
        cached.discard()
        assert 10 == cached.fetch(["tag/model/b.pt"], ignore)
        assert FILES["tag/model/b.pt"] == cached.read("tag/model/b.pt")


def test_a_failing_download_is_raised_and_leaves_no_file(tmp_path: Path) -> None:
    """One file of several that is not there: nothing half is kept, and what is whole need not come again."""
    with CachedStorage(filled(), "tag", b"1", tmp_path) as cached:
        with pytest.raises(PartNotFound):
            cached.fetch(["tag/model/absent", "tag/model/b.pt"], ignore)
        cached.fetch(["tag/model/b.pt"], ignore)
        assert FILES["tag/model/b.pt"] == cached.read("tag/model/b.pt")
        assert [] == list(cached.folder.rglob("files/tag/model/absent"))
