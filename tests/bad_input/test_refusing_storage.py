"""What a file system refuses reaches the caller as one CheckpointError that says so, on every rank."""

import errno
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology, has_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import CheckpointError, StorageError, from_wire, to_wire
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, Operation

MODEL = {"weight": torch.zeros(2)}


def read_only(operation: Operation) -> None:
    """As mount(8) with ``-o ro`` makes it."""
    if operation.name in ("write", "make_dir", "create", "link_new", "exchange", "rename", "remove", "set_time"):
        raise OSError(errno.EROFS, "Read-only file system", f"/fsx/{operation.key}")


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_is_told_that_a_file_system_is_read_only(tmp_path: Path, size: int) -> None:
    """Every rank is told that, and at once: no rank waits for the others, or says that they see another directory."""

    def save(rank: int) -> CheckpointError | None:
        storage = HookedStorage(LocalStorage(tmp_path), read_only)
        checkpointer = Checkpointer(tmp_path, topology=Topology(dp=size, rank=rank), run_id="run", storage=storage)
        with pytest.raises(StorageError) as caught:
            checkpointer.save("tag", MODEL)
        return caught.value

    with ThreadPoolExecutor(size) as ranks:
        for error in ranks.map(save, range(size)):
            # Rank 0 makes the directory itself lasting first; the others begin in what is hidden there.
            assert re.search(r"Read-only file system: '/fsx/('|\.nxd_ckpt).*; choose a directory on a disk", str(error))
            assert errno.EROFS == getattr(error, "errno", None)


def test_reading_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From whatever is called: the system's words, in a CheckpointError that is an OSError too."""
    save_checkpoint(tmp_path, "tag", MODEL, durable=False)
    opened = open_checkpoint(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/fsx/it")

    for method in ("read", "open", "list", "read_into"):
        monkeypatch.setattr(LocalStorage, method, refuse)
    for call in (has_checkpoint, open_checkpoint, verify_checkpoint, lambda _: opened.read("model/weight")):
        with pytest.raises(StorageError, match=r"Input/output error: '/fsx/it'"):
            call(tmp_path)


def test_other_ranks_hear_the_same_class() -> None:
    error = from_wire(*to_wire(PermissionError(errno.EACCES, "Permission denied", "x")), rank=3)
    assert StorageError is type(error)
    told = "PermissionError: [Errno 13] Permission denied: 'x'; choose a directory that this user may read and write"
    assert f"on rank 3: {told}" == str(error)
