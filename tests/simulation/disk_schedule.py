"""Schedules on a simulated disk."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.layout.names import HIDDEN
from nxd_ckpt.testing.simulation import EPOCH, Disk, DiskStorage, Killed, Process
from tests.simulation.job import WORLD_SIZE, Reader, Save, loaded, run_to_end
from tests.simulation.schedule import Run, Schedule, drawn
from tests.simulation.stage import disk_storage

EFFECTS = (75, 24)
"""About as many system calls of each rank change something in a save."""

FAULTS = ("nothing", "kill", "kill", "power", "power", "error", "full", "sync", "stall", "clock", "damage")

RENAMES = (10, 3)
"""So many of them are renames."""

_CHECKPOINTS = {"staging", "trash"}
"""What lies below these is no message."""


@dataclass(frozen=True)
class DiskSchedule(Schedule):
    """Its faults are also "power" (of everything), "error" (one system call fails), "full" (all that write do, for a
    while), "sync" (a sync fails, and drops pages), "damage" (a file by which ranks or jobs tell each other something
    loses its content). ``swaps``: whether two names can be exchanged."""

    swaps: bool = True
    rots: bool = False
    """Whether at the end a byte of a tag changes."""
    at_rename: bool = False
    """Whether ``at`` counts renames only: what a disk shows changes with them."""

    @staticmethod
    def of(seed: int) -> DiskSchedule:
        random = Random(f"schedule {seed}")
        fields = drawn(random, FAULTS, EFFECTS)
        fields |= {"swaps": random.random() < 0.6, "rots": random.random() < 0.1}
        if fields["fault"] not in ("full", "sync") and random.random() < 0.25:
            fields |= {"at_rename": True, "at": random.randrange(RENAMES[fields["rank"]] * len(fields["saves"]))}
        return DiskSchedule(seed, **fields)

    def start(self) -> DiskRun:
        return DiskRun(self)


class DiskRun(Run):
    """A schedule under way."""

    schedule: DiskSchedule

    def __init__(self, schedule: DiskSchedule) -> None:
        super().__init__(schedule)
        self.disk = Disk(lambda: EPOCH + self.world.now)
        self._effects = 0
        self._sync_failed = False

    def storage(self, process: Process) -> DiskStorage:
        return disk_storage(self, self.disk, process, self._before, swaps=self.schedule.swaps)

    def outside(self) -> DiskStorage:
        return DiskStorage(self.disk)

    def afterwards(self) -> None:
        """Whoever loads a tag of which a byte has changed gets what was saved, or is told."""
        if self.schedule.rots:
            random, save, reader = self.world.random, self.jobs[-1].begun[0][1], self.reader()
            path = random.choice([path for path in self.disk.files(save.tag) if self.disk.file(path).data])
            data = self.disk.file(path).data
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            run_to_end(self.world, [self.world.spawn(reader.process, partial(_read, reader, save))])

    def _before(self, process: Process, call: str, path: str) -> None:
        if not self.is_victim(process) or (call == "look" and not self.schedule.looks):
            return
        if self.schedule.at_rename and call != "rename":
            return
        self._effects += 1
        count, fault, at = self._effects, self.schedule.fault, self.schedule.at
        if fault == "full" and at <= count < at + 12 and call in ("create", "write", "mkdir"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        if fault == "sync" and at <= count and call == "fsync" and not self._sync_failed:
            self._sync_failed = True
            raise OSError(errno.EIO, "Input/output error", path)
        if count != at:
            return
        if fault == "power":
            for job in self.jobs:
                self.end(job)
            self.disk.crash_at_random(self.world.random)
            raise Killed
        if fault == "error":
            raise OSError(errno.EIO, "Input/output error", path)
        if fault == "damage":
            self._damage()
        self.disturb(process, fault)

    def _damage(self) -> None:
        """Of one of the files by which ranks and jobs tell each other something, nothing is left, a half, or zeros."""
        files = sorted(path for path in self.disk.files(HIDDEN) if path.split("/")[1] not in _CHECKPOINTS)
        if files:
            file = self.disk.file(self.world.random.choice(files))
            half = len(file.data) // 2
            file.data = self.world.random.choice((bytearray(), file.data[:half], bytearray(len(file.data))))
            file.sync()


def _read(reader: Reader, save: Save) -> None:
    for rank in range(WORLD_SIZE):
        with suppress(CheckpointError):
            assert save.value == loaded(reader.storage, rank, save.tag)
