"""A process that saves and loads for weeks: threads, descriptors, files and memory stay what they are."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.errors import CheckpointNotFound, SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.protocol.job import Job
from tests.protocol.states import visible_tags

WARM = 10
"""Rounds after which everything that is made once has been made, and what stays for one more job is there."""
CALLS = 5
"""Calls of a round."""
AT_MOST = 24 * 3600.0
"""Seconds. pytest's own timeout is shorter, where there is one."""


class Held(NamedTuple):
    """What this process holds, and how many files there are below the directory; memory in objects, and in bytes."""

    threads: int
    descriptors: int
    files: int
    objects: int
    nbytes: int

    @staticmethod
    def now(directory: Path) -> Held:
        gc.collect()
        files = sum(len(names) for _, _, names in os.walk(directory))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd"))
        return Held(threading.active_count(), descriptors, files, len(gc.get_objects()), pages * resource.getpagesize())


class Rounds:
    """Saves, loads, and failures of both, in one directory; every fifth round with a new Checkpointer."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.fails = directory, ""
        self.state = {"weight": torch.ones(1000), "bias": torch.zeros(10)}

    def held_after(self, rounds: range) -> Held:
        """What is held when the last Checkpointer of these is closed: what a save leaves is removed after it."""
        for first in range(rounds.start, rounds.stop, 5):
            with self._checkpointer() as saver:
                for number in range(first, min(first + 5, rounds.stop)):
                    self._round(saver, number)
        return Held.now(self.directory)

    def _round(self, saver: Checkpointer, number: int) -> None:
        tag = f"step_{number:06}"
        saver.save(tag, self.state, async_save=True, num_kept_ckpts=2).wait()
        saver.save(tag, self.state, user_content={"number": number})
        live = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        assert {"number": number} == saver.load(None, live)
        with pytest.raises(CheckpointNotFound):
            saver.load("absent", {})
        self.fails = ("write_at", "rename", "create", "sync_dir")[number % 4]
        with pytest.raises(SaveFailed):
            saver.save("never", self.state, async_save=number % 2 == 1).wait()
        self.fails = ""

    def _checkpointer(self) -> Checkpointer:
        storage = HookedStorage(LocalStorage(self.directory, durable=False), self._hook)
        return Checkpointer(self.directory, storage=storage)

    def _hook(self, operation: Operation) -> None:
        if operation.name == self.fails:
            raise OSError(errno.ENOSPC, "No space left on device", operation.key)


def held(rank: int, directory: Path, rounds: int) -> tuple[Held, Held]:
    """What is held after a few rounds, and after so many more."""
    logging.getLogger("nxd_ckpt").setLevel(logging.CRITICAL + 1)
    job = Rounds(directory)
    return job.held_after(range(WARM)), job.held_after(range(WARM, WARM + rounds))


@pytest.mark.parametrize("rounds", [10, pytest.param(5000 // CALLS, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
def test_nothing_is_left_of_saves_loads_and_failures(rounds: int, tmp_path: Path) -> None:
    """After thousands of them as after a few, in a process in which nothing else goes on."""
    [(before, after)] = Job(1, held, tmp_path, rounds).values(AT_MOST)
    assert before[:3] == after[:3]
    assert after.objects - before.objects < rounds
    assert after.nbytes - before.nbytes < 16 * 2**20
    assert 2 == len(visible_tags(tmp_path))
