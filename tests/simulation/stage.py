"""A place, and the jobs that one after the other are launched on it, in a simulated world."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from nxd_ckpt import Tier
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.choosing import settled_tags
from tests.simulation.job import WORLD_SIZE, Job, Reader, Save, run_to_end, saving
from tests.simulation.promises import Promises
from tests.simulation.world import Disk, DiskStorage, Process, SystemCalls, Task, World
from tests.simulation.world.system_calls import Turn

SECONDS = {"look": 5e-5, "fsync": 8e-4}
"""How long a system call takes on average; others take :data:`SECOND`."""
SECOND = 1e-4

Before = Callable[[Process, str, str], None]
"""Called with a process, its call ("look" for one that changes nothing), and the path, before it happens; what it
raises is what the call raises."""


class Stage(ABC):
    """``has_group``: whether the ranks of a job are joined by a process group, or by their ``run_id`` alone."""

    def __init__(self, world: World, *, has_group: bool = False) -> None:
        self.world, self.has_group, self.connects = world, has_group, False
        self.ranks = WORLD_SIZE
        self.jobs: list[Job] = []
        self.readers: list[Reader] = []
        self.promises = Promises(world)
        self.trace: list[tuple[float, int, str, str]] = []
        """The time, process, name and path of every system call, or request."""
        self.calls: SystemCalls | None = None
        """Where processes see the disk by our own ``LocalStorage``: the system calls that it makes."""

    def installed(self) -> AbstractContextManager[None]:
        """Within, the system calls are those of the stage, if it has some."""
        return nullcontext() if self.calls is None else self.calls.installed()

    @abstractmethod
    def storage(self, process: Process) -> Storage:
        """The place as a process sees it."""

    def place(self, process: Process, rank: int) -> Storage | Tier:
        """Where a process saves as a rank."""
        return self.storage(process)

    @abstractmethod
    def outside(self) -> Storage:
        """The place as it is."""

    def launch(
        self,
        run_id: str,
        machines: tuple[str, ...],
        saves: list[Save],
        comes: Callable[[], None] = lambda: None,
        trains: float = 0.0,
    ) -> list[Task]:
        """Start a job's ranks, one on each machine, each of which first waits until it ``comes``, and ``trains`` for so
        many seconds before each save."""
        processes = [self.world.start_process(machine) for machine in machines]
        job = Job(self.world, run_id, processes, self.has_group, is_rival=run_id == "rival")
        if self.connects and self.has_group:
            job.connect()
        self.jobs.append(job)
        places = [self.place(process, rank) for rank, process in enumerate(processes)]
        ranks = [partial(saving, job, rank, place, saves, comes, trains) for rank, place in enumerate(places)]
        return [self.world.spawn(process, rank) for process, rank in zip(processes, ranks, strict=True)]

    def reader(self) -> Reader:
        """One that reads from elsewhere."""
        process = self.world.start_process("elsewhere")
        self.readers.append(Reader(self.world, self.storage(process), process, self.ranks))
        return self.readers[-1]

    def notice(self) -> None:
        """Something is about to change, which readers may want to see."""
        for reader in self.readers:
            reader.notice()

    def look(self) -> None:
        """Whoever lists a directory finishes a swap of a dead job."""
        looker = self.world.start_process("elsewhere")
        run_to_end(self.world, [self.world.spawn(looker, partial(settled_tags, self.storage(looker)))])

    def hold(self, reader: Reader | None = None) -> None:
        """Raises AssertionError where a promise is broken."""
        self.promises.hold(self.jobs, self.outside(), reader)

    def finish(
        self, run_id: str, machines: tuple[str, ...], *, tag: str = "a", value: int = 9, dedup: bool = False
    ) -> None:
        """Launch a job to which nothing happens, and let it save, by default over a tag that is there."""
        run_to_end(self.world, self.launch(run_id, machines, [Save(tag, value, overwrite=True, dedup=dedup)]))

    def next_saves_work(self) -> None:
        """Raises AssertionError unless those of the last job did."""
        self.promises.next_saves_work(self.jobs[-1], self.outside())


class DiskStage(Stage):
    """A disk. ``swaps``: whether the file system can exchange two names; ``local``: whether processes see it by our own
    ``LocalStorage``."""

    def __init__(
        self, world: World, disk: Disk, *, swaps: bool = True, has_group: bool = False, local: bool = False
    ) -> None:
        super().__init__(world, has_group=has_group)
        self.disk, self.swaps = disk, swaps
        self.calls = SystemCalls() if local else None

    def storage(self, process: Process) -> LocalStorage | DiskStorage:
        return disk_storage(self, self.disk, process, self.before, swaps=self.swaps)

    def outside(self) -> DiskStorage:
        return DiskStorage(self.disk)

    def before(self, process: Process, call: str, path: str) -> None:
        """See :data:`Before`."""


def disk_storage(
    stage: Stage, disk: Disk, process: Process, before: Before, *, swaps: bool, links: bool = True, top: str = ""
) -> LocalStorage | DiskStorage:
    """The disk as a process sees it. By system calls: a directory of it, which who comes first makes."""
    turn = turns(stage, process, before)
    if stage.calls is not None:
        lives = partial(getattr, process, "alive")
        root = stage.calls.mount(disk, turn, swaps=swaps, links=links, lives=lives)
        return LocalStorage(os.path.join(root, top))
    return DiskStorage(disk, turn, swaps=swaps)


def turns(stage: Stage, process: Process, before: Before) -> Turn:
    """Called before each system call of a process."""
    world, trace, pid = stage.world, stage.trace, process.pid

    def turn(call: str, path: str) -> None:
        world.pause(world.duration(SECONDS.get(call, SECOND)))
        trace.append((world.now, pid, call, path))
        if call != "look":
            stage.notice()
        before(process, call, path)

    return turn
