"""A signal on one rank makes all save the same step, and stop."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.coordination import preemption
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage
from tests.protocol.hooks import Gate
from tests.protocol.job import Job, until
from tests.protocol.states import checkpointer, save, saved_value, visible_tags
from tests.support.logged import logged
from tests.support.threads import in_threads

WORLD = 4


def train(rank: int, path: Path, together: bool, **options: Any) -> tuple[int, list[str]]:
    """Train until a step says to stop, with a save under way all the while; at which step, and what was logged.

    With ``together``, a step of a rank ends when all have made it.
    """
    options = {"preemption": True, "preemption_grace": 600.0, **options}
    with logged() as messages, checkpointer(path, rank, WORLD, **options) as saver:
        (path / f"rank_{rank}.ready").touch()
        step, stop = 0, False
        while not stop:
            step += 1
            if together:
                dist.all_reduce(torch.ones(1))
            stop = saver.step(step)
            if stop or step % 3 == 0:
                save(saver, f"step_{step}", step, async_save=not stop, num_kept_ckpts=2)
    return step, messages


def ready(path: Path) -> bool:
    return all((path / f"rank_{rank}.ready").exists() for rank in range(WORLD))


def one_tag_of_one_step(path: Path, steps: list[int]) -> None:
    """All stopped at the same step; it is saved, whole, and the latest."""
    assert {steps[0]} == set(steps)
    assert f"step_{steps[0]}" == visible_tags(path)[-1]
    assert steps[0] == saved_value(path, None, WORLD)


def test_a_signal_on_one_rank_stops_all(tmp_path: Path) -> None:
    """At one step, which all save and rank 0 logs, though saves are in flight; ``kill`` sends the signal."""
    job = Job(WORLD, train, tmp_path, True, group=True)
    until(lambda: ready(tmp_path) and len(visible_tags(tmp_path)) >= 2)
    job.signal(2, signal.SIGTERM)
    outcomes = job.values()
    steps = [step for step, _ in outcomes]
    one_tag_of_one_step(tmp_path, steps)
    said = f"nxd_ckpt: rank 2 was told to stop (SIGTERM): all ranks stop after step {steps[0]}, and save it; "
    assert [1, *[0] * (WORLD - 1)] == [sum(line.startswith(said) for line in lines) for _, lines in outcomes]


def told_at_once(rank: int, path: Path) -> tuple[int, list[str]]:
    """Rank 1 is told before its first step and save; a function says so, not a signal."""
    return train(rank, path, False, preemption=lambda: rank == 1)


def test_a_rank_is_told_before_its_first_step(tmp_path: Path) -> None:
    """The ranks meet then, and stop as soon as they can: ranks that wait for nobody may be at any step."""
    one_tag_of_one_step(tmp_path, [step for step, _ in Job(WORLD, told_at_once, tmp_path, group=True).values()])


@pytest.fixture
def received() -> Iterator[list[int]]:
    """What the handler got that a script has installed for SIGUSR2."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR2, before)


def test_the_signal_is_ours_until_the_end(tmp_path: Path, received: list[int]) -> None:
    """It may come at any time, and stops all Checkpointers that wait for it. Then the script's own handler is back."""
    first, other = (Checkpointer(tmp_path, preemption=kind) for kind in (signal.SIGUSR2, int(signal.SIGUSR2)))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert [True, True, True] == [first.step(1), first.step(2), other.step(1)]
    first.close()
    os.kill(os.getpid(), signal.SIGUSR2)
    other.close()
    assert [] == received
    os.kill(os.getpid(), signal.SIGUSR2)
    assert [signal.SIGUSR2] == received


def test_the_signal_is_ours_until_the_last_save_is_written(tmp_path: Path, received: list[int]) -> None:
    """The end waits for it, whatever the signal's former handler would do."""
    gate = Gate()
    saver = Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path), gate), preemption=signal.SIGUSR2)
    saver.save("t", {"weight": torch.ones(3)}, async_save=True)

    def tell() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        gate.open.set()

    timer = threading.Timer(0.2, tell)
    timer.start()
    saver.close()
    timer.join()
    assert ([], ["t"]) == (received, visible_tags(tmp_path))
    os.kill(os.getpid(), signal.SIGUSR2)
    assert [signal.SIGUSR2] == received


def told(times: int, apart: float = 0.0) -> None:
    for number in range(times):
        time.sleep(apart if number else 0.0)
        os.kill(os.getpid(), signal.SIGUSR2)


