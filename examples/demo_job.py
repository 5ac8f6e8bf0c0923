"""One training run of the demo, as seen from outside: started, watched, and killed in the middle of a save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nxd_ckpt
from nxd_ckpt.coordination import control_files as keys
from nxd_ckpt.core import names
from nxd_ckpt.errors import CheckpointNotFound, TagReplaced
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.directory import list_tags

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
RANKS = 4
NXD = ("nxd_ckpt.emulation", "--nproc", str(RANKS), "--grace", "1", str(EXAMPLES / "train_llama.py"))
_TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS))
FSDP2 = (*_TORCHRUN, str(EXAMPLES / "train_llama_fsdp2.py"))
# Small graphs that run a few times: XLA:CPU's optimisations take longer than they save.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


class RunFailed(Exception):
    """A run did not go as the demo needs it; the message says how."""


@dataclass
class Job:
    """One training run, as seen from outside: its log, its checkpoint directory (or URL), its processes.

    ``module`` is what ``python -m`` runs, and what it runs on all ranks.
    """

    name: str
    work: Path
    checkpoints: str
    arguments: list[str]
    module: Sequence[str] = NXD
    saves: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def __enter__(self) -> Job:
        self._started = time.monotonic()
        self.storage: Storage = open_storage(self.checkpoints)
        command = [sys.executable, "-m", *self.module, "--checkpoint_dir", self.checkpoints]
        command += ["--loading_step", "latest_if_exists", "--log_file", str(self.log), *self.arguments]
        with self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={"XLA_FLAGS": XLA_FLAGS, **os.environ},
                stdout=errors,
                stderr=errors,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self.seconds = time.monotonic() - self._started

    @property
    def log(self) -> Path:
        return self.work / f"{self.name}.jsonl"

    @property
    def errors(self) -> Path:
        return self.work / f"{self.name}.stderr"

    def running(self) -> bool:
        """Whether it runs; notes what complete checkpoints say of themselves, before retention deletes them."""
        running = self._process.poll() is None
        for tag in self.complete_tags():
            if tag not in self.saves:
                with suppress(CheckpointNotFound, TagReplaced):  # it may just have been deleted
                    manifest = nxd_ckpt.open_checkpoint(self.checkpoints, tag).manifest
                    self.saves[tag] = manifest.timings if manifest is not None else {}
        return running

    def wait(self) -> int:
        """Its exit code, once it ended."""
        while self.running():
            time.sleep(self.pause(0.02))
        return self._process.returncode

    def records(self, event: str) -> Iterator[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return (record for line in lines if (record := json.loads(line))["event"] == event)

    def losses(self) -> dict[int, str]:
        """The loss of each step as hexadecimal floating point: equal only if equal in every bit."""
        return {record["step"]: record["hex"] for record in self.records("step")}

    def stalls(self) -> dict[int, float]:
        """For each step that saved: seconds for which ``save_checkpoint`` held the training loop."""
        return {record["step"]: record["stall_seconds"] for record in self.records("save")}

    def complete_tags(self) -> list[str]:
        return sorted((info.tag for info in list_tags(self.storage) if info.complete), key=step_of)

    def pause(self, seconds: float) -> float:
        """Seconds between two looks, at least ``seconds``: a store is asked less often, as it answers slowly."""
        return seconds if self.storage.renames else max(seconds, 0.1)

    def attempts(self) -> list[str]:
        """Saves in flight: each has a hidden staging directory, or in a store a note of its intent there."""
        return [entry.name for entry in self.storage.list(keys.STAGING)]

    def is_written(self, attempt: str, file: str) -> bool:
        """Whether a rank writes this file just now. In a store nothing shows until it has: there it may."""
        return not self.storage.renames or self.storage.is_file(f"{keys.staging_dir(attempt)}/{file}")

    def voters(self, attempt: str) -> list[int]:
        """Ranks that have brought their part of a save to disk."""
        votes = {entry.name for entry in self.storage.list(keys.votes_dir(attempt))}
        return [rank for rank in range(RANKS) if Path(keys.rank_file(attempt, rank, "vote")).name in votes]

    def must_succeed(self) -> None:
        code = self.wait()
        if code != 0:
            raise RunFailed(f"the {self.name} run ended with exit code {code}, expected 0; {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.errors.read_text(errors="replace").splitlines()
        return "the end of its output:\n" + "\n".join(lines[-30:])


@dataclass(frozen=True)
class Kill:
    """What was seen at the moment of the kill: the last complete tag, and how many ranks had finished the next."""

    latest: str
    finished_ranks: int


def kill_during_save(job: Job, victim: nxd_ckpt.Topology, complete: int) -> Kill:
    """SIGKILL a rank in the middle of writing its part of a save, after ``complete`` tags became visible.

    What a rank writes shows as files in the save's staging directory; in a store, a save that is begun will do.
    """
    file = names.optimizer_file(victim, victim.coordinates, "zero1")
    seen: set[str] = set()
    while job.running():
        for attempt in job.attempts() if len(job.complete_tags()) >= complete else []:
            if attempt in seen or not job.is_written(attempt, file):
                continue
            seen.add(attempt)
            kill = _kill_unless_finished(job, attempt, victim.rank)
            if kill is not None:
                return kill
        time.sleep(job.pause(0.001))
    raise RunFailed(f"the {job.name} run ended before rank {victim.rank} could be caught in a save: use more steps")


def _kill_unless_finished(job: Job, attempt: str, rank: int) -> Kill | None:
    """Freeze the rank, look, and kill it; or let it go on if its part is on disk already.

    Frozen first: what is seen then is still true when it dies. And killed only once the other ranks have finished:
    the worst moment, as the tag lacks nothing but this rank's part.
    """
    pid = next(record["pid"] for record in job.records("start") if record["rank"] == rank)
    _freeze(pid)
    if rank in job.voters(attempt) or attempt not in job.attempts():
        os.kill(pid, signal.SIGCONT)
        return None
    try:
        _wait_until(lambda: len(job.voters(attempt)) == RANKS - 1)
        return Kill(job.complete_tags()[-1], len(job.voters(attempt)))
    finally:
        os.kill(pid, signal.SIGKILL)


def _wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def _freeze(pid: int) -> None:
    """Stop a process, and return once it stands still (in Linux's /proc: state T), or has ended (Z, X)."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
        time.sleep(0.0002)


def step_of(tag: str) -> int:
    return int(tag.removeprefix("step_"))
