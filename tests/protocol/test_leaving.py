"""What a job leaves in its directory besides the tags: nothing that nobody needs."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from nxd_ckpt import Checkpointer, list_checkpoints
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.prune import pin_checkpoint
from tests.support.rank_pool import RankPool
from tests.support.threads import in_threads


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save(directory: Path, *tags: str) -> None:
    with Checkpointer(directory) as checkpointer:
        for tag in tags:
            checkpointer.save(tag, {"weight": torch.ones(2)}, num_kept_ckpts=2, async_save=True)


def save_on(rank: int, directory: Path) -> None:
    save(directory, "step_1", "step_2", "step_3")


def test_a_job_of_one_process(tmp_path: Path):
    """After a clean end every entry of the directory is a tag; the next job goes on as before."""
    save(tmp_path, "step_1", "step_2", "step_3")
    assert ["step_2", "step_3"] == names(tmp_path)
    save(tmp_path, "step_4")
    assert ["step_3", "step_4"] == names(tmp_path)


def test_a_job_of_several_ranks(gloo_ranks: RankPool, tmp_path: Path):
    """The last rank that leaves removes what the others still needed, in whatever order they end."""
    for _ in range(3):
        gloo_ranks.run(save_on, tmp_path)
        assert ["step_2", "step_3"] == names(tmp_path)


def test_while_it_runs(tmp_path: Path):
    """The directory of a running job is its own."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save("step_1", {"weight": torch.ones(2)})
        assert [".nxd_ckpt", "step_1"] == names(tmp_path)


def test_what_is_needed_stays(tmp_path: Path):
    """A pin outlives the job, and so does what tells of a failed one."""
    save(tmp_path, "step_1")
    pin_checkpoint(tmp_path, "step_1")
    save(tmp_path, "step_2", "step_3", "step_4")
    assert [".nxd_ckpt", "step_1", "step_3", "step_4"] == names(tmp_path)
    assert ["pins"] == names(tmp_path / ".nxd_ckpt")


def test_what_killed_jobs_were_writing_goes(tmp_path: Path):
    """Small files that were half written, unless another job may be writing them just now."""
    hidden = tmp_path / ".nxd_ckpt"
    hidden.mkdir()
    for name in ("journal.json", "lease.json", "heartbeat.json"):
        (hidden / f".{name}.0123456789ab").write_text("{")
    for name in ("lease.json", "heartbeat.json"):
        os.utime(hidden / f".{name}.0123456789ab", (1, 1))
    young = hidden / ".lease.json.ba9876543210"
    young.write_text("{")
    save(tmp_path, "step_1")
    assert [young.name] == names(hidden)
    young.unlink()
    save(tmp_path, "step_2")
    assert ["step_1", "step_2"] == names(tmp_path)


def test_jobs_that_begin_while_others_end(tmp_path: Path):
    """Jobs that end remove nothing that a job which begins has made: each save succeeds, or is refused as in use."""

    def jobs(number: int) -> None:
        for step in range(8):
            with suppress(DirectoryInUse):
                save(tmp_path, f"step_{number}_{step}")

    in_threads(*(partial(jobs, number) for number in range(3)))
    assert 2 == len(list_checkpoints(tmp_path))
    save(tmp_path, "last")
    assert 2 == len(names(tmp_path))
