"""SIGSTOP: rank 0 of a real job stands still until a job on another host has taken over, and goes on at any instant."""

from __future__ import annotations

import itertools
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nxd_ckpt import effects
from nxd_ckpt.commit import session
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.testing.storage import Operation
from tests.protocol.job import HANGS, Job
from tests.protocol.states import checkpointer, lose_patience, save, saved_value, visible_tags

pytestmark = [pytest.mark.plain, pytest.mark.once]

WORLD = 2
SILENCE = 0.3
"""Of the interval between two heartbeats, ten seconds: after so much without one, here, a job counts as dead."""
BEAT = "write .nxd_ckpt/heartbeat.json"
OPERATIONS = 120
"""Rank 0 has about so many in the saves in which it may stop."""

Told = dict[int, CheckpointError | None]
"""What a rank was told of each save: its error."""


def told(saver: Any, saves: list[tuple[str, int, dict[str, Any]]]) -> Told:
    found: Told = {}
    for tag, value, options in saves:
        try:
            save(saver, tag, value, **options)
            found[value] = None
        except CheckpointError as error:
            found[value] = error
    return found


def stops(rank: int, path: Path, at: int | str) -> Told:
    """The job that is taken over: in its later saves rank 0 stops itself, before the operation of that number, or the
    first one that is said so."""
    seen = itertools.count()
    armed = False

    def stop(operation: Operation) -> None:
        nonlocal armed
        is_it = next(seen) == at if isinstance(at, int) else f"{operation.name} {operation.key}".endswith(at)
        if armed and is_it:
            armed = False
            (path.parent / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)  # the signal may stop another thread first

    session._beat_interval = lambda session: 0.2
    saver = checkpointer(path, rank, WORLD, stop if rank == 0 else None)
    save(saver, "first", 1)
    lose_patience(saver)  # it may wait in vain for votes that the other job removed
    seen, armed = itertools.count(), True
    if at == BEAT and rank == 0:
        until_one_of(path.parent, "took0")
    found = told(saver, [("t", 2, {}), ("u", 3, {"num_kept_ckpts": 2})])
    with suppress(CheckpointError):  # of saves that are told of above
        saver.close()
    (path.parent / f"over{rank}").touch()
    return found


def takes_over(rank: int, path: Path, pause: float) -> Told:
    """A job on another host, which goes on saving after it has told that it took over."""
    effects.processes = lambda: "elsewhere/boot/namespace"
    session._PATIENCE = SILENCE  # type: ignore[assignment]
    saver = checkpointer(path, rank, WORLD)
    found = told(saver, [("t", 5, {})])
    (path.parent / f"took{rank}").touch()
    time.sleep(pause)
    found |= told(saver, [("first", 6, {}), ("u", 7, {})])
    saver.close()
    return found


def saves_once(rank: int, path: Path) -> Told:
    saver = checkpointer(path, rank, WORLD)
    found = told(saver, [("t", 9, {})])
    saver.close()
    return found


def until_one_of(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + HANGS
    while not any((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, f"none of {names} came"
        time.sleep(0.01)


def take_over(folder: Path, seed: int, at: int | str) -> None:
    """Raises AssertionError where a promise is broken."""
    random, path = Random(seed), folder / "ckpt"
    path.mkdir(parents=True)
    first = Job(WORLD, stops, path, at, group=True)
    until_one_of(folder, "stopped", "over0")
    if not (folder / "stopped").exists():  # it was over before that operation
        first.values()
        return
    second = Job(WORLD, takes_over, path, random.uniform(0.0, 0.3), group=True)
    until_one_of(folder, "took0")
    time.sleep(random.uniform(0.0, 0.4))
    first.signal(0, signal.SIGCONT)
    theirs, ours = second.values(), first.values()
    assert [dict.fromkeys((5, 6, 7))] * WORLD == theirs, f"{at}: the job that took over was disturbed: {theirs}"
    found = {tag: saved_value(path, tag, WORLD) for tag in visible_tags(path)}  # each is whole, and of one save
    said = {value for value, error in ours[0].items() if error is None}
    for tag, values in (("t", {5, 2}), ("first", {6}), ("u", {7, 3})):
        # What it saves, and what its rules remove, once the directory is free again, is its own affair.
        is_removed = 3 in said and tag not in found
        assert is_removed or found.get(tag) in values & ({5, 6, 7} | said), f"{at}: {found}"
    assert [{9: None}] * WORLD == Job(WORLD, saves_once, path, group=True).values()
    assert 9 == saved_value(path, "t", WORLD)


@pytest.mark.parametrize("at", ["/manifest.json", "/checkpoint", "/done", " -> t", BEAT])
@pytest.mark.one_in(2)
def test_a_job_that_stood_still_does_no_harm(tmp_path: Path, at: str) -> None:
    """Whatever it was about to do: it publishes nothing half, and disturbs nobody. The next job saves."""
    take_over(tmp_path, 0, at)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_jobs_that_stand_still_do_no_harm(tmp_path: Path) -> None:
    """Before every operation."""
    for at in range(OPERATIONS):
        take_over(tmp_path / str(at), at, at)
