"""A Checkpointer says after which steps to save: the same on all ranks."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.errors import CheckpointerClosed, CheckpointError, InvalidArgument
from tests.protocol.job import Job
from tests.protocol.states import PATIENCE, checkpointer, save, visible_tags

WORLD = 2
STATE = {"weight": torch.ones(2)}


def test_every_so_many_steps_are_saved(tmp_path: Path) -> None:
    """Not the step before the first."""
    saver = Checkpointer(tmp_path, every=4)
    assert [4, 8] == [step for step in range(10) if saver.should_save(step)]


@pytest.mark.parametrize(
    "options", [{"every": 0}, {"every": True}, {"every": 1.5}, {"every_minutes": 0}, {"every_minutes": "no"}], ids=repr
)
def test_what_is_no_interval_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    """At once."""
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Checkpointer(tmp_path, **options)


def test_a_question_without_a_schedule_is_refused(tmp_path: Path) -> None:
    """Otherwise nothing would ever be saved."""
    with pytest.raises(InvalidArgument, match="every=100"):
        Checkpointer(tmp_path).should_save(1)


def train(rank: int, path: Path) -> list[int]:
    """Train at a speed of each rank's own, until three saves; the saved steps."""
    saved = list[int]()
    with checkpointer(path, rank, WORLD, every_minutes=0.2 / 60) as saver:
        step = 0
        while len(saved) < 3:
            step += 1
            time.sleep(0.001 + 0.02 * rank)
            if saver.should_save(step):
                save(saver, f"step_{step}", step, async_save=True)
                saved.append(step)
    return saved


def test_ranks_save_the_same_steps_by_time(tmp_path: Path) -> None:
    """Though they wait for nobody in between, and rank 0, whose clock counts, is ahead of the other."""
    outcomes = Job(WORLD, train, tmp_path, group=True).values()
    assert [outcomes[0]] * WORLD == outcomes
    assert [f"step_{step}" for step in outcomes[0]] == visible_tags(tmp_path)


def test_time_counts_from_the_last_save(tmp_path: Path) -> None:
    """Of any kind. Until it is over there is nothing to save but by number."""
    with Checkpointer(tmp_path, every=2, every_minutes=60) as saver:
        assert [False, True, False] == [saver.should_save(step) for step in (1, 2, 3)]
    with Checkpointer(tmp_path, every_minutes=1e-6) as saver:
        saver.should_save(1)
        time.sleep(0.001)
        assert saver.should_save(2)


def test_ranks_without_a_group_cannot_go_by_time(tmp_path: Path) -> None:
    """What to do instead is said."""
    saver = Checkpointer(tmp_path, topology=Topology(dp=2, rank=0), run_id="a", every_minutes=1, timeout=PATIENCE)
    with pytest.raises(CheckpointError, match="pass every= in its place"):
        saver.should_save(1)


def train_to(path: Path, steps: int) -> None:
    """Train, save every second step, and the last; step 7 fails."""

    def save_last(step: int) -> None:
        saver.save(step, STATE)

    saver = Checkpointer(path, every=2, final_save=save_last)
    with saver:
        for step in range(1, steps + 1):
            if saver.should_save(step):
                saver.save(step, STATE, async_save=True)
            if step == 7:
                raise ZeroDivisionError


@pytest.mark.parametrize(("steps", "expected"), [(5, ["step_2", "step_4", "step_5"]), (4, ["step_2", "step_4"])])
def test_the_last_step_is_saved_at_the_end(tmp_path: Path, steps: int, expected: list[str]) -> None:
    """If it was asked for, and is not saved yet."""
    train_to(tmp_path, steps)
    assert expected == visible_tags(tmp_path)


def test_no_step_is_saved_at_the_end_of_a_run_that_failed(tmp_path: Path) -> None:
    """Its state may be half a step's."""
    with pytest.raises(ZeroDivisionError):
        train_to(tmp_path, 10)
    assert ["step_2", "step_4", "step_6"] == visible_tags(tmp_path)


def test_a_final_save_that_fails_is_raised(tmp_path: Path) -> None:
    """The directory is free all the same."""
    saver = Checkpointer(tmp_path, every=2, final_save=lambda step: 1 / 0)
    saver.save(2, STATE)
    saver.should_save(3)
    with pytest.raises(ZeroDivisionError):
        saver.close()
    with Checkpointer(tmp_path) as other:
        other.save(3, STATE)


def test_an_option_without_the_call_that_asks_for_it_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of a run that saved otherwise, since nothing else shows it."""
    for steps, messages in ((0, 2), (1, 0)):
        caplog.clear()
        with Checkpointer(tmp_path, final_save=lambda step: None, every=9, preemption=lambda: False) as saver:
            saver.save(1, STATE)
            for step in range(steps):
                saver.should_save(step), saver.step(step)
        assert messages == len(caplog.messages), caplog.messages
    with Checkpointer(tmp_path, every=9, preemption=lambda: False) as saver:
        saver.load_latest({})
    assert [] == caplog.messages


def test_one_that_is_closed_saves_nothing_more(tmp_path: Path) -> None:
    """Its place is given back, and a save would take it again for ever. It still loads, and another one may save."""
    with Checkpointer(tmp_path, every=1, preemption=lambda: False) as saver:
        saver.save(1, STATE)
    saver.close()
    calls = (lambda: saver.save(2, STATE), lambda: saver.step(2), lambda: saver.should_save(2), lambda: saver.remove(1))
    for call in calls:
        with pytest.raises(CheckpointerClosed, match=r"was closed, by close\(\) or the end of its with block"):
            call()
    assert (1, 1) == (saver.load_latest({}), saver.latest_step())
    with Checkpointer(tmp_path) as other:
        other.save(2, STATE)
    assert ["step_1", "step_2"] == visible_tags(tmp_path)
