"""A mounted object store: a directory in which no directory can be renamed. Tags are written in place there."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology, load_checkpoint
from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from tests.protocol.job import Job, until
from tests.protocol.states import PATIENCE, save, weights


class Mounted(LocalStorage):
    """As gcsfuse does it: directories that hold something are not renamed."""

    def rename(self, source: str, target: str) -> None:
        if self.is_dir(source):
            raise OSError(errno.EMFILE, "Too many open files")
        super().rename(source, target)


def saver_on(storage: Any, rank: int, run: str) -> Checkpointer:
    return Checkpointer(storage.url, topology=Topology(tp=2, rank=rank), storage=storage, run_id=run, timeout=PATIENCE)


def saves(rank: int, path: Path, run: str, tag: str, value: int, overwrite: bool | None) -> Any:
    """One save of a job; what it raised, and which directories it found that the storage could rename."""
    storage = Mounted(path)
    saver = saver_on(storage, rank, run)
    error = None
    try:
        save(saver, tag, value, overwrite=overwrite)
    except Exception as problem:
        error = problem
    meet(path.parent, run, rank)  # without a process group, a rank 0 that refused and left was never there
    saver.close()
    return error, storage.renames


def meet(folder: Path, run: str, rank: int) -> None:
    """Return once both ranks are here."""
    (folder / f"{run}.{rank}").touch()
    until((folder / f"{run}.{1 - rank}").exists)


def value_in(path: Path, tag: str) -> int:
    """Which save a tag holds, to a reader that knows nothing of how it was written; verifies both ranks' parts."""
    values = set()
    for rank in range(2):
        model: dict[str, torch.Tensor] = {}
        content = load_checkpoint(path, tag, model, topology=Topology(tp=2, rank=rank))
        expected = weights(content["value"], rank)
        assert all(torch.equal(expected[name], model[name]) for name in expected)
        values.add(int(content["value"]))
    (value,) = values
    return value


def test_ranks_find_out_that_nothing_can_be_renamed(tmp_path: Path) -> None:
    """All of them, at the first save: the tag is written in place, is complete, and is not saved over unasked."""
    path = tmp_path / "checkpoints"
    assert [(None, False)] * 2 == Job(2, saves, path, "one", "t", 1, None).values()
    assert 1 == value_in(path, "t")
    assert b"1" != (path / "t" / "done").read_bytes()
    refused = Job(2, saves, path, "two", "t", 2, None).values()
    assert [SaveFailed] * 2 == [type(error) for error, _ in refused]
    assert [(None, False)] * 2 == Job(2, saves, path, "three", "t", 3, True).values()
    assert 3 == value_in(path, "t")


def test_an_error_that_is_about_something_else_is_one(tmp_path: Path) -> None:
    """A full disk does not make a file system a store."""

    class Full(LocalStorage):
        def rename(self, source: str, target: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    saver = Checkpointer(tmp_path, storage=Full(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        saver.save("t", {})
    saver.close()
