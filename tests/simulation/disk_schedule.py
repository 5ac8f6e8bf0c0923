"""Schedules on a simulated disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import NoReturn

import pytest

from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.local import LocalStorage
from tests.simulation.job import WORLD_SIZE, Reader, Save, loaded, run_to_end
from tests.simulation.schedule import Calls, Run, Schedule, differing, drawn
from tests.simulation.stage import disk_storage
from tests.simulation.world import EPOCH, Disk, DiskStorage, Killed, Process, SystemCalls, Unanswered
from tests.simulation.world.disk import Folder

EFFECTS = Calls((24, 4), (66, 16))
"""The system calls that change something."""

FAULTS = ("nothing", "kill", "kill", "power", "power", "error", "full", "sync", "stall", "clock", "damage")

RENAMES = Calls((3, 1), (5, 1))
"""Those of them that are renames."""

LONE_EFFECTS, LONE_RENAMES = Calls((42, 0), (35, 0)), Calls((4, 0), (2, 0))
"""The same of lone processes, which write no votes."""

AT_A_SWAP = range(10, 15)
"""Among these renames of rank 0 are those by which its second save replaces a tag, or removes one."""

SYNCS = 2
"""At most so many syncs in a save are of the directory of the tags."""

UNDOES = 12
"""So many effects undo a save: its outcome is noted, two renames, and syncs."""

UNDOING_RENAMES = range(6, 8)
"""Which of them are the renames."""

FULL = 16
"""For so many effects a disk is full."""

_REPLAYED = {"rename": errno.ENOENT, "unlink": errno.ENOENT, "link": errno.EEXIST, "mkdir": errno.EEXIST}
"""The answer to a call that had happened before."""

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
    at_sync: bool = False
    """Whether ``at`` counts only syncs of the directory of the tags, after which their names last."""
    then: int | None = None
    """Another fault happens, too, so many effects of the rank after the fault."""
    then_fault: str = "power"
    """That is "power", "error" or "stall"."""
    then_of: str = "rank"
    """Whose effects those are: of the "rank", of the "other" one, or of the "rival"."""
    syncs: int = 1
    """So many syncs fail where the fault is "sync"."""
    local: bool = False
    """Whether processes see the disk by our own ``LocalStorage``, whose system calls are simulated."""
    links: bool = True
    """Whether such a disk has hard links."""
    direct: bool = False
    """Whether such a disk takes writes of any size past the page cache."""
    replayed: bool = False
    """Whether a call that is "unanswered" is made again, by a client that gets an answer then."""

    @property
    def is_harmless(self) -> bool:
        return super().is_harmless and self.then is None

    @staticmethod
    def of(seed: int) -> DiskSchedule:
        random = Random(f"schedule {seed}")
        fields = drawn(random, FAULTS, EFFECTS)
        fields |= {"swaps": random.random() < 0.6, "rots": random.random() < 0.1}
        if fields["fault"] not in ("full", "sync") and random.random() < 0.25:
            fields |= {"at_rename": True, "at": random.randrange(RENAMES.of(fields["rank"], len(fields["saves"])))}
        rules = Random(f"overwrite {seed}")
        if [save.tag for save in fields["saves"]] == ["a", "a"] and "rival" not in fields and rules.random() < 0.25:
            one, two = fields["saves"]
            fields["saves"] = one, replace(two, overwrite=False)
        return DiskSchedule(seed, **fields)

    @staticmethod
    def of_system_calls(seed: int) -> DiskSchedule:
        """The same, below ``LocalStorage``."""
        links, direct = Random(f"links {seed}").random() < 0.7, Random(f"direct {seed}").random() < 0.5
        return replace(DiskSchedule.of(seed), local=True, links=links, direct=direct)

    @staticmethod
    def of_a_lone_process(seed: int) -> DiskSchedule:
        """The same by processes that are the only one of their job; of odd seeds power is lost soon after a fault."""
        one, random = DiskSchedule.of(seed), Random(f"alone {seed}")
        at = random.randrange((LONE_RENAMES if one.at_rename else LONE_EFFECTS).of(0, len(one.saves)))
        then = 1 + int(random.expovariate(1 / 6)) + FULL // 2 * (one.fault == "full")
        if seed % 2 == 0 or one.fault not in ("error", "sync", "full", "stall"):
            return replace(one, is_alone=True, rank=0, at=at, has_group=False)
        return replace(one, is_alone=True, rank=0, at=at, has_group=False, then=then)

    @staticmethod
    def with_a_lost_reply(seed: int) -> DiskSchedule:
        """A call happens, and fails all the same, as on a network file system whose server did not answer."""
        one, random = DiskSchedule.of(seed), Random(f"lost reply {seed}")
        at_rename = random.random() < 0.6
        at = random.randrange((RENAMES if at_rename else EFFECTS).of(one.rank, len(one.saves)))
        local, replayed = random.random() < 0.5, random.random() < 0.5
        return replace(one, fault="unanswered", at=at, at_rename=at_rename, local=local, replayed=replayed)

    @staticmethod
    def with_two_faults(seed: int) -> DiskSchedule:
        """The fault is one after which the rank goes on, where tags are renamed; soon after it power is lost."""
        one, random = DiskSchedule.of(seed), Random(f"two faults {seed}")
        fault = random.choice(("error", "error", "sync", "full", "stall"))
        at = random.randrange(RENAMES.of(one.rank, len(one.saves))) if fault in ("error", "stall") else one.at
        then = int(random.expovariate(1 / 6)) + (fault != "full" or 12)
        return replace(one, fault=fault, at=at, at_rename=fault in ("error", "stall"), then=then)

    @staticmethod
    def with_power_lost_after_an_undone_save(seed: int) -> DiskSchedule:
        """A rename or some syncs of rank 0 fail in the second save, or the disk is full where that gets its name; power
        is lost soon after."""
        random, saves = Random(f"undone {seed}"), (Save("a", 1), Save("ab"[seed % 3 == 0], 2))
        one = DiskSchedule(
            seed, saves, "sync", 0, 2, machines=("one", "two", "three"), swaps=random.random() < 0.3,
            syncs=random.choice((1, 2, 4, 10)), then=1 + random.randrange(40),
        )
        kind = random.choice(("rename", "rename", "any sync", "its sync", "full"))
        if kind == "rename":
            return replace(one, fault="error", at=random.randrange(RENAMES.of(0, 1), RENAMES.of(0, 2)), at_rename=True)
        if kind == "any sync":
            return replace(one, at=random.randrange(EFFECTS.of(0, 1), EFFECTS.of(0, 2)))
        if kind == "full":
            return replace(one, fault="full", at_sync=True, then=FULL + random.randrange(12))
        return replace(one, at_sync=True)

    @staticmethod
    def with_power_lost_after_a_takeover(seed: int) -> DiskSchedule:
        """Rank 0 stands still, another job takes over, and power is lost: while that one saves, or when the rank has
        woken."""
        one, random = DiskSchedule.of(seed), Random(f"takeover {seed}")
        tags = random.choice((("x", "a"), ("a", "b"), ("a", "a")))
        rival = tuple(Save(tag, value, random.random() < 0.6) for value, tag in enumerate(tags, start=5))
        at_rename, of_rival = random.random() < 0.5, random.random() < 0.6
        at = random.randrange((RENAMES if at_rename else EFFECTS).of(0, len(one.saves)))
        then = 1 + (random.randrange(EFFECTS.of(0, 2)) if of_rival else int(random.expovariate(1 / 6)))
        return replace(
            one, fault="stall", rank=0, at=at, at_rename=at_rename, then=then,
            then_of="rival" if of_rival else "rank", rival=rival, late=None,
            machines=(*one.machines[:3], "four"), trains=0.0, rots=False, looks=False,
        )

    @staticmethod
    def with_power_lost_after_a_kill(seed: int) -> DiskSchedule:
        """Rank 0 is killed where a tag gets its name, and power is lost soon after, while the other rank goes on."""
        random = Random(f"killed {seed}")
        saves = (Save("a", 1), Save(random.choice("ab"), 2), Save("c", 3))
        has_group, swaps = random.random() < 0.5, random.random() < 0.5
        machines = random.choice((("one", "one", "one"), ("one", "two", "three")))
        return DiskSchedule(
            seed, saves, "kill", 0, random.randint(2, SYNCS * 2), at_sync=True, then=1 + random.randrange(20),
            then_of="other", has_group=has_group, machines=machines, swaps=swaps,
        )

    @staticmethod
    def with_a_launch_after_a_swap(seed: int) -> DiskSchedule:
        """Rank 0 is killed, or power is lost, at a rename, where a tag is replaced by two; nobody looks before the next
        launch begins."""
        random = Random(f"launch {seed}")
        fault, at = random.choice(("kill", "power")), random.choice(AT_A_SWAP)
        machines = ("one", "two", random.choice(("one", "three")))
        return DiskSchedule(
            seed, (Save("a", 1), Save("a", 2)), fault, 0, at, machines=machines, swaps=False, at_rename=True,
            is_looked_at=False,
        )

    @staticmethod
    def with_reader_at_a_swap(seed: int) -> DiskSchedule:
        """Rank 0 stands still at a rename, where a tag is replaced by two, or where that is undone, and another process
        reads."""
        random = Random(f"reader {seed}")
        saves, machines = (Save("a", 1), Save("a", 2)), ("one", "two", "three")
        at = random.choice(AT_A_SWAP)
        one = DiskSchedule(seed, saves, "stall", 0, at, machines=machines, reads=True, swaps=False)
        if random.random() < 0.4:
            return replace(one, at_rename=True)
        return _at_a_sync(one, random, random.choice(UNDOING_RENAMES), "stall")

    @staticmethod
    def with_an_undoing_that_fails(seed: int) -> DiskSchedule:
        """A sync fails that is to make a tag last, which may have replaced another one; and so does a call that undoes
        it, or rank 0 stands still there."""
        random = Random(f"undoing {seed}")
        tags = random.choice(("aa", "aba", "abab", "abab"))
        saves = tuple(Save(tag, value) for value, tag in enumerate(tags, start=1))
        machines = ("one", "two", "three")
        one = DiskSchedule(seed, saves, "sync", 0, 0, machines=machines, swaps=random.random() < 0.5)
        then, then_fault = 1 + random.randrange(UNDOES), random.choice(("error", "error", "stall"))
        if then_fault == "stall" and random.random() < 0.5:
            then = 1  # before the outcome is noted: another rank may be faster
        return _at_a_sync(one, random, then, then_fault)

    @staticmethod
    def with_a_takeover_at_a_removal(seed: int) -> DiskSchedule:
        """Rank 0 stands still where it removes a surplus tag, and another job takes over, and saves that anew."""
        random = Random(f"removal {seed}")
        rival = tuple(Save(tag, value) for value, tag in enumerate(random.choice(("xa", "ax", "ab", "a")), start=5))
        return DiskSchedule(
            seed, (Save("a", 1), Save("b", 2, num_kept=1)), "stall", 0, random.choice(AT_A_SWAP), at_rename=True,
            rival=rival, late=None, machines=("one", "two", "three", "four"),
        )

    @staticmethod
    def with_ranks_that_differ(seed: int) -> DiskSchedule:
        """A rank does something else than the other, and mostly nothing happens besides."""
        random = Random(f"differing {seed}")
        fault, rank = random.choice(("nothing", "nothing", "error", "stall")), random.randrange(WORLD_SIZE)
        machines = ("one", "two", "three")
        has_group, at = random.random() < 0.5, random.randrange(EFFECTS.of(rank, 2))
        return DiskSchedule(seed, differing(random), fault, rank, at, machines=machines, has_group=has_group)

    def start(self) -> DiskRun:
        return DiskRun(self)


def _at_a_sync(one: DiskSchedule, random: Random, then: int, then_fault: str) -> DiskSchedule:
    """The same where the sync fails that is to make a tag last which replaced another one, and another fault happens
    while that is undone."""
    tags = [save.tag for save in one.saves]
    which = random.choice([number for number, tag in enumerate(tags) if tag in tags[:number]])
    # A save syncs the directory of the tags once, and once more before what it replaced is deleted.
    at = 1 + sum(1 + (tag in tags[:number]) for number, tag in enumerate(tags[:which]))
    return replace(one, fault="sync", at=at, at_sync=True, then=then, then_fault=then_fault)


class DiskRun(Run):
    """A schedule under way."""

    schedule: DiskSchedule

    def __init__(self, schedule: DiskSchedule) -> None:
        super().__init__(schedule)
        self.disk = Disk(lambda: EPOCH + self.world.now)
        self._effects = 0
        self._effects_since: int | None = None
        """Those since the fault, of all kinds; None before it."""
        self._failed_syncs = 0
        self.calls = SystemCalls() if schedule.local else None
        self._top = "runs/first" if schedule.local else ""
        """The directory of the tags, below the root of the disk."""
        self.promises.retention_is_exact = schedule.then is None

    def storage(self, process: Process) -> LocalStorage | DiskStorage:
        swaps, links = self.schedule.swaps, self.schedule.links
        return disk_storage(self, self.disk, process, self._before, swaps=swaps, links=links, top=self._top)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, super().installed():
            if self.schedule.direct:
                patch.setattr("nxd_ckpt.storage.local_files._ALIGNMENT", 1)
                patch.setattr("nxd_ckpt.storage.local_files._DIRECT_FROM", 1)
            yield

    def outside(self) -> DiskStorage:
        return DiskStorage(self._below)

    @property
    def _below(self) -> Disk:
        """The disk from the directory of the tags on, to look at."""
        below, top = Disk(self.disk.clock), self.disk.find(self._top)
        below.root = top if isinstance(top, Folder) else below.root
        return below if self._top else self.disk

    def afterwards(self) -> None:
        """Whoever loads a tag of which a byte has changed gets what was saved, or is told."""
        if self.schedule.fault != "power" and self.schedule.then is None:
            self.promises.done_tells_the_order(self.outside())
        if self.schedule.rots:
            random, save, reader = self.world.random, self.jobs[-1].begun[0][1], self.reader()
            disk = self._below
            path = random.choice([path for path in disk.files(save.tag) if disk.file(path).data])
            data = disk.file(path).data
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            run_to_end(self.world, [self.world.spawn(reader.process, partial(_read, reader, save))])

    def _before(self, process: Process, call: str, path: str) -> None:
        if self._effects_since is not None and call != "look" and self._counts_since(process):
            self._effects_since += 1
            if self._effects_since == self.schedule.then and not self.is_out:
                self._happen(self.schedule.then_fault, process, call, path)
        if not self.is_victim(process) or (call == "look" and not self.schedule.looks):
            return
        fault, at = self.schedule.fault, self.schedule.at
        counts = not (self.schedule.at_rename and call != "rename")
        counts &= not (self.schedule.at_sync and (call, path) != ("fsync", ""))
        count = self._effects = self._effects + counts
        if counts and count == at:
            self._effects_since = 0
        if fault == "full" and self._effects_since is not None and self._effects_since < FULL and self._writes(call):
            self.fail(errno.ENOSPC, path)
        if not counts:
            return
        if fault == "sync" and at <= count and call == "fsync" and self._failed_syncs < self.schedule.syncs:
            self._failed_syncs += 1
            self.fail(errno.EIO, path)
        if count == at:
            self._happen(fault, process, call, path)

    def _happen(self, fault: str, process: Process, call: str, path: str) -> None:
        if fault == "power":
            self._lose_power()
        if fault == "error":
            self.fail(errno.EIO, path)
        if fault == "unanswered":
            self.promises.failed_calls += 1
            number = _REPLAYED.get(call, errno.ETIMEDOUT) if self.schedule.replayed else errno.ETIMEDOUT
            raise Unanswered(number, os.strerror(number), path)
        if fault == "damage":
            self._damage()
        self.disturb(process, fault)

    def _writes(self, call: str) -> bool:
        """Whether it is a call that fails on a full disk: syncs, too, where it began with one."""
        return call in ("create", "write", "mkdir") or (self.schedule.at_sync and call == "fsync")

    def _counts_since(self, process: Process) -> bool:
        """Whether the effects of this process are counted after the fault."""
        ranks = self.jobs[0].processes
        whose = {
            "rank": ranks[self.schedule.rank :][:1],
            "other": ranks[1 - self.schedule.rank :][:1],
            "rival": [process for job in self.jobs[1:2] for process in job.processes],
        }
        return process in whose[self.schedule.then_of]

    def _lose_power(self) -> NoReturn:
        for job in self.jobs:
            self.end(job)
        self.disk.crash_at_random(self.world.random)
        raise Killed

    def _damage(self) -> None:
        """Of one of the files by which ranks and jobs tell each other something, nothing is left, a half, or zeros."""
        disk = self._below
        files = sorted(path for path in disk.files(HIDDEN) if path.split("/")[1] not in _CHECKPOINTS)
        if files:
            file = disk.file(self.world.random.choice(files))
            half = len(file.data) // 2
            file.data = self.world.random.choice((bytearray(), file.data[:half], bytearray(len(file.data))))
            file.sync()


def _read(reader: Reader, save: Save) -> None:
    for rank in range(reader.ranks):
        with suppress(CheckpointError):
            assert save.value == loaded(reader.storage, rank, reader.ranks, save.tag)
