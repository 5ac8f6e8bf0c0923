"""What a slow second tier costs training: ``python -m tools.bench.tiers --mib 64 --rounds 9``.

In turns a job saves, while it trains, to one tier alone, and to the same with a second one of ``--rate``, of whose
requests a share fails and is tried again. Printed are the medians of stall and step time, and of their ratios round by
round; how late the last copy of a round was; and the memory of the process from round to round. What others use of the
machine is in every number: the steps take one processor, so at least one more should be free. Processor seconds depend
less on it: those of a step, and those of all other threads for each save.

``--after 20 100 200`` measures something else: what the process and its tiers hold after so many saves, all copied.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from threading import Event, Timer
from typing import NamedTuple

import torch

from nxd_ckpt import Checkpointer, Tier
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.wrapper import RetryingStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tools.bench.host import resident
from tools.bench.results import ratios
from tools.bench.training import TrainingLoop

MIB = 2**20
TENSOR = 4 * MIB


class Round(NamedTuple):
    """Means of one turn, in seconds: of its saves and of its steps; processor seconds of a step, and for each save of
    all threads but the training's; and until the second tier had the last save."""

    stall: float
    step: float
    processor: float
    background: float
    lag: float


_PAUSE = 0.05
"""Seconds after which a store's client sends a part of a file again."""


class Flaky:
    """A share of the requests fails, as of a network. A store's client sends parts of a file again by itself."""

    def __init__(self, share: float) -> None:
        self._share, self._random = share, Random(0)
        self.requests = self.failed = 0

    def __call__(self, operation: Operation) -> None:
        if operation.name in ("link_new", "exchange", "rename", "settle", "abort"):
            return
        self.requests += 1
        while self._random.random() < self._share:
            self.failed += 1
            if operation.name not in ("write_at", "close"):
                raise ConnectionError(f"{operation.name} of {operation.key} failed")
            time.sleep(_PAUSE)


_number = itertools.count()


def turn(saver: Checkpointer, model: dict[str, torch.Tensor], loop: TrainingLoop, saves: int, seconds: float) -> Round:
    """So many saves, each followed by so many seconds of training."""
    stalls, steps, processor, count = 0.0, 0.0, 0.0, 0
    others, last = _other_threads(), time.perf_counter()
    for _ in range(saves):
        began = last = time.perf_counter()
        saver.save(f"step_{next(_number)}", model, async_save=True)
        stalls += time.perf_counter() - began
        until = Event()
        timer = Timer(seconds, until.set)
        timer.start()
        busy = time.thread_time()
        mean, done = loop.seconds_a_step(until.is_set)
        processor += time.thread_time() - busy
        steps, count = steps + mean * done, count + done
    saver.wait(tier=len(saver.tiers) - 1)
    lag, background = time.perf_counter() - last, _other_threads() - others
    return Round(stalls / saves, steps / count, processor / count, background / saves, lag)


def _other_threads() -> float:
    """Processor seconds so far of all threads of the process but this one."""
    return time.process_time() - time.thread_time()


def hold(saver: Checkpointer, model: dict[str, torch.Tensor], after: Sequence[int], folders: Sequence[Path]) -> None:
    """Save, and print what is held after each of these numbers of saves."""
    for number in range(1, max(after) + 1):
        saver.save(f"step_{next(_number)}", model, async_save=True)
        saver.wait(tier=1)
        if number in after:
            files = ", ".join(str(sum(found.is_file() for found in folder.rglob("*"))) for folder in folders)
            print(
                f"after {number} saves: {resident() / MIB:.1f} MiB, {len(os.listdir('/proc/self/fd'))} open files, "
                f"{threading.active_count()} threads, files on the tiers: {files}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.tiers", description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=3, help="in a turn (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of training after each (default: %(default)s)")
    parser.add_argument("--rate", default="20MB", help="of the second tier, a second (default: %(default)s)")
    parser.add_argument("--failing", type=float, default=0.3, help="share of its requests (default: %(default)s)")
    parser.add_argument("--after", type=int, nargs="+", help="numbers of saves after which to show what is held")
    parser.add_argument("--directory", help="where to work (default: the system's temporary directory)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = {f"layer.{number}": torch.rand(TENSOR // 4) for number in range(given.mib * MIB // TENSOR)}
    flaky, loop = Flaky(given.failing), TrainingLoop()
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        path = Path(folder)
        far = RetryingStorage(HookedStorage(LocalStorage(path / "far"), flaky), retries=20)
        first, second = Tier(path / "near", keep=2), Tier("far", keep=2, storage=far, max_bytes_per_second=given.rate)
        with Checkpointer(tiers=[Tier(path / "alone", keep=2)]) as alone, Checkpointer(tiers=[first, second]) as both:
            if given.after:
                hold(both, model, given.after, [path / "near", path / "far"])
                return
            turns: dict[str, list[Round]] = {"one tier": [], "two tiers": []}
            memory = []
            for number in range(given.rounds + 1):
                for name, saver in (("one tier", alone), ("two tiers", both)):
                    found = turn(saver, model, loop, given.saves, given.seconds)
                    turns[name].extend([found] * (number > 0))  # the first turn allocates, plans and agrees
                memory.append(resident() / MIB)
    _show(turns, memory)
    print(f"{flaky.failed} of {flaky.requests} requests failed")


def _show(turns: dict[str, list[Round]], memory: list[float]) -> None:
    for what in ("stall", "step", "processor"):
        one, two = ([getattr(found, what) for found in turns[name]] for name in turns)
        found = sorted(ratios(two, one))
        print(
            f"{what}: {statistics.median(one) * 1e3:.2f} ms with one tier, {statistics.median(two) * 1e3:.2f} ms with "
            f"two; ratio of a round: median {statistics.median(found):.3f}, {found[0]:.3f} to {found[-1]:.3f}"
        )
    others = (statistics.median(found.background for found in turns[name]) * 1e3 for name in turns)
    print("other threads, processor time of a save: {:.0f} ms with one tier, {:.0f} ms with two".format(*others))
    lags = sorted(found.lag for found in turns["two tiers"])
    print(f"second tier: {statistics.median(lags):.1f} s behind the last save, at most {lags[-1]:.1f} s")
    print(f"memory: {memory[1]:.0f} MiB after the first round, {memory[-1]:.0f} MiB after the last")


if __name__ == "__main__":
    main()
