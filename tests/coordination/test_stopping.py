"""All ranks stop at one step, whoever is told to stop, and at whatever steps they are then."""

import random
import threading
import time
from typing import Any

import pytest

from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement
from nxd_ckpt.coordination.peers import ConnectionToRank0, Heard, Peers, Rank0Connections
from nxd_ckpt.coordination.stopping import Stopping
from nxd_ckpt.errors import PeerTimeout
from tests.support.ranks import on_ranks

LONG = 600.0


class Training:
    """Steps that ranks make together: none begins one while another is more than ``skew`` steps behind."""

    def __init__(self, world_size: int, skew: int) -> None:
        self._made, self._skew, self._changed = [0] * world_size, skew, threading.Condition()

    def step(self, rank: int) -> int:
        """Make the next step; its number."""
        with self._changed:
            self._made[rank] += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: min(self._made) >= self._made[rank] - self._skew, LONG)
            return self._made[rank]


def connected(world_size: int) -> list[Peers | None]:
    hub = Rank0Connections(b"secret")
    return [hub, *(ConnectionToRank0(rank, hub.address(), b"secret") for rank in range(1, world_size))]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.soak] if seed >= 10 else []) for seed in range(30)]
)
def test_all_stop_at_the_same_step(seed: int) -> None:
    """However far apart ranks may be, and where several are told at once; none hangs, none passes the step."""
    chance = random.Random(seed)
    world_size, skew = chance.randint(2, 5), chance.randint(0, 3)
    told = {rank: chance.randint(1, 9) for rank in chance.sample(range(world_size), chance.randint(1, world_size))}
    training = Training(world_size, skew)

    def train(agreement: Agreement) -> int:
        rank, step = agreement.rank, 0
        stopping = Stopping(agreement, lambda: "SIGTERM" if step >= told.get(rank, 1000) else None, LONG)
        stop = False
        while not stop:
            step = training.step(rank)
            stop = stopping.step(step)
        assert stopping.step(step + 1)
        return step

    steps = on_ranks(world_size, train, ends=connected(world_size))
    first = min(told.values())
    assert {steps[0]} == set(steps)
    assert first <= steps[0] <= first + skew + 1


def test_one_rank_stops_at_its_next_step() -> None:
    """Nobody has to be asked."""
    told: list[str] = []
    stopping = Stopping(SingleProcessAgreement(), lambda: next(iter(told), None), LONG)
    before = stopping.step(1)
    told.append("SIGTERM")
    assert (False, True) == (before, stopping.step(2))


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    """It made its last step before another was told: there is no step at which all could stop, and training ends."""
    left = threading.Event()

    def train(agreement: Agreement) -> list[bool]:
        stopping = Stopping(agreement, lambda: "SIGTERM" if agreement.rank == 0 and left.is_set() else None, LONG)
        steps = [stopping.step(1)]
        if agreement.rank == 0:
            left.wait(LONG)
        steps.append(stopping.step(2))
        if agreement.rank == 1:
            stopping.leave()
            left.set()
        return steps

    assert [[False, False]] * 2 == on_ranks(2, train, ends=connected(2))


def test_a_rank_that_is_gone_is_an_error() -> None:
    """On all others, naming it: no save would be complete without it."""
    ends, left = connected(3), threading.Event()
    spoke = ends[2]
    assert isinstance(spoke, ConnectionToRank0)

    def train(agreement: Agreement) -> None:
        stopping = Stopping(agreement, lambda: "SIGTERM" if agreement.rank == 1 and left.is_set() else None, LONG)
        if agreement.rank == 2:
            spoke.leave()
            left.set()
            return
        left.wait(LONG)
        while not stopping.step(1):
            pass

    outcomes = on_ranks(3, train, ends=ends)
    message = "rank 1 was told to stop (SIGTERM), but no step is common to all: rank 2 ended; see its log"
    assert [message, message, "None"] == [str(outcome) for outcome in outcomes]
    assert isinstance(outcomes[0], PeerTimeout)


class Noted(Rank0Connections):
    """Rank 0's end, with the channels that somebody listens to."""

    def __init__(self) -> None:
        super().__init__(b"secret")
        self.heard = set[int]()

    def listen(self, channel: int, heard: Heard | None) -> None:
        super().listen(channel, heard)
        (self.heard.discard if heard is None else self.heard.add)(channel)


@pytest.mark.parametrize("stops", [True, False])
def test_rank_0_listens_until_all_have_stopped_or_left(stops: bool) -> None:
    """Not longer: for saves by time the ranks are joined again and again, each time on a channel of its own."""
    hub, others_left = Noted(), threading.Event()
    spoke = ConnectionToRank0(1, hub.address(), b"secret")

    def train(agreement: Agreement) -> bool:
        stopping = Stopping(agreement, lambda: "a time is over" if stops else None, LONG, goes_on=True)
        stopped = [stopping.step(number) for number in range(3)][-1]
        if agreement.rank == 0:
            others_left.wait(LONG)
            assert stops is not bool(hub.heard)
        stopping.leave()
        others_left.set()
        return stopped

    assert [stops] * 2 == on_ranks(2, train, ends=[hub, spoke])
    deadline = time.monotonic() + LONG
    while hub.heard and time.monotonic() < deadline:
        time.sleep(0.01)  # the last word may be on its way
    assert set() == hub.heard


class Deaf:
    """An end that never says or hears a word."""

    def is_gone(self, rank: int) -> bool:
        return False

    def listen(self, channel: int, heard: Heard | None) -> None:
        pass

    def tell(self, channel: int, word: Any) -> None:
        pass


@pytest.mark.parametrize(("rank", "silent"), [(0, "no answer from rank 1"), (1, "rank 0 did not say where")])
def test_the_grace_is_what_agreeing_may_take(rank: int, silent: str) -> None:
    """Then the rank that was told gives up, and says who was silent."""

    def train(agreement: Agreement) -> None:
        stopping = Stopping(agreement, lambda: "SIGTERM", 0.1)
        if agreement.rank == rank:
            stopping.step(1)

    outcome = on_ranks(2, train, ends=[Deaf(), Deaf()])[rank]
    assert f"rank {rank} was told to stop (SIGTERM), but {silent} within 0.1 s (preemption_grace)" == str(outcome)


def test_without_connections_nothing_is_agreed_on() -> None:
    """All are told at the first step, not when it is too late."""
    ends = [Rank0Connections(b"secret"), None]
    outcomes = on_ranks(2, lambda agreement: Stopping(agreement, lambda: None, LONG), ends=ends)
    assert [True, True] == ["rank 1 has no connection to rank 0" in str(outcome) for outcome in outcomes]
