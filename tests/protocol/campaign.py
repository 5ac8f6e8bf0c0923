"""Kill campaigns: one directory, run after run of a job, each killed in its second save; the promises hold after each.

A run is two new processes without a process group. It saves a new tag and waits for it, then saves another one,
perhaps over the tag of the run before, and one of its ranks is killed somewhere in there.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from nxd_ckpt.coordination.paths import HEARTBEAT, JOURNAL, LEASE, TRASH
from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.errors import OutcomeUnknown, SaveFailed
from nxd_ckpt.storage.system import sync_path
from nxd_ckpt.testing.storage import Operation
from tests.protocol.job import Died, Job, Raised
from tests.protocol.states import checkpointer, lose_patience, moments, save, saved_value, visible_tags

WORLD = 2
KEPT = 3
DELAY = 0.01
"""Seconds before each effect where kills come from outside, five times as long before those that publish: otherwise
next to all kills would fall into the writing of data."""

BEFORE_WRITING = "before writing"
# What a rank has done when a phase begins: the phase, the operation and its key.
RANK_0 = [
    ("writing", "create", r"\.nxd_ckpt/staging/.*"),
    ("between vote and rename", "write", r".*/rank_00000\.vote\.json"),
    ("swapping", "write", r"\.nxd_ckpt/journal\.json"),
    ("between rename and its sync", "rename", r"\.nxd_ckpt/staging/.* -> .*"),
    ("retaining", "sync_dir", ""),
    ("after the verdict", "write", r".*/verdict\.json"),
]
OTHERS = [
    ("writing", "create", r"\.nxd_ckpt/staging/.*"),
    ("awaiting the verdict", "write", r".*/rank_00001\.vote\.json"),
]
PHASES = (
    {(0, BEFORE_WRITING), (1, BEFORE_WRITING)}
    | {(0, name) for name, _, _ in RANK_0}
    | {(1, name) for name, _, _ in OTHERS}
)

_POLLS = ("list", "read", "read_ranges", "open", "is_dir", "is_file", "size", "time")


class Moment(NamedTuple):
    """Just before ``name`` on ``key`` (see :func:`_without_numbers`) happens for the ``occurrence``-th time."""

    name: str
    key: str
    occurrence: int


def _without_numbers(key: str) -> str:
    """A key as it is in every run: without the numbers of runs and tags, and the digests of tags in names of trash."""
    return re.sub(r"(run|step_|extra_)\d+", r"\1N", re.sub(r"(trash/.*)-[0-9a-f]{8}", r"\1", key))


class Diary:
    """What a rank does, operation by operation, in a file that survives its death."""

    def __init__(self, path: Path, kill: Moment | None, delay: float) -> None:
        self._path, self._kill, self._delay = path, kill, delay
        self._seen: list[tuple[str, str]] = []
        self._has_renamed = False
        self.open = False

    def hook(self, operation: Operation) -> None:
        if not self.open:
            return
        done = (operation.name, _without_numbers(operation.key))
        if operation.name in ("rename", "swap"):
            self._has_renamed = True
        elif done == ("sync_dir", TRASH) or (done == ("sync_dir", "") and not self._has_renamed):
            return  # before trash is deleted, of which one run has more than another
        elif done == ("sync_dir", ""):
            self._has_renamed = False
        self._seen.append(done)
        moment = Moment(*done, self._seen.count(done))
        with self._path.open("a") as file:
            file.write("\t".join(map(str, moment)) + "\n")
        if moment == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if moment.name not in _POLLS:
            publishes = moment.name == "rename" or moment.key in ("", HIDDEN, JOURNAL)
            time.sleep(self._delay * (5 if publishes else 1))

    @staticmethod
    def read(path: Path) -> list[Moment]:
        lines = path.read_text().splitlines() if path.exists() else []
        fields = [line.split("\t") for line in lines]
        return [Moment(name, key, int(occurrence)) for name, key, occurrence in fields]


def run(
    rank: int,
    path: Path,
    diaries: Path,
    number: int,
    tag: str,
    victim: int,
    kill: Moment | None,
    delay: float,
    xser: bool,
) -> bool:
    """One run; True once the second save's ``done`` was seen. ``delay`` seconds go by before each effect of it."""
    diary = Diary(diaries / f"{number}.{rank}", kill if rank == victim else None, delay)
    saver = checkpointer(path, rank, WORLD, diary.hook, run_id=f"run{number}")
    save(saver, f"step_{number}", 2 * number, num_kept_ckpts=KEPT)
    (diaries / f"{number}.{rank}.begun").touch()
    if victim >= 0:
        lose_patience(saver)
    diary.open = True
    value = 2 * number + 1  # with an optimizer in the one form of which rank 0 writes a part after the others' votes
    pending = save(saver, tag, value, num_kept_ckpts=KEPT, async_save=True, use_xser=xser, **moments(value, rank))
    while not pending.done():
        time.sleep(0.001)
    pending.wait()
    (diaries / f"{number}.{rank}.done").touch()
    saver.close()
    return True


