"""Threads beside the caller's: as many as there is to do, and none when that is done."""

import threading
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, effects
from nxd_ckpt.saving.pending import Helpers


def _of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_tasks_run_side_by_side_and_threads_end() -> None:
    """As many as the count says, and no more; all tasks are run, whenever they come."""
    helpers, together = Helpers(4, "together"), threading.Barrier(4)
    numbers: list[int] = []
    for _ in range(3):
        futures = [helpers.submit(together.wait, 60) for _ in range(4)]
        futures += [helpers.submit(numbers.append, number) for number in range(100)]
        for future in futures:
            future.result(60)
        assert len(_of("together")) <= 4
    helpers.shutdown()
    assert 300 == len(numbers)
    assert not _of("together")
    assert 7 == helpers.submit(int, "7").result(60)
    helpers.shutdown()


def test_an_error_is_its_futures() -> None:
    """And the thread goes on."""
    helpers = Helpers(1, "failing")
    failing, next_one = helpers.submit(int, "x"), helpers.submit(int, "1")
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(60)
    assert 1 == next_one.result(60)
    helpers.shutdown()


def test_what_has_not_begun_is_given_up() -> None:
    """If asked for; what has begun is waited for."""
    helpers, begun, gate = Helpers(1, "given up"), threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        gate.wait(60)
        return "done"

    futures = [helpers.submit(first), helpers.submit(int, "1")]
    assert begun.wait(60)
    threading.Timer(0.05, gate.set).start()
    helpers.shutdown(cancel_futures=True)
    assert futures[1].cancelled()
    assert "done" == futures[0].result(0)


def test_without_threads_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter exits."""

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(effects, "Thread", Refused)
    helpers = Helpers(2, "refused")
    assert threading.get_ident() == helpers.submit(threading.get_ident).result(0)
    helpers.shutdown()


def test_directories_that_wait_keep_few_threads(tmp_path: Path) -> None:
    """One that writes and one for the lease, each, once their saves are over."""
    before = threading.active_count()
    state = {f"weight_{number}": torch.ones(4) for number in range(20)}
    checkpointers = [Checkpointer(tmp_path / str(number), durable=False) for number in range(8)]
    for checkpointer in checkpointers:
        checkpointer.save("t", state, use_xser=True)
    for thread in _of("nxd_ckpt-helper"):
        thread.join(60)
    assert threading.active_count() - before <= 2 * len(checkpointers)
    for checkpointer in checkpointers:
        checkpointer.close()
    assert threading.active_count() <= before
