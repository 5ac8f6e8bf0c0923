"""``dedup=True``: what did not change is not written again, and no tag needs another."""

import errno
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.storage import local_files
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, chained, failing
from tests.conftest import BUCKET
from tests.protocol.states import moments
from tests.support.damage import flip
from tests.support.s3_server import S3Server

State = dict[str, torch.Tensor]

BASE, CHANGED = 4 * 2**20, 2**20
"""Bytes of the base, and of the adapters, in :func:`lora`."""


def lora(step: int) -> State:
    """A frozen base of 4 MiB, and adapters of 1 MiB that each step changes."""
    base = {f"base.{layer}": torch.full((2**18,), float(layer)) for layer in range(4)}
    return {**base, **{f"lora.{name}": torch.full((2**17,), step + 0.5) for name in "AB"}}


def written(log: list[Operation]) -> int:
    """Bytes that were written, and were not found to be there already."""
    names = ("create", "write_at", "write", "link_new")
    return sum(one.nbytes for one in log if one.name in names)


def duplicated_bytes(storage: Storage, tag: str) -> float:
    """What the manifest says of it."""
    return load_manifest(storage.read(f"{tag}/manifest.json"), tag).timings.get("duplicated_bytes", 0)


def loaded(storage: Storage, tag: str) -> State:
    model: State = {}
    with Checkpointer("run", storage=storage) as reader:
        reader.load(tag, model)
    return model


def is_saved(storage: Storage, tag: str, state: State) -> bool:
    found = loaded(storage, tag)
    return found.keys() == state.keys() and all(torch.equal(state[name], found[name]) for name in state)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with the tags a and b, which have the frozen files in common."""
    with Checkpointer(tmp_path) as saver:
        for step, tag in enumerate("ab"):
            saver.save(tag, lora(step), use_xser=True, dedup=True)
    return tmp_path


def test_an_adapter_run_writes_what_changed(tmp_path: Path) -> None:
    """At most 1.05 times that, async or not, in the job that saved the tag before and in the next."""
    log: list[Operation] = []
    for launch in range(2):
        with Checkpointer("run", storage=HookedStorage(LocalStorage(tmp_path), log.append)) as saver:
            for step in range(2):
                log.clear()
                state = lora(10 * launch + step)
                saver.save(f"{launch}.{step}", state, use_xser=True, dedup=True, async_save=True).wait()
                assert launch + step == 0 or CHANGED <= written(log) <= 1.05 * CHANGED
    storage = LocalStorage(tmp_path)
    assert is_saved(storage, "1.1", lora(11))
    assert BASE < duplicated_bytes(storage, "1.1") < 1.01 * BASE
    on_disk = {file.stat().st_ino: file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()}
    assert sum(on_disk.values()) < BASE + 4 * 1.05 * CHANGED


def test_without_it_everything_is_written(tmp_path: Path) -> None:
    """Nothing is shared by default."""
    with Checkpointer(tmp_path) as saver:
        for tag in "ab":
            saver.save(tag, lora(0), use_xser=True)
    assert {1} == {file.stat().st_nlink for file in (tmp_path / "b").rglob("*") if file.is_file()}


@pytest.mark.parametrize("fate", ["removed", "replaced", "damaged in its directory"])
@pytest.mark.parametrize("which", ["a", "b"])
def test_what_becomes_of_one_tag_is_nothing_to_the_other(two: Path, which: str, fate: str) -> None:
    """Neither of the older to the newer, nor the other way round."""
    other = {"a": "b", "b": "a"}[which]
    if fate == "damaged in its directory":
        for file in (two / which / "model").rglob("tensor_*.pt"):
            file.unlink()
            file.write_bytes(b"something else")
    with Checkpointer(two) as saver:
        if fate == "removed":
            assert saver.remove(which)
        elif fate == "replaced":
            saver.save(which, lora(7), use_xser=True, dedup=True)
            assert is_saved(saver.storage, which, lora(7))
    assert () == verify_checkpoint(two, other).problems
    assert is_saved(LocalStorage(two), other, lora({"a": 0, "b": 1}[other]))


def test_a_damaged_file_is_not_passed_on(two: Path) -> None:
    """A block that a disk damaged is in both tags that have it, and in none that is saved from then on."""
    frozen = max((two / "a" / "model").rglob("tensor_*.pt"), key=lambda file: file.stat().st_nlink)
    flip(frozen, -2000)
    assert all(verify_checkpoint(two, tag).problems for tag in "ab")
    with Checkpointer(two) as saver:
        saver.save("c", lora(2), use_xser=True, dedup=True)
    assert () == verify_checkpoint(two, "c").problems
    assert BASE - 2**20 < duplicated_bytes(LocalStorage(two), "c") < BASE


def test_what_is_in_memory_only_in_part_is_written(two: Path) -> None:
    """A tensor that is larger than the staging memory, which goes in waves."""
    state = {"large": torch.arange(3 * 2**20, dtype=torch.float32), "small": torch.ones(2**18)}
    with Checkpointer(two, memory_cap=5 * 2**20) as saver:
        for tag in "cd":
            saver.save(tag, state, use_xser=True, dedup=True)
    assert () == verify_checkpoint(two, "d").problems
    assert 2**20 < duplicated_bytes(LocalStorage(two), "d") < 2 * 2**20


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("duplicate", PermissionError(errno.EPERM, "no links here")),
        ("duplicate", OSError(errno.EMLINK, "too many links")),
        ("duplicate", FileNotFoundError(errno.ENOENT, "the parent was removed")),
        ("version", FileNotFoundError(errno.ENOENT, "the parent was removed")),
        ("read_ranges", OSError(errno.EIO, "a bad block")),
    ],
    ids=lambda value: errno.errorcode[value.errno or 0] if isinstance(value, OSError) else value,
)
def test_where_nothing_can_be_linked_it_is_written(tmp_path: Path, name: str, error: OSError) -> None:
    """File systems without links, with few, a parent that goes away or cannot be read: the save is as any."""
    storage, log = LocalStorage(tmp_path), list[Operation]()
    hooked = HookedStorage(storage, chained(log.append, failing(name, "*model/*", error)))
    with Checkpointer("run", storage=hooked) as saver:
        for step, tag in enumerate("ab"):
            log.clear()
            saver.save(tag, lora(step), use_xser=True, dedup=True)
    assert BASE + CHANGED < sum(one.nbytes for one in log if one.name == "write_at")
    assert 0 == duplicated_bytes(storage, "b")
    assert is_saved(storage, "b", lora(1))


def test_a_file_system_that_shares_blocks_is_asked_to(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the new tag's files are files of their own, as a copy's are."""

    def clone(fd: int, new: int) -> bool:
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        return os.pwrite(new, data, 0) == len(data)

    monkeypatch.setattr(local_files, "clone", clone)
    with Checkpointer(two) as saver:
        saver.save("c", lora(1), use_xser=True, dedup=True)
    assert {1} == {file.stat().st_nlink for file in (two / "c").rglob("*") if file.is_file()}
    assert is_saved(LocalStorage(two), "c", lora(1))
    assert BASE < duplicated_bytes(LocalStorage(two), "c")


