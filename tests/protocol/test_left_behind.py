"""What killed processes and failing disks leave in a job's own directory, and what readers make of it."""

from pathlib import Path

import pytest

from nxd_ckpt import Checkpointer, effects
from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.control_files import HEARTBEAT, JOURNAL
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.choosing import choose_tag
from nxd_ckpt.verify import verify_checkpoint
from tests.protocol.states import checkpointer, save, saved_value


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
