"""The self-test on a user's own hardware: its checks, the page and report made of their results, and its ranks.

Nothing here runs a check: the ranks that are started run `nxd_ckpt.testing.selftest`.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nxd_ckpt.core.units import size
from nxd_ckpt.errors import InvalidArgument, StorageError
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.fsspec_storage import without_password
from nxd_ckpt.storage.urls import StorageOptions, absolute, is_url, join, open_storage

CHECKS = {
    "versions": "versions and device",
    "transfers": "pinned memory, events, copies that do not block",
    "dtypes": "every dtype, bit for bit",
    "fsdp2": "FSDP2: saved, resumed, loaded on the CPU",
    "tp": "tensor parallel: saved, resumed, loaded on the CPU",
    "simple_fsdp": "SimpleFSDP: saved, resumed, loaded on the CPU",
    "zero1": "ZeRO-1: saved, resumed, loaded on the CPU",
    "xser": "ZeRO-1 in xser files: the same",
    "kill": "killed in the middle of a save, resumed",
    "compilations": "saving and loading compile nothing",
    "storage": "promises of the storage",
    "speed": "stall and speed",
}
"""All checks, in the order in which they run and are shown, with the words that the page has for them."""

UNUSABLE = 2
"""Exit code of a rank that has noted why nothing can be tested."""
_PROGRAM = "nxd_ckpt.testing.selftest"
"""Run by each rank. It is no import: that package is above this one."""
_GRACE = 30.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
_SETTINGS = re.compile(
    r"(NEURON|XLA|PJRT|TORCH|NCCL|GLOO|FI|OMP|CUDA|NXD_CKPT|MASTER|LOCAL|WORLD|PYTHON)(_\w+|HASHSEED)?"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|SIGN", re.IGNORECASE)


def checks_for(device: str) -> list[str]:
    """Return the names of the checks that apply to a type of device."""
    others = ("fsdp2", "tp", "simple_fsdp") if device == "xla" else ("zero1", "xser")
    return [name for name in CHECKS if name not in others]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: its name, "ok", "failed" or "not possible here", a sentence, and what was measured."""

    name: str
    outcome: str
    detail: str
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""


def merged(results: Sequence[CheckResult]) -> CheckResult:
    """Return the result of a check from that of each rank, in their order: the first failure, else that of rank 0.

    A failure without a traceback is only that another rank has failed.
    """
    failed = [(rank, result) for rank, result in enumerate(results) if result.outcome == "failed"]
    if not failed:
        return results[0]
    rank, first = next((pair for pair in failed if pair[1].traceback), failed[0])
    return replace(first, detail=f"rank {rank}: {first.detail}")


def page_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Return the page as lines of at most 80 columns, except words that are longer."""
    wrapped = partial(textwrap.wrap, width=80, break_long_words=False, break_on_hyphens=False)
    results = document["results"]
    failed = sum(result["outcome"] == "failed" for result in results)
    verdict = f"{failed} of {len(results)} checks failed" if failed else "ok"
    head = f"{document['device']}, {document['ranks']} ranks: {verdict} ({document['seconds']:.0f} s)"
    yield from wrapped(f"{document['directory']} on {head}", subsequent_indent="  ")
    for result in results:
        mark = {"ok": "ok", "failed": "FAILED"}.get(result["outcome"], "-")
        possible = "not possible here: " if mark == "-" else ""
        words = f"{CHECKS[result['name']]}: {possible}{result['detail']}"
        yield from wrapped(words, initial_indent=f"  {mark:8}", subsequent_indent=" " * 12)


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how torch, XLA and Neuron run.

    A value that may be secret is left out by name, and so is what stands between "://" and "@" in one.
    """
    return {
        name: "(not shown)" if _SECRET.search(name) else re.sub(r"://[^/@\s]*@", "://", value)
        for name, value in sorted(environment.items())
        if _SETTINGS.fullmatch(name)
    }


