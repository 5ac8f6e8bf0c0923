"""The promises, under schedules of two ranks that a seed chooses: interleavings, crashes, faults."""

from __future__ import annotations

import os

import pytest

from tests.simulation.__main__ import counted, run_all
from tests.simulation.schedule import Schedule, run

pytestmark = [pytest.mark.plain, pytest.mark.once]

SLICE = 250
"""Schedules of `make test`; `make soak` runs the rest."""


def test_the_promises_hold_under_any_schedule() -> None:
    """A failure names its seed; ``python -m tests.simulation --count 1 --first SEED`` runs it again."""
    assert [] == counted(range(SLICE)).failures


@pytest.mark.parametrize("fault", ["power", "kill"])
def test_a_seed_is_replayed_exactly(fault: str) -> None:
    """Every system call of every process comes at the same simulated time again."""
    seed = next(seed for seed in range(10_000) if Schedule.of(seed).fault == fault)
    traces = [run(seed).trace for _ in range(2)]
    assert len(traces[0]) > 100
    assert traces[0] == traces[1]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_promises_hold_under_a_million_schedules() -> None:
    """``SCHEDULES=n`` in the environment runs another number of them."""
    total = run_all(SLICE, int(os.environ.get("SCHEDULES", "1000000")), os.cpu_count() or 1)
    assert [] == total.failures
