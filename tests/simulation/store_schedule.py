"""Schedules on a simulated object store, through the product's own S3 storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest

from nxd_ckpt.storage.base import Storage
from tests.simulation import oracle
from tests.simulation.job import WORLD_SIZE, Save
from tests.simulation.schedule import Calls, Run, Schedule, differing, drawn
from tests.simulation.world import EPOCH, Killed, Process
from tests.simulation.world.store import ObjectStore, Refused, Reply
from tests.simulation.world.store_client import ConnectionLost, store_storage

EFFECTS = {400: Calls((4, 2), (23, 7)), 2**20: Calls((4, 2), (16, 3))}
"""The requests that change something, by the bytes of a part."""

LONE_EFFECTS = {400: Calls((5, 0), (18, 0)), 2**20: Calls((5, 0), (11, 0))}
"""The same of lone processes, which write no votes."""

REQUESTS = Calls((22, 8), (50, 12))
"""All requests."""

KILLS = ("kill", "kill", "kill all", "kill all")
LOSSES = ("lost", "lost", "late", "outage", "refused", "partly")
FAULTS = ("nothing", *KILLS, *LOSSES, "stall", "clock")

SECOND = 0.01
"""How long a request takes on average to reach the store, and its reply to come back."""

RETRIES = 2
"""How often a client repeats a request."""

SPOILED = (
    "was written by somebody else",
    "is being written by another job",
    "is being written by another live job, run first",
)
"""What ranks are told whose save a request of an earlier job spoiled, which came late, or from a rank that had stood
still: see "What is not kept" in docs/reliability.md."""

LATE = 2.0
"""Seconds after which a late request has happened."""

LOOKS = {"get_object", "head_object", "list_objects_v2", "list_multipart_uploads"}
"""The requests that change nothing."""


@dataclass(frozen=True)
class StoreSchedule(Schedule):
    """Its faults are also "kill all" (of the ranks), "lost" (``times`` requests happen, and their replies do not come),
    "late" (they happen after the client has given them up), "outage" (``times`` requests, those that read included, do
    not happen), "refused" (the credentials are not taken, once), "partly" (of several keys that one request deletes,
    some are not deleted, once)."""

    times: int = 1
    lasts: float = 0.0
    """Seconds for which replies are lost, if any: then of all requests of the rank."""
    part: int = 2**20
    """Bytes of a part of an upload."""
    page: int = 1000
    """Names that a listing gives at once."""

    @staticmethod
    def of(seed: int) -> StoreSchedule:
        random = Random(f"store {seed}")
        part, page = random.choice((2**20, 400)), random.choice((1000, 2))
        fields = drawn(random, FAULTS, EFFECTS[part])
        overwrite = True if "rival" in fields else random.choice((True, True, True, None))
        for name in fields.keys() & {"saves", "rival"}:
            fields[name] = tuple(replace(save, overwrite=overwrite) for save in fields[name])
        times = random.choice((1, RETRIES + 1, RETRIES + 1, 4 * RETRIES))
        return StoreSchedule(seed, **fields, times=times, part=part, page=page)

    @staticmethod
    def of_a_lone_process(seed: int) -> StoreSchedule:
        """The same by processes that are the only one of their job."""
        one, random = StoreSchedule.of(seed), Random(f"alone {seed}")
        at = random.randrange(LONE_EFFECTS[one.part].of(0, len(one.saves)))
        return replace(one, is_alone=True, rank=0, at=at, has_group=False)

    @staticmethod
    def with_lost_replies(seed: int) -> StoreSchedule:
        """To one request of rank 0 in a save no reply comes, however often it is made. Of odd seeds no reply comes for
        some seconds: nor do those that look whether it happened."""
        random, saves, effects = Random(f"lost {seed}"), (Save("a", 1),), EFFECTS[2**20].of(0, 1)
        if seed % 2 == 0:
            return StoreSchedule(seed, saves, "lost", 0, seed // 2 % effects, times=RETRIES + 1)
        return StoreSchedule(seed, saves, "lost", 0, random.randrange(effects), lasts=random.uniform(1, 8))

    @staticmethod
    def with_a_takeover(seed: int) -> StoreSchedule:
        """Rank 0 stands still before any of its requests, and another job takes over."""
        random = Random(f"takeover {seed}")
        saves = random.choice(((Save("a", 1),), (Save("a", 1), Save("a", 2, overwrite=True))))
        tags = random.choice(("bx", "xa"))
        rival = tuple(Save(tag, value, overwrite=True) for value, tag in enumerate(tags, start=5))
        at = random.randrange(REQUESTS.of(0, len(saves)))
        return StoreSchedule(seed, saves, "stall", 0, at, rival=rival, late=None, looks=True)

    @staticmethod
    def with_ranks_that_differ(seed: int) -> StoreSchedule:
        """A rank does something else than the other, and mostly nothing happens besides."""
        random = Random(f"differing {seed}")
        fault, rank = random.choice(("nothing", "nothing", "kill", "stall")), random.randrange(WORLD_SIZE)
        saves = tuple(replace(save, overwrite=True) for save in differing(random))
        return StoreSchedule(
            seed, saves, fault, rank, random.randrange(EFFECTS[2**20].of(rank, 2)), has_group=random.random() < 0.5,
            machines=("one", "two", "three"),
        )

    def start(self) -> StoreRun:
        return StoreRun(self)


class StoreRun(Run):
    """A schedule under way."""

    schedule: StoreSchedule
    excused = SPOILED[:2]

    def __init__(self, schedule: StoreSchedule) -> None:
        super().__init__(schedule)
        self.promises.in_place = True
        self.connects = Random(f"connections {schedule.seed}").random() < 0.5
        self.promises.late = schedule.fault == "late"
        self.store = ObjectStore(lambda: EPOCH + self.world.now, schedule.page, self._deleting)
        self.network = self.world.start_process("network")
        self._effects = self._failed = 0
        self._ends = 0.0
        """When replies come again."""
        self._happened_late = 0.0
        """When the last late request did, if any."""
        self._spares = False
        """Whether the next request that is to delete several keys deletes only some."""

    def go(self) -> None:
        with parts_of(self.schedule.part):
            super().go()

    def afterwards(self) -> None:
        """Nothing is left that no tag names."""
        if self.schedule.fault not in ("stall", "late"):  # docs/decisions/014 says what these leave
            uploads = [upload.key for upload in self.store.uploads.values()]
            assert [] == oracle.strays(self.outside()) + uploads

    def next_saves_work(self) -> None:
        """Or those after them, where a late request has put a file into the tag that was being saved anew, or has
        brought back the lease of a process that lives on: see "What is not kept" in docs/reliability.md."""
        outcomes = self.jobs[-1].outcomes
        is_hit = all(any(word in str(outcome.error) for word in SPOILED) for outcome in outcomes)
        if is_hit and self._happened_late:
            for job in self.jobs:
                self.end(job)
            self.finish("third", self.schedule.machines[2:3] * self.ranks, value=10, dedup=self.schedule.dedups)
            self.hold()
        super().next_saves_work()

    def storage(self, process: Process) -> Storage:
        return store_storage(self.store, partial(self._carry, process), RETRIES)

    def outside(self) -> Storage:
        return store_storage(self.store)

    def _carry(self, process: Process, name: str, key: str, happen: Callable[[], Reply]) -> Reply:
        """A request of a process reaches the store, and its reply the process; or not."""
        world, changes = self.world, name not in LOOKS
        world.pause(world.duration(SECOND))
        self.trace.append((world.now, process.pid, name, key))
        if changes:
            self.notice()
        fate = self._fate(process, changes)
        if fate == "late":
            world.spawn(self.network, partial(self._happen_late, happen), "late request")
        if fate in ("outage", "late"):
            raise ConnectionLost
        if fate == "partly":
            self._spares = True
        if fate == "refused":
            raise Refused(403, "AccessDenied")
        if "kill" in fate and world.random.random() < 0.5:
            with suppress(Refused):
                happen()  # but nobody waits for the reply any more
        if fate == "kill all":
            self.end(self.jobs[0])
            raise Killed
        self.disturb(process, fate)
        reply = happen()
        world.pause(world.duration(SECOND))
        if fate == "lost":
            raise ConnectionLost
        return reply

    def _fate(self, process: Process, changes: bool) -> str:
        """What becomes of a request; mostly "happens"."""
        schedule = self.schedule
        if not self.is_victim(process):
            return "happens"
        counts = changes or schedule.looks
        self._effects += counts
        since = self._effects - schedule.at
        if schedule.fault == "outage":
            self._failed += since >= 0
            return "outage" if 0 < self._failed <= schedule.times else "happens"
        if schedule.lasts and since >= 0:
            self._ends = self._ends or self.world.now + schedule.lasts
            return schedule.fault if self.world.now < self._ends else "happens"
        lasts = schedule.times if schedule.fault in ("lost", "late") else 1
        return schedule.fault if counts and 0 <= since < lasts else "happens"

    def _happen_late(self, happen: Callable[[], Reply]) -> None:
        self.world.pause(self.world.random.uniform(0.0, LATE))
        self._happened_late = self.world.now
        with suppress(Refused):
            happen()

    def _deleting(self, keys: Sequence[str]) -> Iterator[str]:
        count = len(keys)
        if self._spares and count > 1 and not self.is_out:
            count, self._spares = self.world.random.randrange(count), False
        for key in self.world.random.sample(keys, count):
            yield key
            self.world.pause(self.world.duration(SECOND / 10))


@contextmanager
def parts_of(nbytes: int) -> Iterator[None]:
    """Within, uploads have parts of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_ckpt.storage.s3.upload.PART", nbytes)
        patch.setattr("nxd_ckpt.storage.s3.upload._lanes", {})
        yield
