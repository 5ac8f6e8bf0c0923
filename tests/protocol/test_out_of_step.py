"""After a call that not all ranks made, the next one that all make works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nxd_ckpt import Topology, load_checkpoint
from nxd_ckpt.errors import OutcomeUnknown, PeerTimeout, SaveFailed
from tests.protocol.job import Job, outcome_of, until
from tests.protocol.states import PATIENCE, checkpointer, lose_patience, save, saved_value, visible_tags

pytestmark = [pytest.mark.plain, pytest.mark.once]

SHORT, LONG = 0.5, PATIENCE


def first_saves(rank: int, path: Path, alone: int) -> str:
    """Twice only the rank ``alone`` makes the first save to a directory; then all make first saves, and a load."""
    outcomes = set()
    if rank == alone:
        for number in range(2):
            saver = checkpointer(path / "lonely", rank, 2, timeout=SHORT)
            outcomes.add(type(outcome_of(lambda saver=saver, number=number: save(saver, f"t{number}", 1))).__name__)  # type: ignore[misc]
    dist.barrier()
    for number, name in enumerate(("lonely", "other")):
        with checkpointer(path / name, rank, 2, timeout=LONG) as saver:
            save(saver, "all", number)
    model: dict[str, torch.Tensor] = {}
    load_checkpoint(path / "other", "all", model, topology=Topology(tp=2, rank=rank), timeout=LONG)
    return outcomes.pop() if rank == alone else ""


@pytest.mark.parametrize("alone", [0, 1])
def test_after_a_first_save_of_one_rank_alone_all_can_save(tmp_path: Path, alone: int) -> None:
    """It fails there; saves and loads of all ranks then work, in this directory and others."""
    outcomes = Job(2, first_saves, tmp_path, alone, group=True).values()
    assert PeerTimeout.__name__ == outcomes[alone]
    assert (["all"], ["all"]) == (visible_tags(tmp_path / "lonely"), visible_tags(tmp_path / "other"))
    assert (0, 1) == (saved_value(tmp_path / "lonely", None, 2), saved_value(tmp_path / "other", None, 2))


def later_saves(rank: int, path: Path, alone: int, times: int) -> list[str]:
    """Saves that all ranks make, but for some in the middle, which the rank ``alone`` makes."""
    saver = checkpointer(path, rank, 2)
    save(saver, "first", 1)
    outcomes = []
    if rank == alone:
        lose_patience(saver)
        for number in range(times):
            outcomes.append(type(outcome_of(lambda number=number: save(saver, f"lonely{number}", 2))).__name__)  # type: ignore[misc]
    lose_patience(saver, PATIENCE)
    dist.barrier()
    save(saver, "third", 3)
    save(saver, "fourth", 4, async_save=True)
    saver.close()
    return outcomes


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.one_in(2)
def test_after_a_later_save_of_one_rank_alone_all_can_save(tmp_path: Path, alone: int) -> None:
    """It fails, or its outcome is unknown; the next saves that all make work, and are whole."""
    outcomes = Job(2, later_saves, tmp_path, alone, 2, group=True).values()
    assert [[SaveFailed, OutcomeUnknown][alone].__name__] * 2 == outcomes[alone]
    assert ["first", "third", "fourth"] == visible_tags(tmp_path)
    assert (3, 4) == (saved_value(tmp_path, "third", 2), saved_value(tmp_path, "fourth", 2))


def missed_by_rank_0(rank: int, path: Path) -> str:
    """Ranks 1 and 2 make a save that rank 0 does not; rank 1 has given it up, and rank 2 waits, when rank 0 goes on."""
    saver, told = checkpointer(path / "run", rank, 3), ""
    save(saver, "first", 1)
    if rank == 1:
        lose_patience(saver)
    if rank > 0:
        told = type(outcome_of(lambda: save(saver, "missed", 2))).__name__
    if rank == 1:
        (path / "gave_up").touch()
        lose_patience(saver, PATIENCE)
    until((path / "gave_up").exists)
    save(saver, "third", 3)
    saver.close()
    return told


def test_after_a_save_that_rank_0_missed_all_can_save(tmp_path: Path) -> None:
    """The rank that still waits is told by rank 0's next save, and comes to that one."""
    assert ["", OutcomeUnknown.__name__, SaveFailed.__name__] == Job(3, missed_by_rank_0, tmp_path, group=True).values()
    assert ["first", "third"] == visible_tags(tmp_path / "run")
    assert 3 == saved_value(tmp_path / "run", "third", 3)
