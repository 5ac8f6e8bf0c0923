"""What a save has reported lasts, whoever made the directories: the power fails just after it, and all is there."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, finalize_checkpoint, save_checkpoint
from nxd_ckpt.cli.main import main
from nxd_ckpt.integrations.accelerate import Accelerator
from nxd_ckpt.integrations.lightning import CheckpointIO
from nxd_ckpt.integrations.transformers import Trainer
from tests.integrations import accelerate_run, lightning_run, transformers_run
from tests.real_disks.server import mounted_disk
from tests.support.mounts import needs_mounts

pytestmark = needs_mounts("/dev/fuse")


def save(folder: Path) -> None:
    """Two tags, one over itself; the latest."""
    for tag in ("step_1", "step_2", "step_1"):
        save_checkpoint(folder, tag, torch.nn.Linear(3, 2), async_save=tag == "step_2", overwrite=True)
    finalize_checkpoint()


def save_where_a_script_made_room(folder: Path) -> None:
    """And synced nothing."""
    os.makedirs(folder)
    with Checkpointer(folder) as saver:
        saver.save("step_1", {"weight": torch.ones(3)})


def pin(folder: Path) -> None:
    save(folder)
    assert 0 == main(["pin", str(folder), "step_1"])


def lightning(folder: Path) -> None:
    lightning_run.fit(lightning_run.every_epoch(folder), epochs=2, io=CheckpointIO())


def accelerate(folder: Path) -> None:
    accelerate_run.Job(folder, Accelerator).run(2)


def transformers(folder: Path) -> None:
    transformers_run.trained(folder, kind=Trainer)


@pytest.mark.parametrize("work", [save, save_where_a_script_made_room, pin, lightning, accelerate, transformers])
def test_what_was_reported_lasts(tmp_path: Path, work: Callable[[Path], None]) -> None:
    """In directories that were not there."""
    with mounted_disk(tmp_path / "disk") as disk, disk.losing_what_is_not_synced():
        work(disk.path / "not" / "there")
