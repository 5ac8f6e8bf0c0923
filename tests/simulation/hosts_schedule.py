"""Schedules on the disks of two hosts, each with a rank, through the product's own servers' protocol."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, NoReturn

from nxd_ckpt import Tier
from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.core.names import DONE, HIDDEN, MARKER
from nxd_ckpt.storage.base import DirEntry, Storage
from tests.simulation import oracle
from tests.simulation.job import Job, checkpointer, loaded_by, run_to_end
from tests.simulation.schedule import Calls, Run, Schedule, drawn
from tests.simulation.stage import turns
from tests.simulation.world import EPOCH, Disk, DiskStorage, Killed, Process, SystemCalls
from tests.simulation.world.network import Network

EFFECTS = {1: Calls((80, 24), (98, 48)), 2: Calls((78, 24), (113, 64))}
"""The system calls that change something, by the number of replicas. Those that a rank's server makes for the other
host are among them."""

_POWER = ("power", "power", "all power", "lost")
FAULTS = ("nothing", "kill", "kill", "kill all", *_POWER, "error", "full", "stale", "sync", "stall")

NAMES = ("one", "two")
"""Of the hosts."""

_REPLACED = "in its place"

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class HostsSchedule(Schedule):
    """Its faults are also "kill all", "power" and "all power" (of a rank's host, or of both), "lost" (that host, with
    its disk; only with replicas), "stale" (all handles are, for a while, as of a file system that is away), and
    "error", "full" and "sync", as on a disk. ``swapped``: whether the next launch has its rank 0 on the other host."""

    replicas: int = 1
    swapped: bool = False
    crossed: bool = False
    """Whether the rival has its rank 0 on the other host."""
    away: str | None = None
    """The host that is away in the next launch, another one in its place, and back, with what it had, in one more."""

    @staticmethod
    def of(seed: int) -> HostsSchedule:
        random = Random(f"hosts {seed}")
        replicas = random.choice((1, 2))
        faults = FAULTS if replicas == 2 else tuple(fault for fault in FAULTS if fault != "lost")
        fields = drawn(random, faults, EFFECTS[replicas])
        machines = (*NAMES, *NAMES)
        overwrite = True if "rival" in fields else random.choice((True, True, True, None))
        for name in fields.keys() & {"saves", "rival"}:
            fields[name] = tuple(replace(save, overwrite=overwrite) for save in fields[name])
        return HostsSchedule(
            seed, **fields | {"has_group": True, "reads": False, "machines": machines}, replicas=replicas,
            swapped=random.random() < 0.3, crossed=random.random() < 0.5,
            away=random.choice((None, None, None, *NAMES)) if replicas == 2 and fields["fault"] != "lost" else None,
        )

    def start(self) -> HostsRun:
        return HostsRun(self)


class HostsRun(Run):
    """A schedule under way."""

    schedule: HostsSchedule

    def __init__(self, schedule: HostsSchedule) -> None:
        super().__init__(schedule)
        self.promises.in_place = True
        self.promises.may_end_late = schedule.fault == "stall" and schedule.rank == 1
        self.calls: SystemCalls = SystemCalls()
        self.disks = {name: Disk(lambda: EPOCH + self.world.now) for name in (*NAMES, _REPLACED)}
        self.hosts: tuple[str, ...] = NAMES
        """Those of the next launch."""
        self.network = Network(self.world)
        self._effects = 0

    def go(self) -> None:
        with self.network.installed():
            super().go()

    @property
    def rival_machines(self) -> tuple[str, ...]:
        return NAMES[::-1] if self.schedule.crossed else NAMES

    def look(self) -> None:
        """Nobody sees the disks of hosts but their jobs."""

    def finish(
        self, run_id: str, machines: tuple[str, ...], *, tag: str = "a", value: int = 9, dedup: bool = False
    ) -> None:
        if run_id == "second":
            self.hosts = tuple(_REPLACED if name == self.schedule.away else name for name in NAMES)
        hosts = self.hosts[::-1] if self.schedule.swapped else self.hosts
        super().finish(run_id, hosts, tag=tag, value=value, dedup=dedup)

    def afterwards(self) -> None:
        """The host that was away is back: an older save that it has takes the place of none."""
        if self.schedule.away is not None:
            self.hosts = NAMES
            self.resume()
            self.hold()
            self.finish("third", NAMES, tag="b", value=10)
            self.hold()
            self.next_saves_work()
            self.resume()

    def resume(self) -> None:
        """Let a job load the latest tag. Raises AssertionError unless that is the newest that is there."""
        storage = self.outside()
        tags = oracle.visible(storage)
        if not tags:
            return
        newest = max(tags, key=lambda tag: oracle.order_times(storage, [tag])[tag][0])
        processes = [self.world.start_process(name) for name in self.hosts]
        job = Job(self.world, f"reads {len(self.jobs)}", processes, has_group=True)
        self.jobs.append(job)
        values: list[int] = []

        def load(rank: int) -> None:
            with checkpointer(self.place(processes[rank], rank), rank, len(processes), job.run_id) as reader:
                values.append(loaded_by(reader, rank, len(processes)))

        tasks = [self.world.spawn(process, partial(load, rank)) for rank, process in enumerate(processes)]
        run_to_end(self.world, tasks)
        self.jobs.remove(job)
        assert values == [tags[newest]] * 2, f"a resume took the saves {values}, the newest is {newest!r} of {tags}"

    def place(self, process: Process, rank: int) -> Tier:
        turn = turns(self, process, self._before)
        root = self.calls.mount(self.disks[process.machine], turn, lives=partial(getattr, process, "alive"))
        return Tier(root, per_host=True, replicas=self.schedule.replicas)

    def storage(self, process: Process) -> Storage:
        return self.outside()

    def outside(self) -> Storage:
        union: Any = Union([DiskStorage(self.disks[name]) for name in self.hosts])
        storage: Storage = union
        return storage

    def _before(self, process: Process, call: str, path: str) -> None:
        fault, at = self.schedule.fault, self.schedule.at
        if not self.is_victim(process) or (call == "look" and not self.schedule.looks and fault != "stale"):
            return
        self._effects += call != "look" or self.schedule.looks
        count = self._effects
        if fault == "stale" and at <= count < at + 12:
            self.fail(errno.ESTALE, path)
        if fault == "full" and at <= count < at + 12 and call in ("create", "write", "mkdir"):
            self.fail(errno.ENOSPC, path)
        if fault == "sync" and at <= count and call == "fsync":
            self.is_out = True
            self.fail(errno.EIO, path)
        if count != at:
            return
        if fault in _POWER:
            self._lose_power([process.machine] if fault != "all power" else NAMES)
        if fault == "kill all":
            self.end(self.jobs[0])
            raise Killed
        if fault == "error":
            self.fail(errno.EIO, path)
        self.disturb(process, fault)

    def _lose_power(self, machines: Sequence[str]) -> NoReturn:
        for process in (process for job in self.jobs for process in job.processes if process.machine in machines):
            self.network.silent.add(process)
            self.world.kill(process)
        for name in machines:
            if self.schedule.fault == "lost":
                self.disks[name] = Disk(lambda: EPOCH + self.world.now)
            else:
                self.disks[name].crash_at_random(self.world.random)
        raise Killed


class Union:
    """What is on the disks of the hosts: of each directory, what those have whose save of it is the newest."""

    def __init__(self, disks: Sequence[DiskStorage]) -> None:
        self._disks = disks

    def list(self, key: str = "") -> list[DirEntry]:
        return sorted({entry for disk in self._of(key) for entry in disk.list(key)})

    def is_file(self, key: str) -> bool:
        return any(disk.is_file(key) for disk in self._of(key))

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return self._first(key, lambda disk: disk.read(key, limit))

    def time(self, key: str) -> float:
        return self._first(key, lambda disk: disk.time(key))

    def _first(self, key: str, get: Callable[[DiskStorage], Any]) -> Any:
        for disk in self._of(key):
            with suppress(FileNotFoundError):
                return get(disk)
        raise FileNotFoundError(errno.ENOENT, "on no host", key)

    def _of(self, key: str) -> Sequence[DiskStorage]:
        """The disks with the newest save of the directory that the key is in."""
        top = key.partition("/")[0]
        if top in ("", HIDDEN):
            return self._disks
        whole = [disk for disk in self._disks if all(disk.is_file(f"{top}/{name}") for name in (DONE, _MANIFEST))]
        if not whole:
            return self._disks
        newest = max(whole, key=lambda disk: float(json.loads(disk.read(f"{top}/{_MANIFEST}"))["order_time"]))
        marker = newest.read(f"{top}/{MARKER}")
        return [
            disk for disk in self._disks if disk.is_file(f"{top}/{MARKER}") and disk.read(f"{top}/{MARKER}") == marker
        ]
