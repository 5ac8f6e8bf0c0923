"""The pool of ranks reports what happened on each of them, and never waits for the dead."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rank_pool import RankPool, WorkerDied, WorkerError, WorkerTimeout


@pytest.fixture(scope="module")
def cpu_ranks() -> Iterator[RankPool]:
    """Two plain CPU ranks."""
    with RankPool(nproc=2) as pool:
        yield pool


def fails_on(rank: int, failing: int) -> int:
    import torch.distributed as dist

    if rank == failing:
        raise LookupError(f"no batch on {rank}")
    dist.barrier()
    return rank


def lookup_fails(rank: int) -> int:
    if rank == 1:
        raise LookupError("no batch")
    return rank


def dies(rank: int, where: int) -> str:
    if rank == where:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def stops(rank: int, begun: Path) -> None:
    begun.touch()
    time.sleep(600)


def test_exception_is_raised_with_rank_and_traceback(cpu_ranks: RankPool) -> None:
    """A failing rank's exception reaches the parent with its rank, traceback and cause."""
    with pytest.raises(WorkerError, match=r"rank 1, lookup_fails: LookupError: no batch") as caught:
        cpu_ranks.run(lookup_fails)
    assert 1 == caught.value.rank
    assert "in lookup_fails" in caught.value.traceback
    assert isinstance(caught.value.cause, LookupError)


def test_failure_is_raised_although_a_peer_waits(cpu_ranks: RankPool) -> None:
    """The failing rank is the one reported, not the one that hangs in a barrier; the pool works again after."""
    with pytest.raises(WorkerError, match="rank 0, fails_on: LookupError") as caught:
        cpu_ranks.run(fails_on, 0, grace=1)
    assert "also: rank 1" in str(caught.value)
    assert [0, 1] == cpu_ranks.run(fails_on, -1)


def test_killed_rank_is_noticed(cpu_ranks: RankPool) -> None:
    """A rank that is killed is reported as dead; the others' results are there."""
    first, second = cpu_ranks.run(dies, 1, return_errors=True)
    assert "done" == first
    assert isinstance(second, WorkerDied)
    assert "SIGKILL" in str(second)


def test_hanging_rank_is_killed_with_its_stack(cpu_ranks: RankPool, tmp_path: Path) -> None:
    """After the timeout, the error shows where the rank hung."""
    run = cpu_ranks.start(stops, tmp_path / "begun")
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    with pytest.raises(WorkerTimeout, match="in stops"):
        run.result(timeout=0)
