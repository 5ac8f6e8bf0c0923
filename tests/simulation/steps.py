"""Something happens before each system call of one process, one after the other: it is killed, the call fails, another
job comes, or it stands still until that has taken over."""

import errno
from collections.abc import Callable, Sequence
from typing import Protocol

from nxd_ckpt.errors import DirectoryInUse
from tests.simulation.job import Job, Save, among, run_to_end
from tests.simulation.stage import DiskStage
from tests.simulation.world import EPOCH, Disk, Killed, Process, World, inhabited
from tests.simulation.world.threads import Event

EVENTS = ("kill", "error", "second", "taken over")

_STANDS_STILL = 400.0
"""Seconds: longer than a job of another host is watched before it counts as dead."""


class Scene(Protocol):
    """What a job does, of one process: it makes the saves ``before``, and the ``first`` ones while something happens.
    Another job makes the ``second``."""

    @property
    def name(self) -> str: ...

    @property
    def swaps(self) -> bool: ...

    @property
    def before(self) -> tuple[Save, ...]: ...

    @property
    def first(self) -> tuple[Save, ...]: ...

    @property
    def second(self) -> Save: ...

    def job(self, stage: DiskStage, machine: str, saves: Sequence[Save]) -> tuple[Job, Callable[[], None]]: ...

    def hold(self, stage: DiskStage) -> None: ...

    def finish(self, stage: DiskStage) -> None: ...


class Step(DiskStage):
    """``event`` happens before the ``at``-th system call of the first job that changes something."""

    def __init__(self, scene: Scene, event: str, at: int) -> None:
        world = World(f"{scene.name} {event} {at}", lasts=5000.0)
        super().__init__(world, Disk(lambda: EPOCH + world.now), swaps=scene.swaps, local=True)
        self._scene, self._event, self._at = scene, event, at
        self._victim: Process | None = None
        self._count = 0
        self._comes = Event(world)
        self.happened = False

    def go(self) -> None:
        """Raises AssertionError where a promise is broken."""
        scene, world = self._scene, self.world
        with self.installed(), inhabited(world), among(self.jobs, world):
            for save in scene.before:
                job, work = scene.job(self, "one", [save])
                run_to_end(world, [world.spawn(job.processes[0], work)])
            first, work = scene.job(self, "one", scene.first)
            [self._victim] = first.processes
            tasks = [world.spawn(self._victim, work)]
            if self._event in ("second", "taken over"):
                machine = "one" if self._event == "second" and self._at % 2 else "four"
                rival, come = scene.job(self, machine, [scene.second])
                rival.is_rival = True
                tasks.append(world.spawn(rival.processes[0], lambda: self._rival(come)))
            run_to_end(world, tasks)
            if self._event == "taken over":  # it says so, whatever was visible by then
                for one in first.outcomes:
                    one.word = "unknown" if isinstance(one.error, DirectoryInUse) else one.word
            self.happened = self._count >= self._at
            scene.hold(self)
            self._must_have_saved(first)
            for process in first.processes:
                world.kill(process)
            scene.finish(self)

    def before(self, process: Process, call: str, path: str) -> None:
        if process is not self._victim or call == "look":
            return
        self._count += 1
        if self._count != self._at:
            return
        if self._event == "kill":
            self.world.kill(process)
            raise Killed
        if self._event == "error":
            raise OSError(errno.EIO, "Input/output error", path)
        self._comes.set()
        if self._event == "taken over":
            process.stalled_until = self.world.now + _STANDS_STILL
            self.promises.stalled += _STANDS_STILL
        self.world.pause(0.0)

    def _rival(self, come: Callable[[], None]) -> None:
        self._comes.wait(2000.0)
        come()

    def _must_have_saved(self, first: Job) -> None:
        """Of two jobs that come to one directory the other is refused; and who takes over can save."""
        [rival] = [job for job in self.jobs if job.is_rival] or [first]
        words = [one.word for job in (first, rival) for one in job.outcomes]
        if self._event == "second":
            refusals = [one.error for job in (first, rival) for one in job.outcomes if one.word == "failed"]
            assert "saved" in words, refusals
            assert all(isinstance(error, DirectoryInUse) for error in refusals), refusals
        if self._event == "taken over":
            assert [one.word for one in rival.outcomes] == ["saved"], [one.error for one in rival.outcomes]


def all_steps(scene: Scene, event: str, every: int = 1) -> int:
    """How many system calls there were, before each ``every``-th of which the event happened. Raises AssertionError,
    which names the call, where a promise is broken."""
    at = 1
    while True:
        step = Step(scene, event, at)
        try:
            step.go()
        except Exception as error:
            calls = [one for one in step.trace if one[2] != "look"][-1:]
            where = f"{scene.name}, {event} {at}"
            raise AssertionError(f"{where}: {type(error).__name__}: {error}; last: {calls}") from error
        if not step.happened:
            return at - 1
        at += every
