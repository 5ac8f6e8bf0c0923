"""Which of a save's files are synced."""

import os
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.storage.system import sync_file, sync_path

pytestmark = pytest.mark.both


def test_a_save_syncs_its_tag_and_no_votes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes and verdicts are for ranks that live; all files of the tag, and the names that lead to them, are synced."""
    synced: list[str] = []

    def file(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync_file(fd)

    def folder(path: Path) -> None:
        synced.append(str(path))
        sync_path(path)

    monkeypatch.setattr("nxd_ckpt.storage.local_files.sync_file", file)
    monkeypatch.setattr("nxd_ckpt.storage.local.sync_path", folder)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"weight": torch.ones(4)})
        synced.clear()
        attempt = checkpointer.save(2, {"weight": torch.ones(4)})
    assert attempt.done()
    below = [path.removeprefix(f"{tmp_path}/.nxd_ckpt/") for path in synced]
    assert not [path for path in below if path.startswith("votes")]
    staged = [path.partition("/")[2].partition("/")[2] for path in below if path.startswith("staging/")]
    for folder_of in ("model", "index"):
        assert folder_of in staged
        assert any(path.startswith(f"{folder_of}/") for path in staged)
    assert str(tmp_path) in synced
