"""One schedule: what two launches of a job do, what goes wrong meanwhile, and whether the promises hold.

All of it follows from a seed.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple, NoReturn

from typing_extensions import Self

from nxd_ckpt.coordination import lease
from tests.simulation import oracle
from tests.simulation.job import TIMEOUT, WORLD_SIZE, Job, Reader, Save, among, loaded, run_to_end
from tests.simulation.stage import Stage
from tests.simulation.world import Killed, Process, World, inhabited
from tests.simulation.world.threads import Event


class Calls(NamedTuple):
    """About how many calls each rank has, of one kind: ``around`` its saves, and in ``each`` of them."""

    around: tuple[int, int]
    each: tuple[int, int]

    def of(self, rank: int, saves: int) -> int:
        """Those of a rank in a launch with so many saves."""
        return self.around[rank] + saves * self.each[rank]


HARMLESS = {"nothing", "stall", "clock"}
"""With these faults alone nothing fails that a process asks of the place."""

SHARED = "nxd_ckpt-upload-", "nxd_ckpt-peers", "nxd_ckpt-host"
"""So begin the names of threads that all Checkpointers of a process share, and that last as long as it does; and of
those that end once their connection is closed."""

_CALLS = 3
"""About as many times as many calls of rank 0 there are as change something."""

STALL_WITHIN = 30.0
"""Seconds for which a rival waits that the rank stands still."""


@dataclass(frozen=True)
class Schedule(ABC):
    """``saves`` of the first launch, and the fault that happens ``at`` which effect of which rank. ``rival`` are the
    saves of another job in the same directory, which comes ``late`` by so many seconds, or, if that is None, once the
    rank stands still: then it may take over.

    Any place has the faults "nothing", "kill", "stall" (the rank stands still) and "clock" (its wall clock jumps).
    """

    seed: int
    saves: tuple[Save, ...]
    fault: str
    rank: int
    at: int
    is_alone: bool = False
    """Whether the first launch, the next and the rival are one process each, not two ranks."""
    has_group: bool = False
    machines: tuple[str, ...] = ("one", "two", "three", "four")
    """Of the two ranks of the first launch, of those of the next, and of those of the rival."""
    reads: bool = False
    rival: tuple[Save, ...] = ()
    late: float | None = 0.0
    looks: bool = False
    """Whether ``at`` also counts what changes nothing."""
    trains: float = 0.0
    """Seconds between the saves of these two jobs, in which there is only a heartbeat."""
    is_looked_at: bool = True
    """Whether somebody lists the tags between the launches, which finishes what a dead job left. Else the next launch
    saves a tag of its own, so that what it found must still be there."""

    @property
    def dedups(self) -> bool:
        return any(save.dedup for save in self.saves)

    @property
    def is_harmless(self) -> bool:
        """Whether nothing fails that a process asks of the place."""
        return self.fault in HARMLESS

    def deduplicating(self) -> Self:
        """The same with saves that have something in common."""
        saves, rival = (tuple(replace(save, dedup=True) for save in some) for some in (self.saves, self.rival))
        return replace(self, saves=saves, rival=rival)

    @abstractmethod
    def start(self) -> Run:
        """Where it runs."""


def drawn(random: Random, faults: Sequence[str], effects: Calls) -> dict[str, Any]:
    """What a schedule saves, and what goes wrong: one of ``faults``, with one of the ``effects`` of a rank."""
    [kind] = random.choices(("one", "new", "overwrite", "retention", "mixed"), (8, 3, 4, 3, 2))
    one, two, three = ("a",), ("a", "b"), ("a", "b", "a")
    tags = {"one": one, "new": two, "overwrite": ("a", "a"), "retention": two, "mixed": three}[kind]
    kept = random.choice((1, 1, 2)) if kind in ("retention", "mixed") else None
    refused = random.choice((None,) * 9 + (0,))
    rank = random.randrange(WORLD_SIZE)
    fields: dict[str, Any] = {
        "saves": tuple(
            Save(tag, value, random.random() < 0.6, kept, fails_on=refused if value == 2 else None)
            for value, tag in enumerate(tags, start=1)
        ),
        "fault": random.choice(faults),
        "rank": rank,
        "at": random.randrange(effects.of(rank, len(tags))),
        "has_group": random.random() < 0.5,
        "machines": random.choice((("one", "one", "one"), ("one", "two", "three"))),
        "reads": random.random() < 0.2,
    }
    return fields | _drawn_rival(random, fields, effects) if random.random() < 0.12 else fields


def _drawn_rival(random: Random, fields: dict[str, Any], effects: Calls) -> dict[str, Any]:
    tags = random.choice((("x", "y"), ("x", "a"), ("a", "x"), ("a", "b"), ("b", "x")))
    found = {
        "rival": tuple(Save(tag, value, random.random() < 0.6) for value, tag in enumerate(tags, start=5)),
        "late": random.choice((0.0, 0.5, 20.0)) * random.random(),
        "fault": random.choice(("nothing", "stall", fields["fault"])),
        "machines": (*fields["machines"], random.choice(("one", "four"))),
    }
    if found["fault"] == "stall" and random.random() < 0.7:
        found |= {"rank": 0, "late": None, "machines": (*fields["machines"], "four")}
        found["trains"] = random.choice((0.0, 0.0, 3.0))
        if random.random() < 0.5:
            found |= {"looks": True, "at": random.randrange(_CALLS * effects.of(0, len(fields["saves"])))}
    return found


def differing(random: Random) -> tuple[Save, ...]:
    """Saves, in some of which a rank does something else than the other."""
    rank, instead = random.randrange(WORLD_SIZE), random.choice(("another tag", "another format", "nothing"))
    if instead == "nothing":
        return _left_out(random)
    tags = random.choice(("ab", "aa"))
    saves = [Save(tag, value, random.random() < 0.6) for value, tag in enumerate(tags, start=1)]
    which = random.randrange(2)
    saves[which] = replace(saves[which], differs_on=rank, instead=instead)
    return tuple(saves)


def _left_out(random: Random) -> tuple[Save, ...]:
    """One save that a rank leaves out, or two, which may be different ranks; and more that all make. Without steps in
    their names nothing but the names tells them apart: those are all different."""
    is_async, names = random.random() < 0.6, random.choice(("abcdef", [f"step_{step}" for step in range(6)]))
    saves = [Save(tag, value, is_async) for value, tag in enumerate(names, start=1)]
    for which in random.sample(range(1, 3), random.choice((1, 1, 2))):
        saves[which] = replace(saves[which], differs_on=random.randrange(WORLD_SIZE), instead="nothing")
    return tuple(saves)


class Run(Stage):
    """A schedule under way."""

    excused: Collection[str] = ()
    """Words in errors of saves that may fail where a rank of another job stood still, and wakes."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(World(schedule.seed, lasts=400.0), has_group=schedule.has_group)
        self.schedule = schedule
        self.ranks = 1 if schedule.is_alone else WORLD_SIZE
        self.is_out = False
        """Whether nothing goes wrong any more."""
        self.stalled = Event(self.world)
        """Whether the rank stands still, or did."""

    def go(self) -> None:
        """Raises AssertionError where a promise is broken."""
        with self.installed(), inhabited(self.world), among(self.jobs, self.world):
            schedule = self.schedule
            trains, machines = schedule.trains, schedule.machines
            first = self.launch("first", machines[: self.ranks], list(schedule.saves), trains=trains)
            if schedule.rival:
                first += self.launch("rival", self.rival_machines, list(schedule.rival), self._rival_comes, trains)
            reader = self.reader()
            reading = [self.world.spawn(reader.process, reader.run)] if schedule.reads else []
            run_to_end(self.world, first)
            if schedule.is_looked_at:
                self.look()
                self.hold(reader)
            refused = any(save.fails_on is not None for save in schedule.saves)
            if schedule.rival and schedule.fault == "nothing" and not refused:
                self.promises.jobs_keep_apart(self.jobs)
            elif schedule.rival and schedule.fault == "stall" and schedule.is_harmless:
                self.promises.a_job_is_not_disturbed(self.jobs[1], self.excused)
            differ = any(save.instead for save in schedule.saves)
            if not schedule.rival and not differ and schedule.fault in ("nothing", "clock"):
                self.promises.a_job_that_is_left_alone_saves(self.jobs[0])
                self.promises.retention_removes_what_its_rules_say(self.jobs[0], self.outside())
            if differ and schedule.fault == "nothing":
                self.promises.ranks_get_in_step_again(self.jobs[0])
            for job in self.jobs:
                self._leave(job)
            self.is_out = True
            self.resume()
            tag = "a" if schedule.is_looked_at else "next"
            self.finish("second", schedule.machines[2:3] * self.ranks, tag=tag, dedup=schedule.dedups)
            reader.is_over = True
            run_to_end(self.world, reading)
            self.hold(reader)
            self.next_saves_work()
            self.resume()
            self.afterwards()

    @property
    def rival_machines(self) -> tuple[str, ...]:
        """Those of the rival's ranks."""
        return self.schedule.machines[3:] * self.ranks

    def hold(self, reader: Reader | None = None) -> None:
        super().hold(reader)
        self.promises.tags_are_in_the_order_of_saves(self.jobs, self.outside())

    def resume(self) -> None:
        """Load the latest tag. Raises AssertionError unless it is the newest that is there."""
        storage = self.outside()
        tags = oracle.visible(storage, self.promises.late)
        if not tags or self.promises.late:
            return
        newest = max(tags, key=lambda tag: oracle.order_times(storage, [tag])[tag][0])
        reader = self.world.start_process("elsewhere")
        values: list[int] = []
        load = partial(loaded, self.storage(reader), 0, self.ranks, None)
        run_to_end(self.world, [self.world.spawn(reader, lambda: values.append(load()))])
        assert values == [tags[newest]], f"a resume took save {values}, the newest is {newest!r} of {tags}"

    def _rival_comes(self) -> None:
        """Wait until it does."""
        if self.schedule.late is None:
            self.stalled.wait(STALL_WITHIN)
        elif self.schedule.late:
            self.world.pause(self.schedule.late)

    def afterwards(self) -> None:
        """What a place checks at the end. Raises AssertionError."""

    def _leave(self, job: Job) -> None:
        """A job that was closed may live on, and does nothing any more; a launcher ends one that was not, or that could
        not give the directory back. Raises AssertionError."""
        holder = lease.read(self.outside())
        holds = holder is not None and holder.run_id == job.run_id
        if len(job.closed) == len(job.processes):
            tasks = [task for task in self.world.tasks if task.process in job.processes and not task.over]
            left = [task.stack() for task in tasks if not task.name.startswith(SHARED)]
            assert not left, "it was closed, and goes on:\n" + "\n".join(left)
            listening = [rank for rank, end in enumerate(job.ends or ()) if end.listens]
            assert not listening, f"it was closed, and ranks {listening} still listen to the others"
            assert not holds or not self.schedule.is_harmless, f"{job.run_id} was closed, and holds the lease"
            if not holds:
                return
        self.end(job)

    def end(self, job: Job) -> None:
        """A launcher ends what is left of a job."""
        for process in job.processes:
            self.world.kill(process)

    def is_victim(self, process: Process) -> bool:
        """Whether it is to this process, and now, that something happens."""
        return not self.is_out and process is self.jobs[0].processes[self.schedule.rank]

    def fail(self, number: int, path: str) -> NoReturn:
        """Let a system call fail with this error number."""
        self.promises.failed_calls += 1
        raise OSError(number, os.strerror(number), path)

    def disturb(self, process: Process, fault: str) -> None:
        """The faults that are the same in any place; nothing for others. Who is killed never returns."""
        if fault == "kill":
            self.world.kill(process)
            raise Killed
        if fault == "stall":
            seconds = self.world.random.uniform(0.3, 2.5) * TIMEOUT
            self.promises.stalled += seconds
            process.stalled_until = self.world.now + seconds
            self.stalled.set()
            self.world.pause(0.0)
        if fault == "clock":
            process.skew = self.world.random.choice((-1e6, -3600.0, 3600.0, 1e6))


def run(schedule: Schedule) -> Run:
    """Raises AssertionError, which names the seed, where a promise is broken."""
    found = schedule.start()
    try:
        found.go()
    except Exception as error:
        raise AssertionError(f"seed {schedule.seed}: {type(error).__name__}: {error}\n{schedule}") from error
    return found
