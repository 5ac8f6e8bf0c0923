"""SIGKILL while a tag is copied to the next tier: what is visible is whole, and the next launch goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nxd_ckpt import Checkpointer, Tier
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, killing
from tests.conversion.tags import remains
from tests.protocol.job import Died, Job
from tests.tiers.saving import damaged, save, tags_in

pytestmark = [pytest.mark.plain, pytest.mark.once]


def save_and_die(rank: int, path: Path, name: str, pattern: str) -> None:
    """Killed just before that operation on the second tier."""
    far = HookedStorage(LocalStorage(path / "far"), killing(name, pattern))
    with Checkpointer(tiers=[Tier(path / "near", keep=1), Tier("far", storage=far)]) as saver:
        save(saver, 1)


def go_on(path: Path, step: int) -> None:
    """Another launch; everything that is visible is whole, and the new tag arrives."""
    near, far = path / "near", path / "far"
    before = tags_in(far)
    assert [] == damaged([near, far])
    with Checkpointer(tiers=[Tier(near, keep=1), Tier(far)]) as saver:
        save(saver, step)
    assert f"step_{step}" in tags_in(near)
    assert {*before, f"step_{step}"} <= {*tags_in(far)}
    assert [] == [*damaged([near, far]), *remains(far)]


@pytest.mark.parametrize(("name", "pattern"), [("write_at", "*/model/*"), ("rename", "*copies*")])
def test_a_job_that_is_killed_while_a_tag_is_copied(tmp_path: Path, name: str, pattern: str) -> None:
    """In the middle of it, and just before it becomes visible."""
    (outcome,) = Job(1, save_and_die, tmp_path, name, pattern).outcomes()
    assert isinstance(outcome, Died)
    assert (["step_1"], []) == (tags_in(tmp_path / "near"), tags_in(tmp_path / "far"))
    go_on(tmp_path, 2)


@pytest.mark.soak
def test_a_process_that_ends_copies_what_is_left(tmp_path: Path) -> None:
    """Without a call of close: the last tag is on all tiers."""
    program = """
import sys, torch
from nxd_ckpt import Tier, save_checkpoint
tiers = [Tier(sys.argv[1] + "/near"), Tier(sys.argv[1] + "/far", max_bytes_per_second="100KB")]
for step in range(3):
    save_checkpoint(tag=step, model={"weight": torch.ones(10000)}, tiers=tiers, async_save=True)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert "2" in tags_in(tmp_path / "far")
