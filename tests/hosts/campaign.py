"""Kill campaigns over hosts: launch after launch of one job, whose hosts are killed at random instants.

Each host is a process with a directory of its own. All have replicas of another one's files, and rank 0 copies to a
second, slower tier. A launch loads the newest tag and saves the next ones, until one or several of its processes send
themselves SIGKILL: some milliseconds after an operation of some phase began, in the middle of whatever all threads do.
The others go on for a moment, then they are killed too, as a launcher does. Sometimes the disk of a host is lost with
it. After each launch all that is visible is read, on every tier.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from nxd_ckpt import Checkpointer, Tier, Topology
from nxd_ckpt.coordination.paths import HEARTBEAT, LEASE, VOTES
from nxd_ckpt.core.names import DONE, HIDDEN
from nxd_ckpt.errors import CheckpointNotFound
from nxd_ckpt.storage.hosts.directory import OwnDirectory
from nxd_ckpt.storage.hosts.remote import RemoteDirectory, RemoteWriter
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage
from tests.hosts.jobs import TIMEOUT, host_of, state, tier
from tests.protocol.job import Job, Raised

HOSTS = 3
KEPT = 2
SAVES = 3
NUMBERS = 3 * 2**17
"""Of each host's model: 1.5 MiB, of which replicas are sent beside the writing."""
RATE = "20MB"
MIDDLE = 0.005
"""Seconds within which a process dies after the operation began that its end was set for."""

PHASES = {
    *((rank, phase) for rank in range(HOSTS) for phase in ("load", "write", "send a replica", "receive a replica")),
    *((rank, phase) for rank in range(HOSTS) for phase in ("commit", "vote", "remove", "drain")),
    (0, "publish the drained"),
    (0, "lease"),
}


class End(NamedTuple):
    """Of a process: ``pause`` seconds after the ``number``-th operation of that phase began."""

    phase: str
    number: int
    pause: float