class Campaign:
    """The directory and what must be true of it. ``fallen`` lists each kill's (rank, phase).

    ``base`` is where notes are kept, and the directory itself unless its ``path`` is given.
    """

    def __init__(self, base: Path, random: Random, path: Path | None = None) -> None:
        self.path, self._diaries, self._random = path or base / "checkpoints", base / "diaries", random
        self._diaries.mkdir()
        self._number = 0
        self._values: dict[str, int] = {}
        self.fallen: list[tuple[int, str]] = []

    def rehearse(self, *, overwrite: bool) -> list[tuple[int, str, Moment]]:
        """A run that nobody kills: (rank, phase, moment) of every effect of its second save.

        But for the creation of files: several threads do that, and which file is the first, with which the writing
        begins, differs from run to run. And but for the lease and its heartbeat, which is
        written again as time goes by.
        """
        tag = self._start(overwrite=overwrite)
        Job(WORLD, run, self.path, self._diaries, self._number, tag, -1, None, 0.0, False).values()
        self._check(tag)
        found = []
        for rank in range(WORLD):
            moments = Diary.read(self._diaries / f"{self._number}.{rank}")
            phases = [phase_of(rank, moments[:position]) for position in range(len(moments))]
            found += [(rank, phase, moment) for phase, moment in zip(phases, moments, strict=True)]
        return [one for one in found if one[2].name not in (*_POLLS, "create") and one[2].key not in (LEASE, HEARTBEAT)]

    def lasts(self) -> list[float]:
        """Seconds from begin to ``done`` of a second save that :meth:`kill_after` interrupts, by rank."""
        tag = self._start(overwrite=True)
        Job(WORLD, run, self.path, self._diaries, self._number, tag, -1, None, DELAY, False).values()
        self._check(tag)
        marks = [
            [self._diaries / f"{self._number}.{rank}.{mark}" for mark in ("begun", "done")] for rank in range(WORLD)
        ]
        return [done.stat().st_mtime - begun.stat().st_mtime for begun, done in marks]

    def kill_at(self, rank: int, moment: Moment, *, overwrite: bool) -> None:
        """A run in which ``rank`` dies at ``moment``."""
        tag = self._start(overwrite=overwrite)
        job = Job(WORLD, run, self.path, self._diaries, self._number, tag, rank, moment, 0.0, False)
        outcome = job.outcome(rank)
        assert isinstance(outcome, Died), f"rank {rank} did not reach {moment}: {outcome}"
        self._bury(job, rank, tag)

    def kill_after(self, rank: int, seconds: float, *, overwrite: bool) -> None:
        """A run in which ``rank`` dies ``seconds`` after its second save began."""
        tag = self._start(overwrite=overwrite)
        xser = self._random.random() < 0.5
        job = Job(WORLD, run, self.path, self._diaries, self._number, tag, rank, None, DELAY, xser)
        begun = self._diaries / f"{self._number}.{rank}.begun"
        while not begun.exists() and job.alive(rank):
            time.sleep(0.001)
        time.sleep(seconds)
        job.kill(rank)
        self._bury(job, rank, tag)

    def _start(self, *, overwrite: bool) -> str:
        """The second save's tag, with a file of somebody else in it if it is there."""
        self._number += 1
        tag = f"step_{self._number - 1}" if overwrite else f"extra_{self._number}"
        self._has_guest = overwrite and (self.path / tag).is_dir()  # the first run finds no tag
        if self._has_guest:
            with (self.path / tag / "theirs.txt").open("w") as guest:  # a power cut must not take what was not synced
                guest.write(tag)
                guest.flush()
                os.fsync(guest.fileno())
            sync_path(self.path / tag)
        return tag

    def _bury(self, job: Job, rank: int, tag: str) -> None:
        """Note the phase; let the other rank find out, or kill it too, as a launcher does; then check."""
        self.fallen.append((rank, phase_of(rank, Diary.read(self._diaries / f"{self._number}.{rank}")[:-1])))
        if rank != 0 and self._random.random() < 0.5:
            outcome = job.outcome(0)
            error = outcome.error if isinstance(outcome, Raised) else None
            assert outcome is True or isinstance(error, (SaveFailed, OutcomeUnknown)), outcome
        job.kill_all()
        self._check(tag)

    def _check(self, tag: str) -> None:
        """All that is visible is complete and what was saved; what was reported and the guest are there."""
        reported = any((self._diaries / f"{self._number}.{rank}.done").exists() for rank in range(WORLD))
        last = f"step_{self._number}"
        # A reader repairs what an interrupted swap left, before anything is listed.
        latest = saved_value(self.path, None, WORLD)
        visible = visible_tags(self.path)
        found = {name: saved_value(self.path, name, WORLD) for name in visible}
        before = {**self._values, last: 2 * self._number}
        new = 2 * self._number + 1
        assert {} == {name: value for name, value in found.items() if value not in (before.get(name), new)}
        assert new not in (value for name, value in found.items() if name != tag)
        assert new == found.get(tag) or not reported
        order = list(before)[-KEPT:]
        if found.get(tag) == new:
            order = [*(name for name in order if name != tag), tag][-KEPT:]
        assert set(order) <= set(visible)
        assert latest == found[visible[-1]]
        assert not self._has_guest or tag == (self.path / tag / "theirs.txt").read_text()
        self._values = found


def phase_of(rank: int, done: Sequence[Moment]) -> str:
    """The phase that a rank is in which has done this much."""
    landmarks = RANK_0 if rank == 0 else OTHERS
    reached = -1
    for moment in done:
        for number, (_, name, key) in enumerate(landmarks):
            # Trash is deleted at any time, and the directory synced before; what a landmark syncs is the rename.
            is_next = number == reached + 1 or (number > reached and name != "sync_dir")
            if is_next and moment.name == name and re.fullmatch(key, moment.key):
                reached = number
    return BEFORE_WRITING if reached < 0 else landmarks[reached][0]
