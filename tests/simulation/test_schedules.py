"""The promises, under schedules of two ranks that a seed chooses: interleavings, crashes, faults."""

from __future__ import annotations

import os

import pytest

from tests.simulation.__main__ import counted, run_all
from tests.simulation.job import Save
from tests.simulation.schedule import EFFECTS, Schedule, run

pytestmark = [pytest.mark.plain, pytest.mark.once]

SLICE = 200
"""Schedules of `make test`; `make soak` runs the rest."""


def test_the_promises_hold_under_any_schedule() -> None:
    """A failure names its seed; ``python -m tests.simulation --count 1 --first SEED`` runs it again."""
    assert [] == counted(range(SLICE)).failures


@pytest.mark.parametrize("fault", ["power", "kill"])
def test_a_seed_is_replayed_exactly(fault: str) -> None:
    """Every system call of every process comes at the same simulated time again."""
    schedule = next(found for found in map(Schedule.of, range(1000)) if found.fault == fault)
    traces = [run(schedule).trace for _ in range(2)]
    assert len(traces[0]) > 100
    assert traces[0] == traces[1]


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("fault", ["kill", "power"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_promises_hold_whatever_instant_a_tag_that_is_replaced_is_interrupted_at(
    swaps: bool, fault: str, rank: int
) -> None:
    """Before each system call of the rank, with and without an exchange of names."""
    for at in range(EFFECTS):
        run(Schedule(at, (Save("a", 1), Save("a", 2)), fault, rank, at, swaps))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_promises_hold_under_a_million_schedules() -> None:
    """``SCHEDULES=n`` in the environment runs another number of them."""
    total = run_all(SLICE, int(os.environ.get("SCHEDULES", "1000000")), os.cpu_count() or 1)
    assert [] == total.failures


FOUND = [
    # Rank 0 could not open its session, and its second save was taken for the first one of rank 1: a mixed tag.
    Schedule(1176, (Save("a", 1, is_async=True), Save("a", 2, is_async=True)), "error", rank=0, at=1),
    Schedule(1206, (Save("a", 1), Save("a", 2, is_async=True)), "error", rank=0, at=7),
]


@pytest.mark.parametrize("schedule", FOUND, ids=lambda schedule: str(schedule.seed))
def test_what_was_found_stays_mended(schedule: Schedule) -> None:
    """Schedules that broke a promise once."""
    run(schedule)