def run_selftest(
    directory: str,
    *,
    device: str | None,
    ranks: int,
    nbytes: int,
    storage_options: StorageOptions | None,
    timeout: float,
) -> dict[str, Any] | None:
    """Run all checks on a device and in a directory, and return the report, with ``ok`` if none failed.

    Ranks are started here, or, if torchrun has started this process, it is one of them; then all but rank 0 return
    None. All files are in a folder of ``directory`` of their own, which is removed at the end.

    Args:
        directory: an existing directory, or a URL.
        device: "neuron", "xla", "cuda", "cpu" or another device that torch knows; None: the one that it finds.
        ranks: number of ranks to start, 2 or more.
        nbytes: bytes that each rank saves to measure speed.
        storage_options: what the URL is opened with.
        timeout: seconds after which everything is ended, and what has not finished has failed.

    Raises:
        InvalidArgument: nothing can be tested: one rank, no such device, no such directory, too little space.
        StorageError: nothing can be written there.
    """
    ours = "RANK" not in os.environ
    world = ranks if ours else int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        raise InvalidArgument(
            f"a self-test needs 2 ranks or more, found {world}: pass --ranks 2, or start more with torchrun"
        )
    if device == "xla" and find_spec("torch_xla") is None:
        raise InvalidArgument("device xla: torch_xla cannot be imported; it is not installed for this Python")
    place = absolute(directory)
    storage = open_storage(place, storage_options=storage_options)
    _require_space(place, 6 * world * nbytes + 16 * 2**20)
    begun = time.monotonic()
    with _folder(storage, ours) as folder, tempfile.TemporaryDirectory(prefix="nxd-ckpt-selftest-") as local:
        plan: dict[str, Any] = {
            "place": join(place, folder),
            "storage_options": dict(storage_options or {}),
            "device": device,
        }
        plan |= {"nbytes": nbytes, "emulated": device == "xla" and find_spec("libneuronxla") is None}
        run = _Run(Path(local), plan, list(range(world)) if ours else [int(os.environ["RANK"])], world, ours)
        died = run.job("killed", begun + timeout / 2)
        detail = next((note["detail"] for note in run.notes("killed") if "detail" in note), None)
        run.plan["killed"] = (detail, f"{died}; {run.last_line('killed')}")
        ended = run.job("checks", begun + timeout)
        if run.ranks[0] != 0:
            return None
        return run.report(ended) | {"directory": without_password(place), "seconds": time.monotonic() - begun}


