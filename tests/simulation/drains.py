"""Drains during which power is lost at every system call: tags of a job's first tier are copied to a lower one.

The lower tier is the disk that loses what was not synced. The first is another one, and keeps all it has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import pytest

from nxd_ckpt.commit.tier import Tier
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tiers.drain import Drains
from tests.simulation.crashes import Recording
from tests.simulation.job import TIMEOUT, Job, Save, among, run_to_end
from tests.simulation.stage import DiskStage
from tests.simulation.world import EPOCH, Disk, DiskStorage, World, inhabited

_NEWS = 1.0
"""Seconds after which who waits for a tier looks again."""


@dataclass(frozen=True)
class Draining:
    """The ``saves`` come to the first tier one after the other, and each is copied before the next. With
    ``killed_before`` a first try ends before the system call whose name and path begin so."""

    name: str
    saves: tuple[Save, ...]
    swaps: bool = True
    killed_before: str | None = None

    @property
    def before(self) -> tuple[Save, ...]:
        """What is there before anything happens, where something happens to the last one."""
        return self.saves[:-1]

    @property
    def first(self) -> tuple[Save, ...]:
        return self.saves[-1:]

    @property
    def second(self) -> Save:
        """Of a job that comes meanwhile, or afterwards."""
        return Save(self.saves[-1].tag, 3, overwrite=True)

    def prepare(self, recording: Recording) -> None:
        if self.killed_before is not None:
            recording.killed_before = self.killed_before
            self._drain(recording, self.saves, "one")
            assert recording.killed_before is None, f"there was no {self.killed_before}"

    def run(self, recording: Recording) -> None:
        self._drain(recording, self.saves, "one")

    def look_at(self, stage: DiskStage) -> None:
        """A process lists the tags, and then another job copies what it saved."""
        self.hold(stage)
        self.finish(stage)

    def hold(self, stage: DiskStage) -> None:
        """Raises AssertionError where a promise is broken."""
        stage.look()
        stage.hold()

    def finish(self, stage: DiskStage) -> None:
        """Another job copies what it saved. Raises AssertionError."""
        self._drain(stage, (Save("next", 9, num_kept=self.saves[0].num_kept),), "rebooted")
        stage.hold()
        stage.next_saves_work()

    def job(self, stage: DiskStage, machine: str, saves: Sequence[Save]) -> tuple[Job, Callable[[], None]]:
        """One launch, which finds the first of the saves as the newest of its first tier, and what its process does."""
        [save] = saves
        process = stage.world.start_process(machine)
        job = Job(stage.world, f"draining-{process.pid}", [process], has_group=False)
        stage.jobs.append(job)
        return job, partial(job.do, save, partial(_drain, save, stage.storage(process)))

    def _drain(self, stage: DiskStage, saves: tuple[Save, ...], machine: str) -> None:
        """Each launch of the job finds one of the saves as the newest of the first tier."""
        for save in saves:
            job, drain = self.job(stage, machine, [save])
            with pytest.MonkeyPatch.context() as patch:
                if stage.calls is None:
                    patch.setattr("nxd_ckpt.output.cp_files.sync", DiskStorage.sync_file)
                run_to_end(stage.world, [stage.world.spawn(job.processes[0], drain)])


def _drain(save: Save, lower: Storage) -> None:
    """Copy the save to the ``lower`` tier."""
    tiers = Tier("first"), Tier("lower", keep=save.num_kept)
    drains = Drains(tiers, (DiskStorage(_first_tier(save)), lower), TIMEOUT)
    try:
        drains.saved(save.tag, 0, save.overwrite)
        while not drains.finished(1, _NEWS):
            pass
    finally:
        drains.close(None)


@cache
def _first_tier(save: Save) -> Disk:
    """A disk with one tag."""
    world = World(f"first tier with {save}")
    world.now = 100.0 * save.value  # a later save is one of a later time
    stage = DiskStage(world, Disk(lambda: EPOCH + world.now))
    with inhabited(world), among(stage.jobs, world):
        run_to_end(world, stage.launch("first", ("one", "one"), [save]))
    return stage.disk


DRAINS = (
    Draining("drains", (Save("a", 1), Save("b", 2))),
    Draining("drains, of which the tier keeps one", (Save("a", 1, num_kept=1), Save("b", 2, num_kept=1))),
    Draining("a drain replaces a tag", (Save("a", 1), Save("a", 2, overwrite=True))),
    Draining("a drain replaces a tag, by two renames", (Save("a", 1), Save("a", 2, overwrite=True)), swaps=False),
    Draining("a drain that goes on", (Save("a", 1),), killed_before="fsync .nxd_ckpt/copies/a/model"),
)
