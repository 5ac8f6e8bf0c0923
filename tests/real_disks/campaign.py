"""One directory of a mounted disk, run after run of a job: in each one's second save something goes wrong for real."""

import logging
import os
import time
from collections import Counter
from pathlib import Path
from random import Random

from nxd_ckpt.errors import CheckpointError, OutcomeUnknown
from nxd_ckpt.storage.system import sync_path
from tests.protocol.job import Job, Raised, until
from tests.protocol.states import checkpointer, lose_patience, moments, save, saved_value, visible_tags
from tests.real_disks.disk import EFFECTS, LOOKS, Fault
from tests.real_disks.server import Mount, mounted_disk

WORLD = 2
KEPT = 3
SHORT = "short"
CUT = "cut"
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS", "ESTALE", SHORT)


def run(rank: int, path: Path, diaries: Path, number: int, tag: str, xser: bool) -> bool:
    """A save to which nothing happens, and one to which something may."""
    logging.disable()
    saver = checkpointer(path, rank, WORLD, run_id=f"run{number}")
    save(saver, f"step_{number}", 2 * number, num_kept_ckpts=KEPT)
    (diaries / f"{number}.{rank}.begun").touch()
    lose_patience(saver)
    until((diaries / f"{number}.go").exists)
    value = 2 * number + 1
    save(saver, tag, value, num_kept_ckpts=KEPT, async_save=True, use_xser=xser, **moments(value, rank)).wait()
    (diaries / f"{number}.{rank}.done").touch()
    saver.close()
    return True


class Campaign:
    """The directory and what must be true of it. ``counts`` says how often each thing went wrong; ``missed`` is how
    often the save was over before."""

    def __init__(self, base: Path, mount: Mount, random: Random) -> None:
        self.path = mount.path / "checkpoints"
        self.counts = Counter[str]()
        self._diaries = base / "diaries"
        self._diaries.mkdir()
        self._mount = mount
        self._random = random
        self._number = 0
        self._values: dict[str, int] = {}
        self._requests = self.calm()

    def cut(self) -> None:
        """The power fails at a random change of the disk, or just when the job is done."""
        job, tag = self._begun(Fault(CUT, EFFECTS, self._one_of(EFFECTS)))
        while not self._mount.met()[0] and any(job.alive(rank) for rank in range(WORLD)):
            time.sleep(0.001)
        self._count(CUT)
        self._after(job, tag)

    def fail(self, what: str) -> None:
        """A random system call fails so, and perhaps some after it; in the end the power fails."""
        among: tuple[str, ...] = EFFECTS if what in ("ENOSPC", "EDQUOT", "EROFS") else (*EFFECTS, *LOOKS)
        among = ("write",) if what == SHORT else self._random.choice([among, (self._random.choice(among),)])
        fault = Fault(what, among, self._one_of(among), self._random.choice([1, 1, 3, 10]))
        job, tag = self._begun(fault)
        outcomes = job.outcomes()
        print(fault, outcomes)
        for outcome in outcomes:
            assert outcome is True or isinstance(getattr(outcome, "error", None), CheckpointError), outcome
        if True in outcomes:
            told = [one.error for one in outcomes if isinstance(one, Raised)]
            assert all(isinstance(error, OutcomeUnknown) for error in told), outcomes
        self._count(what)
        self._after(job, tag)

    def calm(self) -> Counter[str]:
        """A run to which nothing happens, and how many requests of each name its second save made."""
        job, tag = self._begun(None)
        job.values()
        _, requests = self._mount.met()
        self._check(tag)
        return requests

    def _begun(self, fault: Fault | None) -> tuple[Job, str]:
        """A job that is about to save a second time, to a disk that will fail so; and the tag of that save."""
        tag = self._start(overwrite=self._random.random() < 0.6)
        number = self._number
        job = Job(WORLD, run, self.path, self._diaries, number, tag, self._random.random() < 0.5)
        begun = [self._diaries / f"{number}.{rank}.begun" for rank in range(WORLD)]
        while not all(map(os.path.exists, begun)):
            if not all(job.alive(rank) for rank in range(WORLD)):
                raise AssertionError(f"a job that begins after what went wrong fails: {job.outcomes()}")
            time.sleep(0.001)
        self._mount.set(fault)
        (self._diaries / f"{number}.go").touch()
        return job, tag

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

    def _one_of(self, requests: tuple[str, ...]) -> int:
        """One of the requests of these names that a save makes."""
        return self._random.randint(1, max(sum(self._requests[name] for name in requests), 1))

    def _count(self, what: str) -> None:
        struck, _ = self._mount.met()
        self.counts[what if struck else "missed"] += 1

    def _after(self, job: Job, tag: str) -> None:
        """The power fails, if it has not; the promises hold of what is left."""
        self._mount.cut()
        job.kill_all()
        self._mount.restore(self._random.getrandbits(32))
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


def campaign(path: Path, seed: int, *, swaps: bool, cuts: int, errors: int) -> Counter[str]:
    """So many power cuts, and so many errors of each kind, in turn; how many there were, and how many ``missed``.

    ``swaps``: on a file system that can exchange two names and has links. Raises AssertionError for a broken promise.
    """
    print("seed", seed)
    with mounted_disk(path / "disk", swaps=swaps, links=swaps) as mount:
        found = Campaign(path, mount, Random(seed))
        for _ in range(cuts):
            found.cut()
        for what in ERRORS * errors:
            found.fail(what)
        found.calm()
    print(found.counts)
    return found.counts