@dataclass
class _Run:
    """The two jobs of a self-test: one of which a rank is killed, and the checks. ``ranks`` are started here."""

    local: Path
    plan: dict[str, Any]
    ranks: list[int]
    world: int
    ours: bool

    def job(self, name: str, deadline: float) -> str:
        """Run one job to its end, and return how its ranks ended, in words."""
        where = self._meeting_point(name)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in self.ranks:
                processes.append(self._started(name, rank, where))
            ended = self._ended(processes, deadline, {None, 0, -signal.SIGKILL if name == "killed" else 0})
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()
        for note in self.notes(name):
            if "unusable" in note:
                raise InvalidArgument(note["unusable"])
        return ended

    def _meeting_point(self, name: str) -> dict[str, str]:
        """Return the variables that tell all ranks of a job where they meet: each job has a store of its own."""
        if not self.ours:
            port = int(os.environ.get("MASTER_PORT", "29500")) + (1 if name == "killed" else 2)
            return {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        world = {"WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.world)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        world |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return world | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})  # its own name may not resolve

    def _started(self, name: str, rank: int, where: dict[str, str]) -> subprocess.Popen[bytes]:
        path = self.local / f"{name}-{rank}.plan"  # not an argument: options of the storage may be secret
        path.write_text(json.dumps(self.plan | {"job": name, "notes": str(self.local / f"{name}-{rank}.notes")}))
        path_of_imports = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
        environment = os.environ | where | {"PYTHONPATH": os.pathsep.join(path_of_imports)}
        if self.ours:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return _spawned(path, environment, self.local / f"{name}-{rank}.log")

    def _ended(self, processes: Sequence[subprocess.Popen[bytes]], deadline: float, expected: set[int | None]) -> str:
        """Wait until all have ended. After an exit code that is not ``expected``, the others have a little time."""
        while None in (codes := [process.poll() for process in processes]):
            if time.monotonic() > deadline or UNUSABLE in codes:
                break
            if set(codes) - expected:
                deadline = min(deadline, time.monotonic() + _GRACE)
                expected = {*codes, *expected, *range(-64, 256)}
            time.sleep(0.05)
        words = ("did not end" if code is None else f"ended with code {code}" for code in codes)
        return ", ".join(f"rank {rank} {ended}" for rank, ended in zip(self.ranks, words, strict=True))

    def notes(self, name: str) -> Iterator[dict[str, Any]]:
        """Return what the ranks of this host have noted in a job, by rank."""
        for rank in self.ranks:
            with suppress(FileNotFoundError):
                yield from map(json.loads, (self.local / f"{name}-{rank}.notes").read_text().splitlines())

    def report(self, ended: str) -> dict[str, Any]:
        """Return all results. A check without one, and a job that did not end as it should, have failed."""
        notes = list(self.notes("checks"))
        device = next((note["device"] for note in notes if "device" in note), str(self.plan["device"]))
        by_name = {note["name"]: note for note in notes if "outcome" in note}
        why = f"it did not come to an end: {self.last_line('checks') or ended}"
        results = [by_name.get(each, asdict(CheckResult(each, "failed", why))) for each in checks_for(device)]
        well = all(result["outcome"] != "failed" for result in results)
        report = {"ok": well, "device": device, "ranks": self.world, "results": results}
        return report | {"environment": safe_environment(os.environ), "logs": {} if well else self.logs("*")}

    def logs(self, name: str) -> dict[str, str]:
        """Return the end of what each rank of a job on this host has printed."""
        printed = {path.stem: path.read_bytes()[-4000:] for path in sorted(self.local.glob(f"{name}-*.log"))}
        return {stem: text.decode(errors="replace") for stem, text in printed.items()}

    def last_line(self, name: str) -> str:
        """Return the last line that a rank of a job has printed, which names the error that ended it."""
        return "\n".join(self.logs(name).values()).rstrip().rpartition("\n")[2]


def _spawned(plan: Path, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a rank. Its stdin is a pipe that closes when this process ends, however it ends; then the rank ends too."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(plan)],
            env=environment,
            cwd=plan.parent,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a terminal's Ctrl-C comes here alone
        )


def _require_space(place: str, needed: int) -> None:
    """Refuse a directory that is not there, and a disk that the files of the self-test would fill."""
    if is_url(place):
        return
    if not os.path.isdir(place):
        raise InvalidArgument(f"{place}: no such directory; a self-test makes none, as a mount may be missing there")
    disk = shutil.disk_usage(place)
    if needed > disk.free and disk.total:  # some mounts do not say how large they are
        raise InvalidArgument(
            f"{place}: a self-test needs {size(needed)}, {size(disk.free)} are free there; --size measures with less"
        )


@contextmanager
def _folder(storage: Storage, ours: bool) -> Iterator[str]:
    """The folder of a self-test, which goes when it ends, by Ctrl-C and SIGTERM too."""
    name = f"selftest-{uuid.uuid4().hex[:8]}"
    if not ours:  # all ranks find the same
        launch = f"{os.environ.get('MASTER_PORT', '')}-{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}"
        name = "selftest-" + re.sub(r"[^\w.-]", "_", launch)
    leads = ours or os.environ["RANK"] == "0"
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if leads:
            _require_writable(storage, name)
        yield name
    finally:
        signal.signal(signal.SIGTERM, before)
        if leads:
            with suppress(OSError):
                storage.remove(name)


def _require_writable(storage: Storage, name: str) -> None:
    try:
        storage.remove(name)  # of an earlier one, of the same torchrun, that was killed
        storage.make_dir(name)
        storage.write(f"{name}/first", b"1")
    except OSError as error:
        raise StorageError(
            f"{without_password(storage.url)}: nothing can be written there, so that nothing can be tested: "
            f"{error.strerror or error}"
        ) from None


def _free_port() -> int:
    """Return a port that systems give to no connection by themselves: ranks take seconds until they listen there."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as unused, suppress(OSError):
            unused.bind(("127.0.0.1", port))
            return port
