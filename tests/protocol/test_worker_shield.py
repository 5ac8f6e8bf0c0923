"""SIGTERM for all processes of a job: data loaders' workers pass over it, until all ranks have saved the same step."""

import logging.handlers
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from nxd_ckpt import Checkpointer
from tests.protocol.job import Job, lead_a_group, until
from tests.protocol.states import checkpointer, save, saved_value, visible_tags


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class Stuck(IterableDataset[int]):
    """One item, which says who the worker is, then none for ever."""

    def __iter__(self) -> Iterator[int]:
        yield os.getpid()
        while True:
            time.sleep(600)


class StartsPrograms(IterableDataset[int]):
    """Each item is the exit code of a program that the worker ends by SIGTERM."""

    def __iter__(self) -> Iterator[int]:
        program = subprocess.Popen(["sleep", "600"])
        program.terminate()
        yield program.wait()


class Counted:
    """A script's own worker_init_fn."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, worker: int) -> None:
        (self._path / f"worker.{os.getpid()}").touch()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def workers(path: Path) -> list[int]:
    return [int(file.suffix[1:]) for file in path.glob("worker.*")]


def train(rank: int, path: Path, world: int, options: dict[str, Any]) -> int:
    """Train on what workers load until a step says to stop; at which step."""
    lead_a_group()
    common = {"multiprocessing_context": "fork", "kind": DataLoader, "count": 16}
    asked: dict[str, Any] = {**common, "number": signal.SIGTERM, **options}
    kind, count, number = (asked.pop(name) for name in ("kind", "count", "number"))
    loader = kind(Numbers(count), num_workers=2, worker_init_fn=Counted(path), **asked)
    step = 0
    with checkpointer(path, rank, world, preemption=number, preemption_grace=600.0) as saver:
        while True:
            for _ in loader:
                step += 1
                if world > 1:
                    dist.all_reduce(torch.ones(1))
                stop = saver.step(step)
                (path / f"rank_{rank}.ready").touch()
                if stop or step % 7 == 0:
                    save(saver, f"step_{step}", step, async_save=not stop, num_kept_ckpts=2)
                if stop:
                    return step


def stop_at_one_step(path: Path, world: int, options: dict[str, Any], wait: float = 0.0, each: bool = False) -> None:
    """Signal the groups of all ranks, or each process by itself: all stop at one step, and no worker is left."""
    ranks = Job(world, train, path, world, options, group=world > 1)
    until(lambda: all((path / f"rank_{rank}.ready").exists() or not ranks.alive(rank) for rank in range(world)))
    time.sleep(wait)
    number = options.get("number", signal.SIGTERM)
    for rank in range(world):
        with suppress(ProcessLookupError):  # it stopped because the others were told
            if each:
                ranks.signal(rank, number)
            else:
                os.killpg(ranks.pid(rank), number)
    for pid in workers(path) if each else ():
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    steps = ranks.values()
    assert {steps[0]} == set(steps)
    assert f"step_{steps[0]}" == visible_tags(path)[-1]
    assert steps[0] == saved_value(path, None, world)
    assert len(workers(path)) >= 2 * world
    until(lambda: all(map(gone, workers(path))))


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.soak) for each in ("forkserver", "spawn"))]
)
def test_a_signal_for_the_group_stops_at_a_saved_step(tmp_path: Path, method: str) -> None:
    """However workers are started."""
    count = 16 if method == "fork" else 100_000  # the other ways take seconds for each epoch
    stop_at_one_step(tmp_path, 1, {"multiprocessing_context": method, "count": count})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.one_in(4)
def test_workers_that_persist_are_shielded(tmp_path: Path, number: signal.Signals, each: bool) -> None:
    """Whichever signal it is, with torchdata's loader, on two ranks; and where all processes are signalled singly."""
    stop_at_one_step(tmp_path, 2, {"kind": StatefulDataLoader, "persistent_workers": True, "number": number}, each=each)


def warnings_about_early(rank: int, path: Path) -> list[str]:
    lead_a_group()
    queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logging.getLogger("nxd_ckpt").addHandler(logging.handlers.QueueHandler(queue))
    batches = iter(DataLoader(Numbers(4), num_workers=1, multiprocessing_context="fork"))
    next(batches)
    with Checkpointer(path, preemption=True):
        pass
    return [queue.get().getMessage() for _ in range(queue.qsize())]


def test_workers_that_started_before_are_named(tmp_path: Path) -> None:
    """Signals for them alone reach them, which a warning says."""
    ((said,),) = Job(1, warnings_about_early, tmp_path).values()
    assert "data loader workers (pid" in said
    assert "make the Checkpointer before iter(loader)" in said


def shielded_then_killed(rank: int, path: Path) -> None:
    """Never ends by itself: stuck workers got the signal, and pass over it."""
    lead_a_group()
    with Checkpointer(path, preemption=True) as saver:
        loader = DataLoader(Stuck(), num_workers=2, batch_size=None, multiprocessing_context="fork")
        batches = iter(loader)
        pids = [next(batches), next(batches)]
        os.killpg(0, signal.SIGTERM)
        until(lambda: saver.step(1))
        assert not any(map(gone, pids))
        (path / "pids").write_text(" ".join(map(str, pids)))
        time.sleep(600)


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    """Though it is stuck, and was signalled before: SIGKILL for the parent alone ends all."""
    ranks = Job(1, shielded_then_killed, tmp_path)
    until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    ranks.kill(0)
    until(lambda: all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split()))


def ends_of_stuck_workers(rank: int, path: Path) -> list[int | None]:
    """Exit codes: of one that its parent ends, and of one that it ends after the Checkpointer was closed."""
    lead_a_group()
    with Checkpointer(path, preemption=True) as saver:
        batches = iter(DataLoader(Stuck(), num_workers=2, batch_size=None, multiprocessing_context="fork"))
        pids = [next(batches), next(batches)]
        first, second = sorted(multiprocessing.active_children(), key=lambda child: pids.index(child.pid))
        os.killpg(0, signal.SIGTERM)
        until(lambda: saver.step(1))
        assert first.is_alive()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would raise
        first.terminate()
        first.join()
    os.kill(pids[1], signal.SIGTERM)
    second.join(0.1)
    assert second.is_alive()
    second.terminate()
    second.join()
    return [first.exitcode, second.exitcode]


def test_workers_end_as_before(tmp_path: Path) -> None:
    """By their parent at any time, and by nobody else, also once the signal has its former meaning for the parent."""
    assert [[0, 0]] == Job(1, ends_of_stuck_workers, tmp_path).values()


def sleep_for_ever(path: Path) -> None:
    (path / "other").touch()
    time.sleep(600)


def ends_of_others(rank: int, path: Path, method: str) -> list[Any]:
    """Exit codes of what workers and this process start that is no worker, each of which gets SIGTERM."""
    lead_a_group()
    with Checkpointer(path, preemption=True):
        loader = DataLoader(StartsPrograms(), num_workers=1, multiprocessing_context="fork")
        codes: list[Any] = [code.item() for code in loader]
        context: Any = multiprocessing.get_context(method)
        other = context.Process(target=sleep_for_ever, args=(path,), daemon=True)
        other.start()
        until((path / "other").exists)  # a signal in the middle of a fork may be lost, whoever forks
        other.terminate()
        other.join()
        return [*codes, other.exitcode]


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.soak)])
def test_only_workers_are_shielded(tmp_path: Path, method: str) -> None:
    """Programs that they start end by SIGTERM, and so do other processes."""
    assert [[-signal.SIGTERM] * 2] == Job(1, ends_of_others, tmp_path, method).values()
