"""A small training loop, and how much a save in flight slows it down."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tools.bench.contestants.contract import Pending

ALONE = 0.3
"""Seconds of training before and after each save: the faster of them is what a step takes without one."""


class TrainingLoop:
    """Steps of some milliseconds, forward, backward and update, on the CPU."""

    def __init__(self) -> None:
        self._model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._batch = torch.rand(256, 512)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()

    def alone(self) -> float:
        """Seconds of a step while nothing else is done."""
        deadline = time.perf_counter() + ALONE
        return self.seconds_a_step(lambda: time.perf_counter() >= deadline)[0]

    def seconds_a_step(self, until: Callable[[], bool]) -> tuple[float, int]:
        """The mean of at least one step, and how many there were until ``until()``."""
        started, steps = time.perf_counter(), 0
        while steps == 0 or not until():
            self.step()
            steps += 1
        return (time.perf_counter() - started) / steps, steps


def slowdown(loop: TrainingLoop, save_async: Callable[[], Pending]) -> tuple[float, float]:
    """A step while a save is in flight in multiples of one alone; and the seconds that the save cost in all.

    The training uses all cores, so that none is left for the save.
    """
    with _on_all_cores():
        loop.step()  # starts torch's threads
        before = loop.alone()
        started = time.perf_counter()
        pending = save_async()
        stall = time.perf_counter() - started
        during, steps = loop.seconds_a_step(pending.done)
        pending.wait()
        alone = min(before, loop.alone())
    return during / alone, stall + steps * (during - alone)


@contextmanager
def _on_all_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
