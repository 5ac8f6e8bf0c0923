"""How a process ends with a save in flight."""

from pathlib import Path
from subprocess import CompletedProcess

import torch

from nxd_ckpt import open_checkpoint
from tests.protocol.states import visible_tags
from tests.support.processes import run_program

# Every data file takes a second to sync, or fails to; rank 1 of two exists on paper only where WORLD is 2.
PROLOGUE = """
import sys, torch, nxd_ckpt
from nxd_ckpt import Checkpointer, Topology, finalize_checkpoint, save_checkpoint
from nxd_ckpt.commit import tier
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, delaying, failing

path = sys.argv[1]
hook = delaying("close", "*/model/*", 1.0)
tier.open_storage = lambda path, durable, options: HookedStorage(LocalStorage(path, durable), hook)
state = {"weight": torch.ones(5)}
"""
FAILING = 'hook = failing("close", "*-2/model/*", OSError(28, "No space left on device"))\n'


def run(path: Path, program: str) -> CompletedProcess[str]:
    return run_program(PROLOGUE + program, path)


def holds_ones(path: Path, tag: str) -> bool:
    return torch.equal(torch.ones(5), open_checkpoint(path, tag).model_state()["weight"])


def test_a_failure_that_was_raised_does_not(tmp_path: Path) -> None:
    """The script caught it: its exit code is its own."""
    two_saves = "".join(f'save_checkpoint(path, "{tag}", state, async_save=True)\n' for tag in ("one", "two"))
    caught = "try:\n    finalize_checkpoint()\nexcept nxd_ckpt.errors.SaveFailed:\n    print('caught')\n"
    ended = run(tmp_path, FAILING + two_saves + caught)
    assert (0, "caught\n") == (ended.returncode, ended.stdout)


def test_after_an_exception_a_single_process_still_finishes(tmp_path: Path) -> None:
    """Its own bytes are the whole checkpoint; the exit code is the exception's."""
    ended = run(tmp_path, 'save_checkpoint(path, "t", state, async_save=True)\nraise LookupError("no batch")')
    assert 1 == ended.returncode
    assert "LookupError: no batch" in ended.stderr
    assert holds_ones(tmp_path, "t")


def test_after_an_exception_other_ranks_get_a_short_grace_only(tmp_path: Path) -> None:
    """This rank's vote is written, but it does not wait a timeout of an hour for a rank that never saves."""
    ended = run(
        tmp_path,
        'save_checkpoint(path, "t", state, async_save=True, topology=Topology(dp=2), run_id="a", timeout=3600)\n'
        'raise LookupError("no batch")',
    )
    assert 1 == ended.returncode
    assert "LookupError: no batch" in ended.stderr
    votes = tmp_path / ".nxd_ckpt" / "votes" / "a-1"
    assert ["rank_00000.vote.json"] == [file.name for file in votes.rglob("*.json")]
    assert [] == visible_tags(tmp_path)
