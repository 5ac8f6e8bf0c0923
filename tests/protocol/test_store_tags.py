"""A store without renames: which tags there are, in which order, and which may be replaced."""

import io
from collections import Counter
from itertools import pairwise

import pytest
import torch

from nxd_ckpt.tag.choosing import choose_tag, open_complete_tag
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, failing, recording
from tests.protocol.stores import Process, complete_tags, value_in

MODEL = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"


@pytest.fixture
def store() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def job(store: MemoryStorage) -> Process:
    return Process(store)


def test_done_comes_last_and_goes_first(store: MemoryStorage, job: Process) -> None:
    """Intent < what was there goes, ``done`` before all else < mark < data < index < manifest < done; and no votes."""
    assert None is job.save("t", 1)
    job.log.clear()
    assert None is job.save("t", 2, overwrite=True)
    # What is left of the first save may still be cleared away, on a thread of its own.
    attempt = next(one.key for one in job.log if one.name == "write" and "/staging/" in one.key).rpartition("/")[2]
    steps = [
        ("write", f".nxd_ckpt/staging/{attempt}"),
        ("remove", "t/done"),
        ("remove", "t"),
        ("discard_unfinished", "t"),
        ("link_new", "t/checkpoint"),
        ("create", f"t/{MODEL}"),
        ("close", f"t/{MODEL}"),
        ("link_new", f"t/index/{MODEL[6:-3]}.json"),
        ("link_new", "t/manifest.json"),
        ("link_new", "t/done"),
        ("remove", f".nxd_ckpt/staging/{attempt}"),
    ]
    job.end()
    done = [(operation.name, operation.key) for operation in job.log]
    assert [1] * len(steps) == [done.count(step) for step in steps]
    assert [] == [(one, other) for one, other in pairwise(steps) if done.index(one) > done.index(other)]
    assert [] == [key for name, key in done if name == "write" and key.startswith(".nxd_ckpt/votes")]


def test_a_listing_asks_little_of_each_tag(store: MemoryStorage, job: Process) -> None:
    """The names in it, and what its ``done`` holds; however many files there are."""
    for number, tag in enumerate("abc"):
        assert None is job.save(tag, number, use_xser=True)
    job.end()
    log: list[Operation] = []
    list_tags(HookedStorage(store, recording(log)))
    expected = [("list", ""), *(asked for tag in "abc" for asked in (("list", tag), ("read", f"{tag}/done")))]
    assert Counter(expected) == Counter((operation.name, operation.key) for operation in log)


def test_a_tag_that_cannot_be_looked_at(store: MemoryStorage, job: Process) -> None:
    """Is an error: credentials that expire while tags are listed must not make an older one the latest."""
    assert [None, None] == [job.save("t", 1), job.save("u", 2)]
    job.end()
    expired = HookedStorage(store, failing("list", "u", PermissionError("memory://u: ExpiredToken")))
    with pytest.raises(PermissionError, match="ExpiredToken"):
        choose_tag(expired, None)


def test_a_tag_that_was_copied_keeps_its_place(store: MemoryStorage, job: Process) -> None:
    """Key by key, into another store, in any order: ``done`` says what its time would have said."""
    for number, tag in enumerate(["c", "b", "a"]):
        assert None is job.save(tag, number)
    job.end()
    copy = MemoryStorage()
    for key in reversed(store.keys):
        copy.write(key, store.read(key))
    assert ["c", "b", "a"] == complete_tags(copy)
    assert 2 == value_in(copy, choose_tag(copy, None))


def test_another_program_saves_over_a_tag(store: MemoryStorage, job: Process) -> None:
    """Its marker is not ours: the tag is read without the manifest."""
    assert [None, None] == [job.save("t", 1), job.save("u", 2)]
    job.end()
    assert open_complete_tag(store, "t").manifest is not None
    store.write(f"t/{MODEL}", store.read(f"u/{MODEL}") + b" ")
    assert open_complete_tag(store, "t").manifest is not None  # damage, which a load reports
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(100)}, buffer)
    store.write(f"t/{MODEL}", buffer.getvalue())
    store.write("t/done", b"1")
    assert None is open_complete_tag(store, "t").manifest
