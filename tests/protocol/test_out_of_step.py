"""After a call that not all ranks made, the next one that all make works."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nxd_ckpt import Topology, load_checkpoint
from nxd_ckpt.errors import OutcomeUnknown, PeerTimeout, SaveFailed
from tests.protocol.job import Job, outcome_of, until
from tests.protocol.states import PATIENCE, checkpointer, lose_patience, save, saved_value, visible_tags

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


LAST = 7
"""The last step that is saved where ranks leave out some."""


def saves_but_for(
    rank: int, path: Path, world: int, left_out: dict[int, set[int]], is_async: bool, waits: bool, tags: str = ""
) -> list[str]:
    """What came of each step's save here, of which this rank leaves out some; "" for these.

    If it ``waits``, a rank that leaves out a step goes on once the others have written theirs. The letters of ``tags``
    are names without a step.
    """
    saver, handles = checkpointer(path, rank, world, on_save_failure="warn", max_failed_saves=99), {}
    for step in range(LAST + 1):
        if step not in left_out.get(rank, ()):
            handles[step] = save(saver, tags[step:][:1] or f"step_{step}", step, async_save=is_async and step > 0)
        elif waits and step - 1 not in left_out[rank]:
            voters = [other for other in range(world) if step not in left_out.get(other, ())]
            until(lambda step=step, voters=voters: all(has_voted(path, voter, f"step_{step}") for voter in voters))  # type: ignore[misc]
    told = [handles[step].exception() if step in handles else None for step in range(LAST + 1)]
    saver.close()
    words = ["saved" if error is None else type(error).__name__ for error in told]
    return [word if step in handles else "" for step, word in enumerate(words)]


def has_voted(path: Path, rank: int, tag: str) -> bool:
    """Whether the rank has voted on a save of this tag, and no later job's clean-up has taken the vote away."""
    votes = (path / ".nxd_ckpt" / "votes").glob(f"*/rank_{rank:05d}.vote.json")
    try:
        return any(f'"{tag}"' in vote.read_text() for vote in votes)
    except FileNotFoundError:
        return False


LEFT_OUT: list[tuple[int, dict[int, set[int]]]] = [
    (2, {1: {2}}),
    (2, {0: {2}}),
    (3, {1: {2}, 2: {3}}),
    (3, {0: {2}, 2: {4}}),
    (2, {1: {2, 3}}),
    (2, {0: {2, 3}}),
]
"""The number of ranks, and the steps that some do not save."""


@pytest.mark.parametrize(
    ("world", "left_out", "is_async"), [(*case, number % 4 in (0, 3)) for number, case in enumerate(LEFT_OUT)], ids=str
)
def test_only_saves_that_a_rank_left_out_fail(
    tmp_path: Path, world: int, left_out: dict[int, set[int]], is_async: bool
) -> None:
    """Whichever rank it was; the next save that all make works, and all are in step again."""
    outcomes = Job(world, saves_but_for, tmp_path, world, left_out, is_async, True, group=True).values()
    missed = set.union(*left_out.values())
    made = [step for step in range(LAST + 1) if step not in missed]
    assert [made] * world == [[step for step in range(LAST + 1) if told[step] == "saved"] for told in outcomes]
    assert [f"step_{step}" for step in made] == visible_tags(tmp_path)


@pytest.mark.parametrize(
    ("world", "left_out", "tags"), [(*LEFT_OUT[0], ""), (*LEFT_OUT[1], "abcdefgh"), (*LEFT_OUT[2], "")], ids=str
)
def test_ranks_that_meet_in_different_saves_are_in_step_again_soon(
    tmp_path: Path, world: int, left_out: dict[int, set[int]], tags: str
) -> None:
    """Where ranks do not wait for each other, or names tell no step, different saves meet, fail, and later ones work.
    """
    outcomes = Job(world, saves_but_for, tmp_path, world, left_out, True, False, tags, group=True).values()
    saved = [[step for step in range(LAST + 1) if told[step] == "saved"] for told in outcomes]
    assert saved == [saved[0]] * world
    assert LAST in saved[0]
    assert [tags[step:][:1] or f"step_{step}" for step in saved[0]] == visible_tags(tmp_path)


FIRST_LEFT_OUT = [(2, {1: {0}}), (2, {0: {0, 1}}), (2, {0: {0}, 1: {1}}), (3, {1: {0}, 2: {1}})]


@pytest.mark.parametrize(("world", "left_out"), FIRST_LEFT_OUT, ids=str)
def test_a_first_save_that_a_rank_left_out_fails_alone(
    tmp_path: Path, world: int, left_out: dict[int, set[int]]
) -> None:
    """The rank that is ahead waits until the others come to its save, however many it left out."""
    outcomes = Job(world, saves_but_for, tmp_path, world, left_out, True, False, group=True).values()
    made = [step for step in range(LAST + 1) if step not in set.union(*left_out.values())]
    assert [made] * world == [[step for step in range(LAST + 1) if told[step] == "saved"] for told in outcomes]
    assert [f"step_{step}" for step in made] == visible_tags(tmp_path)
