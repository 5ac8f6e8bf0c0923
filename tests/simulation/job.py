"""A job of two ranks or one in a simulated world: what its ranks save, what came of it, and what they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_ckpt import Checkpointer, Tier, Topology
from nxd_ckpt.coordination import at_exit
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, Words
from nxd_ckpt.coordination.peers import Address, Heard
from nxd_ckpt.coordination.rendezvous import Rendezvous
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, OutcomeUnknown, TagReplaced
from nxd_ckpt.storage.base import Storage
from tests.simulation.world import Process, Task, World

WORLD_SIZE = 2
TIMEOUT = 8.0
"""Seconds without progress after which a rank counts as lost."""

WRITERS = 3
"""Threads of a rank that write its files, of which no save here has more: others would never have anything to do."""

CHANGES, IDLE = 100, 5.0
"""A reader looks again after about so many changes of the others, or so many seconds in which there were fewer."""


@dataclass(frozen=True)
class Save:
    """A save that all ranks make: number ``value``, under ``tag``."""

    tag: str
    value: int
    is_async: bool = False
    num_kept: int | None = None
    overwrite: bool | None = None
    fails_on: int | None = None
    """The rank whose arguments are refused."""
    differs_on: int | None = None
    """The rank that does something else ``instead``: "another tag", "another format" or "nothing"."""
    instead: str = ""
    use_xser: bool = False
    dedup: bool = False
    """Whether it also has a tensor that is the same in all saves, in a file of its own, which is not written again."""

    @property
    def removes(self) -> bool:
        """Whether, where nothing can be renamed, it removes its tag first. Rank 0 does that before other ranks are
        heard, and not if it is refused itself."""
        return bool(self.overwrite) and self.fails_on != 0

    def of(self, rank: int) -> Save | None:
        """What the rank saves."""
        if rank != self.differs_on:
            return self
        if self.instead == "nothing":
            return None
        tag = replace(self, tag="other", value=self.value + 50)
        return tag if self.instead == "another tag" else replace(self, use_xser=not self.use_xser)


@dataclass
class Outcome:
    """What a rank was told of a save, when it called, and when it was decided there: who saves again before it looks
    also waits for that later save, which counts for that one. ``word`` is "saved", "failed" or "unknown"."""

    rank: int
    save: Save
    word: str
    began: float
    ended: float
    error: BaseException | None = None


@dataclass
class Job:
    """One launch: its processes, one a rank. They are joined by a process group, or by their ``run_id`` alone."""

    world: World
    run_id: str
    processes: list[Process]
    has_group: bool
    is_rival: bool = False
    """Whether it runs while another does, in the same directory."""
    outcomes: list[Outcome] = field(default_factory=list)
    begun: list[tuple[int, Save]] = field(default_factory=list)
    began: dict[Save, float] = field(default_factory=dict)
    """When the first rank began each save."""
    closed: set[int] = field(default_factory=set)
    """The ranks whose Checkpointer was closed, and raised nothing."""
    store: Any = field(default_factory=lambda: dist.HashStore())  # type: ignore[attr-defined]
    ends: list[_End] | None = None
    """Those of the connections between the ranks, by rank; None where nothing connects them."""

    def connect(self) -> None:
        """Let the ranks have connections."""
        self.ends = [_End(self, rank) for rank in range(len(self.processes))]

    @property
    def is_skewed(self) -> bool:
        """Whether the wall clock of a rank is wrong."""
        return any(process.skew for process in self.processes)

    def do(self, save: Save, call: Callable[[], object]) -> None:
        """What comes of ``call``, which its only process makes, counts as what came of the ``save``."""
        began, problem = self.world.now, None  # type: float, Exception | None
        self.begun.append((0, save))
        self.began[save] = began
        try:
            call()
        except (CheckpointError, OSError) as error:
            problem = error
        word = "failed" if problem else "saved"
        self.outcomes.append(Outcome(0, save, word, began, self.world.now, problem))

    def agreement(self, rank: int, timeout: float, call: str) -> Agreement | None:
        if len(self.processes) == 1:
            return SingleProcessAgreement()
        if not self.has_group:
            return None
        return _Rendezvous(self, rank).meet(timeout, call)


class _End:
    """A rank's end of the connections: words take a millisecond, and a process that ended is known at once.

    A word is handled by a task of the process that it goes to, as by the thread there that all connections have.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank = job, rank
        self._listeners: dict[int, Heard] = {}

    @property
    def listens(self) -> bool:
        """Whether anything of the rank's still waits for words."""
        return bool(self._listeners)

    def is_gone(self, rank: int) -> bool:
        return not self._job.processes[rank].alive

    def listen(self, channel: int, heard: Heard | None) -> None:
        if heard is None:
            self._listeners.pop(channel, None)
        else:
            self._listeners[channel] = heard

    def tell(self, channel: int, word: Any) -> None:
        job = self._job
        for rank in range(1, len(job.processes)) if self._rank == 0 else (0,):
            if job.ends is not None and not self.is_gone(rank):
                hear = partial(job.ends[rank]._hear, self._rank, channel, word)
                job.world.spawn(job.processes[rank], hear, "nxd_ckpt-peers")

    def _hear(self, rank: int, channel: int, word: Any) -> None:
        self._job.world.pause(self._job.world.duration(1e-3))
        if channel in self._listeners:
            self._listeners[channel](rank, word)


