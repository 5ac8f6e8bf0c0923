"""What killed processes and failing disks leave in a job's own directory, and what readers make of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import Checkpointer, effects
from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.paths import HEARTBEAT, JOURNAL
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.choosing import choose_tag
from nxd_ckpt.verify import verify_checkpoint
from tests.protocol.states import checkpointer, save, saved_value

pytestmark = [pytest.mark.plain, pytest.mark.once]


def test_files_that_got_no_name_go_with_the_next_job(tmp_path: Path) -> None:
    """Those of ten minutes ago: a younger one may be about to get its name."""
    hidden = tmp_path / ".nxd_ckpt"
    hidden.mkdir()
    old, new = hidden / ".heartbeat.json.0123456789ab", hidden / ".lease.json.0123456789ab"
    for path in (old, new):
        path.write_bytes(b"{}")
    os.utime(old, (1e9, 1e9))
    with checkpointer(tmp_path, 0, 1) as saver:
        save(saver, "t", 1)
        assert [False, True] == [old.exists(), new.exists()]


def test_reads_do_not_wait_for_a_replacement_that_a_live_job_can_neither_finish_nor_undo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is announced for longer than it takes, by the times of the announcement and of the job's last heartbeat."""
    storage = LocalStorage(tmp_path)
    with checkpointer(tmp_path, 0, 1) as saver:
        save(saver, "t", 1)
        storage.write(JOURNAL, b'{"attempt": "another-1", "tag": "t"}')
        waited: list[float] = []
        sleep = effects.sleep

        def noted(seconds: float) -> None:
            waited.append(seconds)
            sleep(0.0 if seconds < 1 else seconds)

        monkeypatch.setattr(effects, "sleep", noted)
        storage.set_time(HEARTBEAT, storage.time(JOURNAL) + 11.0)
        assert ("t", []) == (choose_tag(storage, None), waited)
        assert 1 == saved_value(tmp_path, "t", 1)
        assert lease.read(storage) is not None
        save(saver, "t", 2)  # which finishes what was announced
        assert not storage.is_file(JOURNAL)


@pytest.mark.parametrize("name", ["manifest.json", "index/dp_rank_00_tp_rank_00_pp_rank_00.json", "done", "checkpoint"])
def test_verify_sees_blanks_behind_a_document(tmp_path: Path, name: str) -> None:
    """They mean nothing to a parser; but they are not what was written."""
    with Checkpointer(tmp_path) as saver:
        save(saver, "t", 1)
    assert () == verify_checkpoint(tmp_path, "t").problems
    with open(tmp_path / "t" / name, "ab") as file:
        file.write(b" \n")
    assert verify_checkpoint(tmp_path, "t").problems


def test_a_failed_replacement_that_could_not_be_undone_is_finished_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal stays as long as the disk fails, and whoever reads meanwhile gets one of the two tags."""
    saver = checkpointer(tmp_path, 0, 1)
    save(saver, "t", 1)
    real: Any = LocalStorage.sync_dir
    failing: list[str] = []

    def sync(self: LocalStorage, key: str) -> None:
        if key == "" and (tmp_path / JOURNAL).exists() and failing:
            raise OSError(errno.EIO, "Input/output error")
        if key == "" and (tmp_path / JOURNAL).exists():
            failing.append(key)  # from the sync after the journal's own on
        real(self, key)

    monkeypatch.setattr(LocalStorage, "sync_dir", sync)
    with pytest.raises(Exception, match="Input/output error"):
        save(saver, "t", 2)
    assert (tmp_path / JOURNAL).exists()
    monkeypatch.undo()
    save(saver, "u", 3)
    assert not (tmp_path / JOURNAL).exists()
    assert saved_value(tmp_path, "t", 1) in (1, 2)
    saver.abandon()
