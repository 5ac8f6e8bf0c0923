"""What lasts when a directory's power is lost, and what a lease that changes meanwhile keeps."""

import mmap
import os
import time
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, unshard_checkpoint
from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.control_files import LEASE
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import sync_path
from tests.simulation.world import Disk, DiskStorage, SystemCalls


def test_a_file_that_is_written_past_the_page_cache_lasts_too() -> None:
    """Direct writes reach the disk, and its size does not: that takes a sync, as for any other file."""
    disk, calls, nbytes = Disk(time.time), SystemCalls(), 2**20
    with calls.installed(), mmap.mmap(-1, nbytes) as memory:
        storage = LocalStorage(calls.mount(disk))
        memory[:] = bytes(range(256)) * (nbytes // 256)
        writer = storage.create("a/large", nbytes)
        with memoryview(memory) as view:
            writer.write_at(0, view)
            assert vars(writer)["_direct"] >= 0
            writer.close()
            storage.make_dir("a")
            storage.sync_dir("a")
            storage.sync_dir("")
            disk.crash(lambda change: False, lambda file: file.synced)
            assert bytes(view) == DiskStorage(disk).read("a/large")


def test_names_of_all_directories_that_are_made_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those above the directory of a job, and above the output of a conversion, which may be on another disk."""
    synced: set[str] = set()

    def sync(folder: Path | str) -> None:
        synced.add(str(folder))
        sync_path(folder)

    monkeypatch.setattr("nxd_ckpt.storage.local.sync_path", sync)
    with Checkpointer(tmp_path / "above" / "it" / "run") as checkpointer:
        checkpointer.save("t", {"weight": torch.ones(4)})
    assert {str(tmp_path), f"{tmp_path}/above", f"{tmp_path}/above/it", f"{tmp_path}/above/it/run"} <= synced
    synced.clear()
    unshard_checkpoint(tmp_path / "above" / "it" / "run" / "t", tmp_path / "other" / "place" / "whole")
    assert {str(tmp_path), f"{tmp_path}/other", f"{tmp_path}/other/place"} <= synced


def test_a_file_that_changes_just_before_it_is_exchanged_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compared again once nobody else can change it: so two that take a dead job's lease do not both have it."""
    storage, rename = LocalStorage(tmp_path), os.rename
    storage.make_dir(".nxd_ckpt")
    dead = lease.acquire(storage, "dead", 0.1)
    data = storage.read(LEASE)

    def later(old: str, new: str) -> None:
        Path(old).write_bytes(b"of another job")
        rename(old, new)

    monkeypatch.setattr(os, "rename", later)
    assert not storage.exchange(LEASE, data, b"mine")
    assert b"of another job" == storage.read(LEASE)
    assert dead != lease.read(storage)


def test_a_dead_jobs_lease_that_another_job_has_taken_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found the holder dead: the later one finds that the lease is another, and that its holder lives."""
    storage = LocalStorage(tmp_path)
    storage.make_dir(".nxd_ckpt")
    dead = lease.Lease("dead", "another host/boot/1", 1, "1")
    storage.write(LEASE, lease._encode(dead))
    asked: list[str] = []

    def look(storage: LocalStorage, holder: lease.Lease, *args: object) -> bool:
        asked.append(holder.run_id)
        if holder.run_id == "dead":
            faster = lease.Lease("faster", "a third host/boot/1", 1, "1")
            storage.write(LEASE, lease._encode(faster))
            return False
        return True

    monkeypatch.setattr(lease, "_lives", look)
    with pytest.raises(DirectoryInUse, match="run faster"):
        lease.acquire(storage, "late", 0.1)
    assert (["dead", "faster"], "faster") == (asked, getattr(lease.read(storage), "run_id", None))