def test_a_signal_that_no_step_looks_for_has_its_effect(
    tmp_path: Path, received: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of the grace, which is said at once: a script may never call step."""
    with Checkpointer(tmp_path, preemption=signal.SIGUSR2, preemption_grace=0.1):
        told(2)
        until(lambda: "has not called Checkpointer.step() yet" in caplog.text)
        until(lambda: received == [signal.SIGUSR2])
        assert "step() was not called: SIGUSR2 ends the process" in caplog.text
        told(1)
        assert 2 == len(received)


@pytest.mark.parametrize(("steps", "apart", "effects"), [(0, 0.1, 1), (0, 0.0, 0), (1, 0.1, 0)])
def test_another_signal_has_its_effect(
    tmp_path: Path, received: list[int], monkeypatch: pytest.MonkeyPatch, steps: int, apart: float, effects: int
) -> None:
    """If no step ever looks for it; at once it is the same signal, which the launcher passes on."""
    monkeypatch.setattr(preemption, "_APART", 0.05)
    with Checkpointer(tmp_path, preemption=signal.SIGUSR2) as saver:
        for step in range(steps):
            saver.step(step)
        told(2, apart)
        assert [signal.SIGUSR2] * effects == received
        assert saver.step(steps)


def test_a_script_without_further_steps_can_be_ended(
    tmp_path: Path, received: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """It may evaluate for long: after the grace another signal has its effect, but the first still has not."""
    with Checkpointer(tmp_path, preemption=signal.SIGUSR2, preemption_grace=0.1) as saver:
        saver.step(1)
        told(1)
        until(lambda: "0.1 s (preemption_grace) have passed since SIGUSR2" in caplog.text)
        assert [] == received
        told(1)
        assert [signal.SIGUSR2] == received
        assert saver.step(2)


def test_a_training_that_goes_on_can_be_ended(
    tmp_path: Path, received: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Another signal has its effect once a step follows the one that said to stop, and not in the last save."""
    with Checkpointer(tmp_path, preemption=signal.SIGUSR2, preemption_grace=0.01) as saver:
        told(1)
        assert saver.step(1)
        time.sleep(0.1)
        told(1)
        assert [] == received
        assert "preemption: " not in caplog.text
        assert saver.step(2)
        assert "True, which means to save and to stop, but the training goes on" in caplog.text
        told(1)
        assert [signal.SIGUSR2] == received


def test_what_cannot_be_taken_away_passes_the_signal_on(tmp_path: Path, received: list[int]) -> None:
    """A thread closes it, or another library has put a handler over ours, which calls it."""
    saver = Checkpointer(tmp_path, preemption=signal.SIGUSR2)
    in_threads(saver.close)
    os.kill(os.getpid(), signal.SIGUSR2)
    ours: Any = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda number, frame: ours(number, frame))
    with Checkpointer(tmp_path, preemption=signal.SIGUSR2) as again:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert again.step(1)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert [signal.SIGUSR2] * 2 == received


def test_the_default_of_a_signal_is_passed_on_to(tmp_path: Path) -> None:
    """A process whose Checkpointer was closed on a thread ends by SIGTERM."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        in_threads(Checkpointer(tmp_path, preemption=True).close)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert signal.SIGTERM == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) * -1


def test_a_forked_child_ends_as_before(tmp_path: Path) -> None:
    """A data loader's worker is ended by SIGTERM, which is not for it to stop the training."""
    ready, is_ready = os.pipe()
    with Checkpointer(tmp_path, preemption=True) as saver:
        child = os.fork()
        if child == 0:
            os.write(is_ready, b"1")
            while True:
                time.sleep(0.05)  # pause() would sleep on if the signal came just before it
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert (signal.SIGTERM, False) == (os.WTERMSIG(status), saver.step(1))


def test_without_preemption_no_step_is_the_last(tmp_path: Path) -> None:
    """So a script may call step, whether the option is on or not."""
    with Checkpointer(tmp_path) as saver:
        assert [False, False] == [saver.step(1), saver.step(2)]


def test_ranks_without_a_group_cannot_agree(tmp_path: Path) -> None:
    """Which is said at the first step."""
    with (
        Checkpointer(tmp_path, topology=Topology(dp=2), preemption=lambda: False, run_id="r") as saver,
        pytest.raises(CheckpointError, match="no process group joins the ranks"),
    ):
        saver.step(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_each_of_several_signals_stops(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C as well; after the end both have their former handlers, and the script knows that it was stopped."""
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGUSR1)]
    with Checkpointer(tmp_path, preemption=(signal.SIGINT, signal.SIGUSR1)) as saver:
        assert (False, False) == (saver.step(1), saver.stopped)
        os.kill(os.getpid(), number)
        assert (True, True) == (saver.step(2), saver.stopped)
    assert before == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGUSR1)]
    assert saver.stopped


@pytest.mark.parametrize("notice", ["SIGNOTHING", 9, 1000, -1, 1.5, (), (15, 9), [15, True]], ids=repr)
def test_what_tells_nothing_is_refused(tmp_path: Path, notice: Any) -> None:
    """A name, signals that no process can handle or that there are none of."""
    with pytest.raises(InvalidArgument, match="preemption"):
        Checkpointer(tmp_path, preemption=notice)


def test_what_else_is_refused(tmp_path: Path) -> None:
    """No time at all, and a signal on a thread that may not handle it."""
    with pytest.raises(InvalidArgument, match="preemption_grace must be a time above 0"):
        Checkpointer(tmp_path, preemption=True, preemption_grace=0)
    with pytest.raises(InvalidArgument, match="on the main thread, or give a function"):
        in_threads(lambda: Checkpointer(tmp_path, preemption=True))
