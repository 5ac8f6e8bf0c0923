"""Every state in which a loss of power may leave the disk, at every system call of some work: do the promises hold?

The work is done once, and nothing happens to it. Before each of its system calls that change something, the disk is
kept as it is then. Of each of these *moments*, all states are looked at that a loss of power may leave (see
``tests.simulation.world.crash_states``), each in a world of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple, Protocol

from nxd_ckpt.coordination.control_files import PROBES, RUNS, VOTES
from tests.simulation.job import Job, among
from tests.simulation.stage import DiskStage
from tests.simulation.world import EPOCH, Disk, Killed, Process, Remains, Seen, World, crash_states, inhabited

LATER = 1000.0
"""When the power comes back, in simulated seconds after the work began."""

NOTES = (VOTES, PROBES, RUNS)
"""Where the ranks of one launch leave each other notes. To the next one they are litter, which it removes."""


class Work(Protocol):
    """What is done on a disk, and what must hold when the power comes back."""

    @property
    def name(self) -> str: ...

    @property
    def swaps(self) -> bool: ...

    def prepare(self, recording: Recording) -> None:
        """What comes before."""

    def run(self, recording: Recording) -> None:
        """The work itself."""

    def look_at(self, stage: DiskStage) -> None:
        """Raises AssertionError where a promise is broken. The stage has the jobs that were told something."""


class Moment(NamedTuple):
    """The disk before a system call, and what all jobs had begun and were told by then."""

    call: str
    disk: Disk
    jobs: tuple[Job, ...]

    @property
    def told(self) -> str:
        return repr([(job.begun, [(told.rank, told.save, told.word) for told in job.outcomes]) for job in self.jobs])


class Recording(DiskStage):
    """Each ``every``-th moment of some work."""

    def __init__(self, work: Work, seed: int, every: int = 1, *, local: bool = False) -> None:
        world = World(f"{work.name} {seed}", lasts=400.0)
        super().__init__(world, Disk(lambda: EPOCH + world.now), swaps=work.swaps, local=local)
        self.moments: list[Moment] = []
        self.killed_before: str | None = None
        """The first system call whose name and path begin so never comes: all jobs end instead."""
        self._work, self._every = work, every
        self._calls: int | None = None

    def go(self) -> None:
        with self.installed(), inhabited(self.world), among(self.jobs, self.world):
            self._work.prepare(self)
            self._calls = 0
            self._work.run(self)
            self._keep("the end")

    def before(self, process: Process, call: str, path: str) -> None:
        if self.killed_before is not None and f"{call} {path}".startswith(self.killed_before):
            self.killed_before = None
            for other in (process for job in self.jobs for process in job.processes):
                self.world.kill(other)
            raise Killed
        if self._calls is not None and (call != "look" or self.calls is None):
            if self._calls % self._every == 0:
                self._keep(f"{call} {path}")
            self._calls += 1

    def _keep(self, call: str) -> None:
        jobs = (replace(job, begun=list(job.begun), outcomes=list(job.outcomes)) for job in self.jobs)
        self.moments.append(Moment(call, deepcopy(self.disk), tuple(jobs)))


@dataclass
class Count:
    """What came of some work: how many ``moments`` there were, how many ``states`` a loss of power may leave at them,
    and how many of those were looked at; the others equal one of these."""

    name: str
    moments: int = 0
    states: int = 0
    looked_at: int = 0
    failures: list[str] = field(default_factory=list)


def enumerated(
    work: Work, interleavings: int = 1, every: int = 1, most: int | None = None, *, local: bool = False
) -> Count:
    """Look at all states (at ``most`` so many) of each ``every``-th moment of the work, which is done in so many
    interleavings. ``local``: by the system calls of our own ``LocalStorage``."""
    count, seen = Count(work.name), defaultdict[str, Seen](Seen)
    for seed in range(interleavings):
        recording = Recording(work, seed, every, local=local)
        recording.go()
        for number, moment in enumerate(recording.moments):
            count.moments += 1
            for remains in islice(crash_states(moment.disk, seen[moment.told], NOTES), most):
                count.states += 1
                if remains is None:
                    continue
                count.looked_at += 1
                try:
                    _look_at(work, remains, moment.jobs, local=local)
                except Exception as error:
                    where = f"interleaving {seed}, moment {number * every} (before {moment.call})"
                    count.failures.append(f"{work.name}, {where}: {type(error).__name__}: {error}")
    return count


def _look_at(work: Work, remains: Remains, jobs: Sequence[Job], *, local: bool) -> None:
    world = World("the power is back", lasts=LATER + 400.0)
    world.now = LATER
    stage = DiskStage(world, remains.disk(lambda: EPOCH + world.now), swaps=work.swaps, local=local)
    stage.jobs.extend(replace(job, world=world) for job in jobs)
    with stage.installed(), inhabited(world), among(stage.jobs, world):
        work.look_at(stage)
