"""A store as one survey shows it: the same answers as the store's own, from few requests."""

import pytest

from nxd_ckpt.storage.base import DirEntry
from nxd_ckpt.tag.directory import surveyed
from nxd_ckpt.testing.storage import MemoryStorage

KEYS = ("a/done", "a/model/dp_rank_00.pt", "b/manifest.json", "top", ".nxd_ckpt/lease.json")


@pytest.fixture
def store() -> MemoryStorage:
    """Two directories, a file beside them, and one in a hidden directory."""
    storage = MemoryStorage()
    for key in KEYS:
        storage.write(key, key.encode())
    return storage


def test_a_survey_answers_as_the_store_does(store: MemoryStorage) -> None:
    now = surveyed(store)
    assert now is not store
    for key in ("", "a", "a/model", "b", "absent", ".nxd_ckpt"):
        assert (store.list(key), store.is_dir(key)) == (now.list(key), now.is_dir(key))
    for key in (*KEYS, "a", "a/model", "a/absent", "absent/key"):
        assert store.is_file(key) == now.is_file(key)
    for key in KEYS:
        assert (store.read(key), store.size(key), store.time(key)) == (now.read(key), now.size(key), now.time(key))
    for key in ("a/absent", "a/model", "absent/key"):
        with pytest.raises(FileNotFoundError, match=key):
            now.read(key)


def test_a_survey_stays_as_it_was(store: MemoryStorage) -> None:
    """What comes later is not seen; a file that was replaced counts as missing."""
    now = surveyed(store)
    for key in ("a/done", "a/later", "b/manifest.json"):
        store.write(key, b"new")
    assert [DirEntry("done", False), DirEntry("model", True)] == now.list("a")
    for key in ("a/done", "b/manifest.json"):
        with pytest.raises(FileNotFoundError, match=key):
            now.read(key)
    assert b"new" == surveyed(store).read("b/manifest.json")
