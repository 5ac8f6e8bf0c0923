"""Schedules of the lease alone: several jobs come to a directory whose holder is dead, and one may stand still."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

from nxd_ckpt.coordination import lease
from nxd_ckpt.errors import DirectoryInUse
from tests.simulation.disk_schedule import DiskRun, DiskSchedule
from tests.simulation.job import run_to_end
from tests.simulation.world import Process, inhabited

PATIENCE, BEATS_EVERY = 1.2, 0.3
"""Seconds without a heartbeat after which a holder counts as dead, and between two heartbeats."""


@dataclass(frozen=True)
class LeaseSchedule(DiskSchedule):
    """``comes`` are the seconds after which each job comes, ``stalls`` those for which the first holder stands still.
    """

    comes: tuple[float, ...] = (0.0, 0.0)
    stalls: float = 0.0

    @staticmethod
    def of(seed: int) -> LeaseSchedule:
        random = Random(f"lease {seed}")
        comes = tuple(random.choice((0.0, 0.0, 2.0)) * random.random() for _ in range(random.choice((2, 3))))
        stalls = random.choice((0.0, 3.0)) * PATIENCE * random.random()
        return LeaseSchedule(seed, (), "nothing", 0, 0, comes=comes, stalls=stalls)

    @staticmethod
    def of_system_calls(seed: int) -> LeaseSchedule:
        """The same, below ``LocalStorage``."""
        return replace(LeaseSchedule.of(seed), local=True, links=seed % 2 == 0)

    def start(self) -> LeaseRun:
        return LeaseRun(self)


class LeaseRun(DiskRun):
    """A schedule under way."""

    schedule: LeaseSchedule

    def __init__(self, schedule: LeaseSchedule) -> None:
        super().__init__(schedule)
        self._holder: lease.Lease | None = None
        """Who holds the lease, and was not stalled since."""
        self._refused = self._stalled = False

    def _before(self, process: Process, call: str, path: str) -> None:
        """Nothing goes wrong with a system call."""

    def go(self) -> None:
        """Raises AssertionError where two hold the lease, one loses it, or nobody gets that of a dead job."""
        with self.installed(), inhabited(self.world):
            dead = self.world.start_process("dead")
            run_to_end(self.world, [self.world.spawn(dead, partial(self._dies, dead))])
            jobs = [self.world.start_process(f"machine {number}") for number in range(len(self.schedule.comes))]
            run_to_end(
                self.world,
                [
                    self.world.spawn(job, partial(self._job, job, f"job-{number}", comes))
                    for number, (job, comes) in enumerate(zip(jobs, self.schedule.comes, strict=True))
                ],
            )
            assert lease.read(self.outside()) is None, "all jobs are over, and the lease is held"

    def _dies(self, process: Process) -> None:
        lease.acquire(self.storage(process), "dead", PATIENCE)

    def _job(self, process: Process, run_id: str, comes: float) -> None:
        world, storage = self.world, self.storage(process)
        world.pause(comes)
        while True:
            try:
                mine = lease.acquire(storage, run_id, PATIENCE)
                break
            except DirectoryInUse:
                world.pause(0.5)
        assert self._holder is None, f"{run_id} got the lease of {self._holder}"
        self._holder = mine
        beats = lease.Heartbeat(storage, mine, BEATS_EVERY)
        try:
            if self.schedule.stalls and not self._stalled:
                self._stalled, self._holder = True, None
                process.stalled_until = world.now + self.schedule.stalls
                world.pause(0.0)
            else:
                for _ in range(10):
                    world.pause(0.2)
                    holder = lease.read(self.outside())
                    assert holder == mine, f"{run_id} lost its lease to {holder}"
                self._holder = None
        finally:
            beats.stop()
            lease.release(storage, mine)
