"""Ranks meet for a call; one that does not come, or goes, is not waited for by the others longer than need be."""

import itertools
import threading
from typing import Any

import pytest
import torch.distributed as dist

from nxd_ckpt import effects
from nxd_ckpt.coordination import agreement, rendezvous
from nxd_ckpt.coordination.agreement import StoreAgreement
from nxd_ckpt.coordination.rendezvous import Rendezvous
from nxd_ckpt.errors import CheckpointError, PeerTimeout, RanksDisagree

LONG = 600.0


class Ranks:
    """The ranks of a job, threads here, and what came of their last calls."""

    def __init__(self, world_size: int) -> None:
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._world_size = world_size
        self.outcomes: dict[int, Any] = {}
        self.start()

    def start(self) -> None:
        """Their processes, new ones, which find the store as it is."""
        self.venues = [Rendezvous(self._store, rank, self._world_size) for rank in range(self._world_size)]

    def meeting(self, rank: int, timeout: float, call: str = "save") -> threading.Thread:
        """A started thread in which ``rank`` comes."""

        def run() -> None:
            try:
                self.outcomes[rank] = self.venues[rank].meet(timeout, call)
            except CheckpointError as error:
                self.outcomes[rank] = error

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def await_call(self, rank: int, number: int = 1) -> None:
        """Until that rank has asked."""
        self._store.wait([f"nxd_ckpt/call/{rank}/{number}"])


def test_who_came_hears_at_once_of_who_did_not() -> None:
    """Also one that rank 0 would have looked for after the missing one."""
    ranks = Ranks(3)
    second = ranks.meeting(2, LONG)
    ranks.await_call(2)
    ranks.meeting(0, 0.2).join()
    second.join(LONG / 2)
    assert not second.is_alive()
    assert {0, 2} == ranks.outcomes.keys()
    for outcome in ranks.outcomes.values():
        assert "rank 0 waited 0 s for rank 1" in str(outcome)


def test_a_call_that_one_rank_makes_alone_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While rank 0 waits, by its error, and where the others make another call."""
    monkeypatch.setattr(agreement, "_LONG", 0.1)
    monkeypatch.setattr(agreement, "_SLICE", 0.1)
    ranks = Ranks(2)
    ranks.meeting(0, 0.5, "latest_step").join()
    (message,) = caplog.messages
    assert "rank 0 has called latest_step, and waits for rank 1: all ranks must make that call. It fails " in message
    assert "or did not call latest_step, as all ranks must; look at its log" in str(ranks.outcomes[0])
    threads = [ranks.meeting(0, LONG, "latest_step"), ranks.meeting(1, LONG)]
    for thread in threads:
        thread.join()
    assert [RanksDisagree] * 2 == [type(ranks.outcomes[rank]) for rank in range(2)]
    assert "rank 0 calls latest_step, rank 1 save; all ranks must make the same calls" in str(ranks.outcomes[1])


@pytest.mark.parametrize(
    ("theirs", "passed"),
    [([6], True), ([5], False), ([4], False), ([6, 7], False), ([None], False)],
    ids=["ahead", "level", "behind", "moving", "uncounted"],
)
def test_a_rank_that_went_on_without_the_call_is_known_soon(
    theirs: list[int | None], passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in a collective operation that rank 0 has not begun; one that may yet come is waited for."""
    monkeypatch.setattr(agreement, "_SLICE", 0.02)
    answers = itertools.cycle(theirs)

    def begun() -> int | None:
        return next(answers) if threading.current_thread().name == "nxd_ckpt-peers" else 5

    monkeypatch.setattr(rendezvous, "operations_begun", begun)
    monkeypatch.setattr(rendezvous, "stands_in_one", lambda: True)
    ranks = Ranks(2)
    for thread in [ranks.meeting(0, LONG), ranks.meeting(1, LONG)]:
        thread.join()
    ranks.meeting(0, LONG if passed else 1.0).join()
    assert (RanksDisagree if passed else PeerTimeout) is type(ranks.outcomes[0])
    assert ("rank 0 calls save, and rank 1 has gone on without it" in str(ranks.outcomes[0])) == passed


@pytest.mark.parametrize(
    ("file", "function", "stands"),
    [
        ("torch/distributed/distributed_c10d.py", "barrier", True),
        ("torch/autograd/graph.py", "_engine_run_backward", True),
        ("torch/distributed/distributed_c10d.py", "recv", False),
        ("train.py", "forward", False),
    ],
)
def test_only_a_rank_in_a_collective_can_have_passed(file: str, function: str, stands: bool) -> None:
    """One that computes, or waits for another rank, may yet make the call."""
    names: dict[str, Any] = {}
    code = f"def {function}(begun, go):\n    begun.set()\n    go.wait()"
    exec(compile(code, f"/site-packages/{file}", "exec"), names)
    begun, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=names[function], args=(begun, go))
    thread.start()
    begun.wait()
    try:
        assert stands == rendezvous.stands_in_one()
    finally:
        go.set()
        thread.join()


PLACES = [(effects, "sleep"), (agreement.Words, "leave")]
"""Functions in which a rank waits for an answer, and in which it has a number, and has not called yet."""


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupted_rank_meets_the_others_at_the_next_call(
    place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It withdraws what it asked, as it does when its time is up."""
    ranks = Ranks(2)
    for thread in [ranks.meeting(rank, LONG) for rank in (0, 1)]:
        thread.join()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.venues[1].meet(LONG, "save")
    for thread in [ranks.meeting(rank, 60.0) for rank in (1, 0)]:
        thread.join()
    assert [StoreAgreement] * 2 == [type(ranks.outcomes[rank]) for rank in (0, 1)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_a_killed_process_called_is_no_call_of_the_next_one(
    order: tuple[int, int], place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun keeps the store for the processes that it starts again."""
    ranks = Ranks(2)
    with monkeypatch.context() as patch:

        def killed(*_: object) -> None:
            patch.setattr(agreement.Words, "add", killed)
            raise SystemExit

        patch.setattr(*place, killed)
        with pytest.raises(SystemExit):
            ranks.venues[1].meet(LONG, "load")
    ranks.start()
    first = ranks.meeting(order[0], 60.0)
    if order[0]:
        ranks.await_call(1, 2)
    for thread in [first, ranks.meeting(order[1], 60.0)]:
        thread.join()
    assert [StoreAgreement] * 2 == [type(ranks.outcomes[rank]) for rank in order], ranks.outcomes
