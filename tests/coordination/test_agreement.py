"""Agreement through a key-value store: every rank learns the same, or who is missing."""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from nxd_ckpt.coordination.agreement import Agreement, StoreAgreement, on_all
from nxd_ckpt.coordination.rendezvous import meet
from nxd_ckpt.errors import CheckpointError, DigestMismatch, PeerTimeout
from tests.support.clock import Clock
from tests.support.ranks import on_ranks
from tests.support.threads import in_threads


def test_what_one_rank_raises_all_raise() -> None:
    """The rank itself its own exception, the others the same class with the rank in front."""
    own = DigestMismatch("model/x.pt: its bytes changed")

    def check(agreement: Agreement) -> str:
        def step() -> str:
            if agreement.rank == 1:
                raise own
            return "fine"

        return on_all(agreement, step)

    first, second, third = on_ranks(3, check)
    assert second is own
    for error in (first, third):
        assert DigestMismatch is type(error)
        assert "on rank 1: model/x.pt: its bytes changed" == str(error)


def test_an_exception_that_is_not_ours_travels_too() -> None:
    """As a CheckpointError that names the class."""

    def check(agreement: Agreement) -> None:
        on_all(agreement, lambda: {"held": 1}["missing"] if agreement.rank == 0 else None)

    own, other = on_ranks(2, check)
    assert KeyError is type(own)
    assert CheckpointError is type(other)
    assert "on rank 0: KeyError: 'missing'" == str(other)


@pytest.mark.parametrize("absent", [0, 1])
def test_who_does_not_come_is_named(absent: int) -> None:
    """Rank 0 names the rank that is missing, the others rank 0; after the timeout."""

    def come(agreement: Agreement) -> Any:
        return None if agreement.rank == absent else on_all(agreement, lambda: None)

    error = on_ranks(2, come, timeout=0.3)[1 - absent]
    assert PeerTimeout is type(error)
    assert f"rank {1 - absent} waited 0 s for rank {absent}" in str(error)


@pytest.mark.parametrize("worker", [0, 1])
def test_who_shows_that_it_is_at_work_is_waited_for(monkeypatch: pytest.MonkeyPatch, worker: int) -> None:
    """For longer than the timeout, which counts from the last sign; rank 0 waits so for others too."""
    store, clock = dist.HashStore(), Clock()  # type: ignore[attr-defined]
    monkeypatch.setattr("nxd_ckpt.effects.monotonic", clock.monotonic)
    monkeypatch.setattr("nxd_ckpt.effects.sleep", clock.sleep)
    working, waiting = (StoreAgreement(store, rank, 2, 10.0) for rank in (worker, 1 - worker))

    def exchange(agreement: StoreAgreement) -> Any:
        return agreement.gather("done") if worker else agreement.broadcast("done")

    for second in range(0, 30, 5):
        clock.at(second, working.sign)
    clock.at(30, lambda: exchange(working))
    assert (["done", "done"] if worker else "done") == exchange(waiting)
    working.sign()
    last = clock.now
    with pytest.raises(PeerTimeout, match=f"rank {1 - worker} waited 10 s for rank {worker}"):
        exchange(waiting)
    assert 10 <= clock.now - last < 12


def test_the_store_does_not_fill_up() -> None:
    """Words that were taken are deleted: a long job agrees often."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    agreements = [StoreAgreement(store, rank, 2, 5.0) for rank in range(2)]

    def talk(agreement: Agreement) -> None:
        for _ in range(20):
            agreement.gather("word")

    in_threads(*(partial(talk, each) for each in agreements))
    assert 1 >= store.num_keys()  # rank 0's sign of life


def test_there_is_no_agreement_without_a_group() -> None:
    """Several ranks that nothing joins."""
    assert None is meet(1, 4, 5.0, "load")


def test_waiting_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A wait of minutes must not fill the log with the store's own warnings of its time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with pytest.raises(PeerTimeout):
        StoreAgreement(store, 1, 2, 0.1).broadcast(None)
    assert "" == capfd.readouterr().err