class Watch:
    """Counts what a process does, by phase, and ends it where it is told to; then the file ``fallen`` says so."""

    def __init__(self, end: End | None, fallen: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.loading = True
        self._end, self._fallen, self._lock = end, fallen, threading.Lock()

    def note(self, phase: str) -> None:
        with self._lock:
            self.counts[phase] += 1
            ends = self._end is not None and (phase, self.counts[phase]) == self._end[:2]
        if ends:
            threading.Thread(target=self._die, daemon=True).start()

    def _die(self) -> None:
        assert self._end is not None
        time.sleep(self._end.pause)
        self._fallen.write_text(self._end.phase)
        os.kill(os.getpid(), signal.SIGKILL)

    def disk(self, name: str, key: str) -> None:
        """An operation on this host's directory."""
        received = threading.current_thread().name == "nxd_ckpt-host"
        if key in (LEASE, HEARTBEAT):
            phase = "lease"
        elif key.startswith(VOTES):
            phase = "vote"
        elif key.startswith(HIDDEN):
            return
        elif name == "remove":
            phase = "remove"
        elif name == "create":
            phase = "receive a replica" if received else "write"
        elif name in ("link_new", "write"):
            phase = "commit"
        else:
            phase = "load"
        if phase != "load" or self.loading:
            self.note(phase)

    def ask(self, key: str) -> None:
        """A request to another host: one's votes are at rank 0's."""
        if key.startswith(VOTES):
            self.note("vote")

    def install(self) -> None:
        """All that this process does with hosts' directories is counted."""
        for name in ("create", "link_new", "write", "exchange", "remove", "read", "open"):
            _before(OwnDirectory, name, lambda storage, key="", *_, name=name: self.disk(name, key))
        for name in ("write_at", "close"):
            _before(RemoteWriter, name, lambda *_: self.note("send a replica"))
        _before(RemoteDirectory, "read_ranges", lambda _, key, *__: self.disk("read", key))
        _before(RemoteDirectory, "_ask", lambda _, name, key="", *__: self.ask(key))


def _before(kind: type, name: str, call: Callable[..., object]) -> None:
    original = getattr(kind, name)

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        call(self, *arguments)
        return original(self, *arguments, **options)

    setattr(kind, name, method)


def run(rank: int, path: Path, launch: int, ends: Mapping[int, End]) -> tuple[int, Counter[str]]:
    """A launch: the step that was loaded, and what was done by phase. What was loaded and saved is in files, too."""
    logging.disable()
    diary = path / "diary" / f"{launch}.{rank}"
    watch = Watch(ends.get(rank), diary.with_suffix(f".{rank}.fallen"))
    watch.install()

    def hook(operation: Any) -> None:
        watch.note("publish the drained" if operation.name == "rename" else "drain")

    far = HookedStorage(LocalStorage(path / "far"), hook)
    tiers = [tier(path, rank, replicas=2, keep=KEPT), Tier("far", keep=KEPT, max_bytes_per_second=RATE, storage=far)]
    topology = Topology(tp=HOSTS, rank=rank)
    with Checkpointer(tiers=tiers, topology=topology, timeout=TIMEOUT) as saver:
        model: dict[str, Any] = {}
        try:
            step = int(saver.load(model=model))
            assert all(value.equal(model[name]) for name, value in state(step, rank, NUMBERS).items())
        except CheckpointNotFound:
            step = 0
        diary.with_suffix(f".{rank}.loaded").write_text(str(step))
        watch.loading = False
        for number in range(step + 1, step + 1 + SAVES):
            pending = saver.save(f"step_{number}", state(number, rank, NUMBERS), user_content=number, async_save=True)
            pending.wait()
            diary.with_suffix(f".{rank}.saved").write_text(str(number))
        saver.wait(tier=1)
    return step, watch.counts


class Campaign:
    """The tiers, and what must be true of them. ``fallen`` counts the kills by (rank, phase)."""

    def __init__(self, path: Path, random: Random) -> None:
        self.path, self._random = path, random
        self.launches, self.lost, self.fallen = 0, 0, Counter[tuple[int, str]]()
        self._counts: list[Counter[str]] = []
        self._near: set[int] = set()
        self._far: set[int] = set()
        self._thin: set[int] = set()
        """Steps on the first tier some of whose files may be on one host only, as a disk was lost."""
        self._alone: set[int] = set()
        """Those of which one host alone says that they are complete, and no rank was told: rank 0 was killed then."""
        self._hosts = [host_of(path, rank) for rank in range(HOSTS)]
        (path / "diary").mkdir(parents=True)

    def rehearse(self) -> None:
        """Launches that nobody kills: one that finds nothing, and one that loads."""
        for _ in range(2):
            outcomes = self._launch({}).values()
            self._counts = [counts for _, counts in outcomes]
            self._check([step for step, _ in outcomes])

    def kill(self) -> None:
        """A launch with one to three ends, and what is true afterwards."""
        if self._random.random() < 0.25 and not self._thin & self._near:
            shutil.rmtree(host_of(self.path, self._random.randrange(HOSTS)))
            self.lost += 1
            self._near -= self._alone - _visible(self._hosts)
            self._thin |= self._near
        victims = self._random.sample(range(HOSTS), self._random.choice([1, 1, 2, 3]))
        ends = {rank: self._end(rank) for rank in victims}
        job = self._launch(ends)
        while all(job.alive(rank) for rank in victims) and any(job.alive(rank) for rank in range(1, HOSTS)):
            time.sleep(0.002)
        time.sleep(self._random.choice([0.0, 0.05, 0.5]))
        found = [self._read(rank, "fallen") for rank in range(HOSTS)]
        if not any(found):
            outcomes = job.outcomes()
            assert not [one for one in outcomes if isinstance(one, Raised)], outcomes
        job.kill_all()
        self.fallen.update((rank, phase) for rank, phase in enumerate(found) if phase)
        self._check([int(text) for rank in range(HOSTS) if (text := self._read(rank, "loaded"))])

    def _end(self, rank: int) -> End:
        """In one of three phases that fewest fell in."""
        phases = self._random.sample([phase for number, phase in PHASES if number == rank], 3)
        phase = min(phases, key=lambda one: self.fallen[rank, one])
        number = self._random.randint(1, max(1, self._counts[rank][phase]))
        return End(phase, number, self._random.uniform(0.0, MIDDLE))

    def _launch(self, ends: Mapping[int, End]) -> Job:
        self.launches += 1
        return Job(HOSTS, run, self.path, self.launches, ends, group=True)

    def _read(self, rank: int, what: str) -> str:
        file = self.path / "diary" / f"{self.launches}.{rank}.{what}"
        return file.read_text() if file.exists() else ""

    def _check(self, loaded: Iterable[int]) -> None:
        """The newest was loaded, nothing that was visible is lost but to newer ones, and what is visible is whole."""
        newest = max(self._near | self._far, default=0)
        assert {newest} >= {*loaded}, f"loaded {loaded}, the newest was {newest}"
        hosts = self._hosts
        reported = {int(text) for rank in range(HOSTS) if (text := self._read(rank, "saved"))}
        near, far = _visible(hosts), _visible([self.path / "far"])
        _nothing_lost(self._near | reported, near, "the first tier")
        _nothing_lost(self._far, far, "the second tier")
        for step in far:
            assert () == verify_checkpoint(self.path / "far", f"step_{step}").problems
        self._alone.clear()
        for step in near:
            assert _whole(hosts, step), f"step_{step} lacks files"
            complete = sum((host / f"step_{step}" / DONE).exists() for host in hosts)
            if complete == 1 and step not in reported:
                self._alone.add(step)
            if complete == HOSTS and step not in self._thin:
                for host in hosts:
                    assert _whole([one for one in hosts if one != host], step), f"step_{step} needs {host}"
        self._near, self._far = near, far


def _visible(places: Iterable[Path]) -> set[int]:
    """The steps whose tags are complete in any of these directories."""
    return {int(file.parent.name.removeprefix("step_")) for place in places for file in place.glob(f"step_*/{DONE}")}


def _nothing_lost(before: set[int], now: set[int], where: str) -> None:
    lost = {step for step in before - now if sum(one > step for one in now) < KEPT}
    assert not lost, f"{where} lost {sorted(lost)}, it has {sorted(now)}"


def _whole(hosts: Iterable[Path], step: int) -> bool:
    """Whether what these hosts hold is the save: their files put together, and read as any checkpoint."""
    tag = f"step_{step}"
    together = next(iter(hosts)).parents[1] / "together"
    for host in hosts:
        for file in (host / tag).rglob("*"):
            target = together / file.relative_to(host)
            if file.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, target)
    try:
        return () == verify_checkpoint(together, tag).problems
    finally:
        shutil.rmtree(together)