def test_a_bucket_copies_by_itself(s3_server: S3Server) -> None:
    """What did not change is not uploaded again; a tag stays without its parent."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    with Checkpointer(url, storage_options=s3_server.options) as saver:
        for step, tag in enumerate("ab"):
            before = s3_server.received.total()
            saver.save(tag, lora(step), use_xser=True, dedup=True)
        assert CHANGED <= s3_server.received.total() - before <= 1.05 * CHANGED
        assert saver.remove("a")
        assert is_saved(saver.storage, "b", lora(1))
    assert () == verify_checkpoint(url, "b", storage_options=s3_server.options).problems
    assert [] == s3_server.unfinished(BUCKET)


@pytest.mark.parametrize("make", [LocalStorage, lambda path: MemoryStorage()], ids=["files", "store"])
def test_any_sequence_of_saves_leaves_what_was_saved(tmp_path: Path, make: Callable[[Path], Storage]) -> None:
    """Whatever stays unchanged, is saved over or removed: every visible tag verifies, and is what was saved."""
    seed = time.time_ns()
    print("seed", seed)
    random, storage, saved = Random(seed), make(tmp_path), dict[str, State]()
    state = {f"{number}": torch.rand(50 * number + 1) for number in range(6)}
    log: list[Operation] = []
    with Checkpointer("run", storage=HookedStorage(storage, log.append)) as saver:
        for _ in range(15):
            for name in random.sample(sorted(state), random.randrange(3)):
                state[name] = torch.rand_like(state[name])
            tag, kept = random.choice("abcde"), random.choice((None, None, None, 2))
            options: dict[str, Any] = {"use_xser": random.random() < 0.7, "async_save": random.random() < 0.5}
            saver.save(tag, state, num_kept_ckpts=kept, overwrite=True, dedup=True, **options)
            saved[tag] = dict(state)
            removed = random.choice("abcde") if random.random() < 0.1 else None
            if removed is not None:
                saver.remove(removed)
        saver.wait()
        visible = [info.tag for info in list_tags(storage)]
        assert [] == [tag for tag in visible if not is_saved(storage, tag, saved[tag])]
        assert (tag in visible) == (tag != removed)
    assert "duplicate" in {one.name for one in log}


def test_ranks_of_zero1_share_their_own_files(tmp_path: Path) -> None:
    """Each looks at what it wrote itself; the manifest tells the sum."""
    run_id, optimizers = uuid.uuid4().hex[:8], [moments(1, rank)["optimizer"] for rank in range(2)]

    def saves(rank: int) -> None:
        topology = Topology(dp=2, rank=rank)
        with Checkpointer(tmp_path, topology=topology, run_id=run_id) as saver:
            for step, tag in enumerate("ab"):
                model = {**lora(step), "weight": torch.zeros(3, 4)}
                options: dict[str, Any] = {"zero1_optimizer": True, "param_names": [["weight"]], "use_xser": True}
                saver.save(tag, model, optimizers[rank], dedup=True, **options)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(saves, range(2)))
    assert () == verify_checkpoint(tmp_path, "b").problems
    shards = [file for file in (tmp_path / "b" / "optim").rglob("*") if file.is_file()]
    assert {2} == {file.stat().st_nlink for file in shards}
    assert BASE < duplicated_bytes(LocalStorage(tmp_path), "b") < 1.1 * BASE
