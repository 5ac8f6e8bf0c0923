"""The storage in memory: as awkward as the contract of storages allows."""

import pytest

from nxd_ckpt.storage.base import DirEntry
from nxd_ckpt.testing.storage import MemoryStorage


def test_one_name_is_one_store() -> None:
    """What is written through one is read through the other; without a name it is a store of its own."""
    one = MemoryStorage()
    one.write("a/b", b"1")
    assert b"1" == MemoryStorage(one.name).read("a/b")
    assert [] == MemoryStorage().keys


def test_an_object_store_has_keys_and_nothing_else() -> None:
    """A directory is there while a key lies below it; nothing is renamed, and times are whole seconds."""
    store = MemoryStorage()
    store.make_dir("empty")
    store.write("tag/model/x", b"1")
    store.set_time("tag/model/x", 1.5)
    assert [DirEntry("tag", True)] == store.list()
    assert (False, True) == (store.is_dir("empty"), store.is_dir("tag/model"))
    assert store.time("tag/model/x").is_integer()
    with pytest.raises(OSError, match="has no rename"):
        store.rename("tag", "other")
    store.remove("tag")
    assert not store.is_dir("tag")


def test_a_writer_looks_into_memory_until_it_has_settled() -> None:
    """Whoever reuses memory before that has written something else; whoever settles first has not."""
    store, memory = MemoryStorage(), bytearray(b"1")
    for key, settles in (("early", False), ("late", True)):
        memory[:] = b"1"
        writer = store.create(key, 1)
        writer.write_at(0, memoryview(memory))
        if settles:
            writer.settle()
        memory[:] = b"2"
        writer.close()
    assert (b"2", b"1") == (store.read("early"), store.read("late"))


def test_what_a_writer_left_is_unfinished_until_it_is_discarded() -> None:
    """It shows nowhere else, and cannot be completed afterwards."""
    store = MemoryStorage()
    writer = store.create("tag/x", 1)
    writer.write_at(0, b"1")
    assert (["tag/x"], []) == (store.unfinished, store.keys)
    store.discard_unfinished("tag")
    with pytest.raises(OSError, match="discarded"):
        writer.close()
    assert ([], []) == (store.unfinished, store.keys)