class _Rendezvous(Rendezvous):
    """Ranks learn of the end of others at once, as by their connections."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job.store, rank, len(job.processes))
        self._job = job
        self._end = None if job.ends is None else job.ends[rank]

    def meet(self, timeout: float, call: str) -> Agreement:
        agreement = super().meet(timeout, call)
        agreement.peers = self._end
        return agreement

    def _hub(self) -> Address | None:
        return None

    def _exchange(self, words: Words) -> bytes:
        """The exchange of keys only costs time here: no schedule has a network."""
        return b"secret"

    def _is_gone(self, rank: int) -> bool:
        return not self._job.processes[rank].alive


def state(value: int, rank: int, ranks: int = WORLD_SIZE) -> dict[str, torch.Tensor]:
    """The model of a rank in save number ``value``; no two ranks or saves have an equal one."""
    return {"weight": _part(3, 10.0 * value, rank, ranks), "bias": _part(2, -10.0 * value, -rank, ranks)}


def frozen(rank: int, ranks: int = WORLD_SIZE) -> dict[str, torch.Tensor]:
    """What a rank's model has besides where saves deduplicate."""
    return {"frozen": _part(5, 0.5, rank, ranks)}


@cache
def _part(count: int, value: float, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of a parameter that is cut over the ranks, as NxD's layers mark it. Nobody writes to it.

    A lone process has the parts of both ranks.
    """
    numbers = [value + rank] if ranks > 1 else [value + number for number in range(WORLD_SIZE)]
    part = torch.tensor(numbers).repeat_interleave(count)
    vars(part).update(tensor_model_parallel=True, partition_dim=0)
    return part


def checkpointer(place: Storage | Tier, rank: int, ranks: int, run_id: str | None) -> Checkpointer:
    where: dict[str, Any] = {"tiers": [place]} if isinstance(place, Tier) else {"path": "simulated", "storage": place}
    topology = Topology(tp=ranks, rank=rank)
    return Checkpointer(**where, topology=topology, run_id=run_id, timeout=TIMEOUT, memory_cap=2**20)


def saving(
    job: Job, rank: int, place: Storage | Tier, saves: list[Save], comes: Callable[[], None], trains: float = 0.0
) -> None:
    """What a rank of the job does once it ``comes``: it trains for so many seconds, then saves, then trains again; and
    what came of each save. Asynchronous ones are waited for before the next but one."""
    world, ranks = job.world, len(job.processes)
    comes()
    saver = checkpointer(place, rank, ranks, job.run_id)
    under_way: list[tuple[float, Save, Any]] = []
    decided: dict[Save, float] = {}

    def told(began: float, save: Save, error: BaseException | None) -> None:
        word = "saved" if error is None else "unknown" if isinstance(error, OutcomeUnknown) else "failed"
        job.outcomes.append(Outcome(rank, save, word, began, decided.get(save, world.now), error))

    def settle() -> None:
        while under_way:
            began, save, pending = under_way.pop()
            error = None
            try:
                pending.wait()
            except CheckpointError as problem:
                error = problem
            told(began, save, error)

    try:
        for save in saves:
            own = save.of(rank)
            if own is None:
                continue
            if trains:
                world.pause(trains)
            began = world.now
            job.begun.append((rank, save))
            job.began.setdefault(save, began)
            try:
                pending = saver.save(
                    own.tag,
                    state(own.value, rank, ranks) | (frozen(rank, ranks) if own.dedup else {}),
                    user_content={"value": own.value},
                    async_save=own.is_async,
                    num_workers=None if own.fails_on != rank else 0,
                    num_kept_ckpts=own.num_kept,
                    overwrite=own.overwrite,
                    use_xser=own.use_xser or own.dedup,
                    dedup=own.dedup,
                )
            except CheckpointError as error:
                told(began, save, error)
                settle()
            else:
                pending.add_done_callback(lambda _, save=save: decided.setdefault(save, world.now))  # type: ignore[misc]
                settle()
                under_way.append((began, save, pending))
                if not own.is_async:
                    settle()
        settle()
    finally:
        try:
            with suppress(CheckpointError):  # of a save that is told of above
                saver.close()
                job.closed.add(rank)
        finally:
            at_exit.forget(saver)


def loaded(storage: Storage, rank: int, ranks: int, tag: str | None) -> int:
    """The number of the save that a rank reads, alone. Raises AssertionError for a mixture of several."""
    return loaded_by(checkpointer(storage, rank, ranks, None), rank, ranks, tag)


def loaded_by(reader: Checkpointer, rank: int, ranks: int, tag: str | None = None) -> int:
    """The same, of a rank of a job."""
    model: dict[str, torch.Tensor] = {}
    value = int(reader.load(tag, model)["value"])
    for name, expected in (state(value, rank, ranks) | (frozen(rank, ranks) if "frozen" in model else {})).items():
        assert torch.equal(expected, model[name]), f"{name} of rank {rank} is not of save {value}: {model[name]}"
    return value


@dataclass
class Reader:
    """A process that loads again and again, as any job may that shares the directory; what it found, and when."""

    world: World
    storage: Storage
    process: Process
    ranks: int = WORLD_SIZE
    """Of the jobs whose tags it reads."""
    is_over: bool = False
    found: list[tuple[float, float, int | None]] = field(default_factory=list)
    changes_left: int = 0
    """After so many it looks again."""
    resting: Task | None = None

    def run(self) -> None:
        while not self.is_over:
            began = self.world.now
            try:
                rank = self.world.random.randrange(self.ranks)
                value: int | None = loaded(self.storage, rank, self.ranks, None)
            except (CheckpointNotFound, TagReplaced):
                value = None
            self.found.append((began, self.world.now, value))
            self._rest()

    def notice(self) -> None:
        """Another process is about to change something."""
        self.changes_left -= 1
        if self.changes_left == 0 and self.resting is not None:
            self.world.wake(self.resting)

    def _rest(self) -> None:
        self.changes_left = 1 + int(self.world.random.expovariate(1 / CHANGES))
        self.resting = self.world.current
        self.world.park(IDLE)
        self.resting = None


@contextmanager
def among(jobs: list[Job], world: World) -> Iterator[None]:
    """Within, ranks of ``jobs`` meet where their job has a group, and nothing asks the real machine."""

    def meet(
        rank: int, world_size: int, timeout: float, call: str, members: tuple[int, ...] | None = None
    ) -> Agreement | None:
        process = world.current.process if world.current is not None else None
        job = next((job for job in jobs if process in job.processes), None)
        return SingleProcessAgreement() if job is None else job.agreement(rank, timeout, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxd_ckpt.checkpointer.meet", meet)
        patch.setattr("nxd_ckpt.checkpointer.versions", dict)
        patch.setattr("nxd_ckpt.saving.pipeline.WRITERS", WRITERS)
        patch.setattr("nxd_ckpt.commit.session.forget_slots", lambda run_id: None)
        yield


def run_to_end(world: World, tasks: list[Task]) -> None:
    """Until these end; what they raise is raised."""
    world.run(*tasks)
    for task in tasks:
        if task.error is not None and task.process.alive:
            raise task.error
