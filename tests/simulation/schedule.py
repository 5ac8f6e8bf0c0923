"""One schedule: what two launches of a job do, what goes wrong meanwhile, and whether the promises hold.

All of it follows from a seed.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from nxd_ckpt.layout.names import HIDDEN
from nxd_ckpt.testing.simulation import EPOCH, Disk, Killed, Process, World, inhabited
from tests.simulation.job import TIMEOUT, WORLD_SIZE, Job, Save, among, run_to_end
from tests.simulation.stage import Stage

EFFECTS = 130
"""About as many system calls of a rank change something in two saves."""

_CHECKPOINTS = {"staging", "trash"}
"""What lies below these is no message."""


@dataclass(frozen=True)
class Schedule:
    """``saves`` of the first launch, and what goes wrong ``at`` which effect of which rank: "nothing", "kill",
    "power" (of everything), "error" (one system call fails), "full" (all that write do, for a while), "sync" (a sync
    fails, and drops pages), "stall" (the rank stands still), "clock" (its wall clock jumps), "damage" (a file by which
    ranks or jobs tell each other something loses its content). ``rival`` are the saves of another job in the same
    directory, which comes ``late`` by so many seconds."""

    seed: int
    saves: tuple[Save, ...]
    fault: str
    rank: int
    at: int
    swaps: bool = True
    has_group: bool = False
    machines: tuple[str, ...] = ("one", "two", "three", "four")
    """Of the two ranks of the first launch, of those of the next, and of those of the rival."""
    reads: bool = False
    rival: tuple[Save, ...] = ()
    late: float = 0.0

    @staticmethod
    def of(seed: int) -> Schedule:
        random = Random(f"schedule {seed}")
        kind = random.choice(("new", "overwrite", "retention", "mixed"))
        tags = {"new": ("a", "b"), "overwrite": ("a", "a"), "retention": ("a", "b"), "mixed": ("a", "b", "a")}[kind]
        kept = random.choice((1, 1, 2)) if kind in ("retention", "mixed") else None
        fault = random.choice(("nothing", "kill", "kill", "power", "power", "error", "full", "sync", "stall", "clock"))
        refused = random.choice((None,) * 9 + (0,))
        schedule = Schedule(
            seed=seed,
            saves=tuple(
                Save(tag, value, random.random() < 0.6, kept, fails_on=refused if value == 2 else None)
                for value, tag in enumerate(tags, start=1)
            ),
            fault=fault,
            rank=random.randrange(WORLD_SIZE),
            at=random.randrange(EFFECTS),
            swaps=random.random() < 0.6,
            has_group=random.random() < 0.5,
            machines=random.choice((("one", "one", "one"), ("one", "two", "three"))),
            reads=random.random() < 0.3,
        )
        if random.random() < 0.12:
            schedule = replace(schedule, fault="damage")
        if random.random() < 0.12:
            tags = random.choice((("x", "y"), ("x", "a")))
            rival = tuple(Save(tag, value, random.random() < 0.6) for value, tag in enumerate(tags, start=5))
            late = random.choice((0.0, 0.5, 20.0)) * random.random()
            fault = random.choice(("nothing", "stall", schedule.fault))
            machines = (*schedule.machines, random.choice(("one", "four")))
            schedule = replace(schedule, fault=fault, machines=machines, rival=rival, late=late)
        return schedule


class Run(Stage):
    """A schedule under way."""

    def __init__(self, schedule: Schedule) -> None:
        world = World(schedule.seed, lasts=400.0)
        disk = Disk(lambda: EPOCH + world.now)
        super().__init__(world, disk, swaps=schedule.swaps, has_group=schedule.has_group)
        self.schedule = schedule
        self.effects = Counter[Process]()
        self.is_out = False
        self._sync_failed = False

    def go(self) -> None:
        """Raises AssertionError where a promise is broken."""
        with inhabited(self.world), among(self.jobs, self.world):
            schedule = self.schedule
            first = self.launch("first", schedule.machines[:2], list(schedule.saves))
            if schedule.rival:
                first += self.launch("rival", schedule.machines[3:] * 2, list(schedule.rival), late=schedule.late)
            reader = self.reader()
            reading = [self.world.spawn(reader.process, reader.run)] if schedule.reads else []
            run_to_end(self.world, first)
            self.look()
            self.hold(reader)
            refused = any(save.fails_on is not None for save in schedule.saves)
            if schedule.rival and schedule.fault == "nothing" and not refused:
                self.promises.jobs_keep_apart(self.jobs)
            for job in self.jobs:
                if any(not process.alive for process in job.processes):
                    self._end(job)
            self.is_out = True
            self.finish("second", schedule.machines[2:3] * 2)
            reader.is_over = True
            run_to_end(self.world, reading)
            self.hold(reader)
            self.next_saves_work()

    def _end(self, job: Job) -> None:
        """A launcher ends what is left of a job when one of its ranks has died."""
        for process in job.processes:
            self.world.kill(process)

    def before(self, process: Process, call: str, path: str) -> None:
        self.effects[process] += 1
        if not self.is_out and process is self.jobs[0].processes[self.schedule.rank]:
            self._fault(process, call, self.effects[process], path)

    def _fault(self, process: Process, call: str, count: int, path: str) -> None:
        fault, at = self.schedule.fault, self.schedule.at
        if fault == "full" and at <= count < at + 12 and call in ("create", "write", "mkdir"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        if fault == "sync" and at <= count and call == "fsync" and not self._sync_failed:
            self._sync_failed = True
            raise OSError(errno.EIO, "Input/output error", path)
        if count != at:
            return
        if fault == "kill":
            self.world.kill(process)
            raise Killed
        if fault == "power":
            for job in self.jobs:
                self._end(job)
            self.disk.crash_at_random(self.world.random)
            raise Killed
        if fault == "error":
            raise OSError(errno.EIO, "Input/output error", path)
        if fault == "stall":
            seconds = self.world.random.uniform(0.3, 2.5) * TIMEOUT
            self.promises.stalled += seconds
            process.stalled_until = self.world.now + seconds
            self.world.pause(0.0)
        if fault == "damage":
            self._damage()
        if fault == "clock":
            process.skew = self.world.random.choice((-1e6, -3600.0, 3600.0, 1e6))

    def _damage(self) -> None:
        """Of one of the files by which ranks and jobs tell each other something, nothing is left, a half, or zeros."""
        files = sorted(path for path in self.disk.files(HIDDEN) if path.split("/")[1] not in _CHECKPOINTS)
        if files:
            file = self.disk.file(self.world.random.choice(files))
            half = len(file.data) // 2
            file.data = self.world.random.choice((bytearray(), file.data[:half], bytearray(len(file.data))))
            file.sync()


def run(schedule: Schedule) -> Run:
    """Raises AssertionError, which names the seed, where a promise is broken."""
    found = Run(schedule)
    try:
        found.go()
    except Exception as error:
        raise AssertionError(f"seed {schedule.seed}: {type(error).__name__}: {error}\n{schedule}") from error
    return found
