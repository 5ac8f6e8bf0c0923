"""A store without renames: which tags there are, in which order, and which may be replaced."""

import io
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, load_checkpoint
from nxd_ckpt.errors import InvalidArgument, SaveFailed
from nxd_ckpt.tag.choosing import choose_tag
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.opened import open_complete_tag
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, failing, recording
from tests.protocol.stores import Process, complete_tags, value_in, values

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


@pytest.mark.parametrize("overwrite", [None, False])
def test_a_tag_is_not_saved_over_unasked(store: MemoryStorage, job: Process, overwrite: bool | None) -> None:
    """The error says how to ask; an async save reports it like any other failure; asked, it is replaced."""
    assert None is job.save("t", 1)
    error = job.save("t", 2, overwrite=overwrite)
    assert SaveFailed is type(error)
    assert "overwrite=True" in str(error)
    pending = job.saver.save("t", {"weight": torch.ones(1)}, async_save=True, overwrite=overwrite)
    with pytest.raises(SaveFailed, match="t exists"):
        pending.wait()
    assert {"t": 1} == values(store)
    assert None is job.save("t", 3, overwrite=True)
    assert {"t": 3} == values(store)
    job.end()


def test_what_is_no_checkpoint_is_left_alone(store: MemoryStorage, job: Process) -> None:
    """Files of others in a directory of the tag's name stay; a file of its name is refused, also with overwrite=True.
    """
    store.write("notes/diary.txt", b"dear diary")
    store.write("readme", b"read me")
    assert None is job.save("notes", 1, overwrite=True)
    error = job.save("readme", 1, overwrite=True)
    assert SaveFailed is type(error)
    assert "not a checkpoint" in str(error)
    assert (b"dear diary", b"read me") == (store.read("notes/diary.txt"), store.read("readme"))
    job.end()


def test_overwrite_false_refuses_on_a_file_system(tmp_path: Path) -> None:
    """By default and with True a tag is replaced, with False refused, and nothing else will do."""
    with Checkpointer(tmp_path) as saver:
        for value, overwrite in enumerate([False, None, True]):
            saver.save("t", {"weight": torch.tensor([value])}, overwrite=overwrite)
        with pytest.raises(SaveFailed, match=r"t exists.*pass overwrite=True$"):
            saver.save("t", {"weight": torch.tensor([9])}, overwrite=False)
        with pytest.raises(InvalidArgument, match="overwrite must be"):
            saver.save("t", {"weight": torch.tensor([9])}, overwrite="perhaps")  # type: ignore[arg-type]
    model: dict[str, torch.Tensor] = {}
    load_checkpoint(tmp_path, "t", model)
    assert 2 == int(model["weight"])


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
