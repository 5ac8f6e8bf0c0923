"""The self-test on a user's own hardware: its checks, their results, the page and report made of them, and its ranks.

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nxd_ckpt.core.units import size
from nxd_ckpt.errors import InvalidArgument, StorageError
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.fsspec_storage import without_password
from nxd_ckpt.storage.urls import StorageOptions, is_url, join, local_path, open_storage

__all__ = ["CHECKS", "Check", "CheckResult", "SelfTest", "checks_for", "merged", "page_lines", "safe_environment"]

Outcome = Literal["ok", "failed", "not possible here"]

WIDTH = 80
"""Columns of the page."""


class Check(NamedTuple):
    """One check: its name, the words that the page has for it, and where it applies ("torch" is all but torch-xla)."""

    name: str
    title: str
    stack: Literal["any", "torch", "xla"] = "any"


CHECKS = (
    Check("versions", "versions and device"),
    Check("transfers", "pinned memory, events, copies that do not block"),
    Check("dtypes", "every dtype, bit for bit"),
    Check("fsdp2", "FSDP2: saved, resumed, loaded on the CPU", "torch"),
    Check("tp", "tensor parallel: saved, resumed, loaded on the CPU", "torch"),
    Check("simple_fsdp", "SimpleFSDP: saved, resumed, loaded on the CPU", "torch"),
    Check("zero1", "ZeRO-1: saved, resumed, loaded on the CPU", "xla"),
    Check("xser", "ZeRO-1 in xser files: the same", "xla"),
    Check("kill", "killed in the middle of a save, resumed"),
    Check("compilations", "saving and loading compile nothing"),
    Check("storage", "promises of the storage"),
    Check("speed", "stall and speed"),
)
"""All checks, in the order in which they run and are shown."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: that of the check.
        outcome: how it ended.
        detail: a sentence about it: numbers, the reason, or the error.
        seconds: how long it took.
        facts: what was measured, as plain data.
        traceback: where the error came from; empty if there was none.
    """

    name: str
    outcome: Outcome
    detail: str
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""


@dataclass(frozen=True)
class SelfTest:
    """A finished self-test. True if no check failed.

    Attributes:
        directory: the directory or URL that was tested, without a password.
        device: the type of device, such as "neuron".
        ranks: the number of ranks.
        results: one for each check that applies to this device.
        seconds: how long it took.
        environment: settings that say how torch and Neuron run.
        logs: the end of what each rank of this host printed, if a check failed.
    """

    directory: str
    device: str
    ranks: int
    results: tuple[CheckResult, ...]
    seconds: float
    environment: Mapping[str, str]
    logs: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return all(result.outcome != "failed" for result in self.results)

    def document(self) -> dict[str, Any]:
        """Return all of it as plain data: what --json prints, and what the report holds."""
        return {"ok": bool(self), **asdict(self)}


def checks_for(device: str) -> tuple[Check, ...]:
    """Return the checks that apply to a type of device."""
    stack = "xla" if device == "xla" else "torch"
    return tuple(check for check in CHECKS if check.stack in ("any", stack))


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
    results = document["results"]
    failed = sum(result["outcome"] == "failed" for result in results)
    verdict = f"{failed} of {len(results)} checks failed" if failed else "ok"
    head = f"{document['device']}, {document['ranks']} ranks: {verdict} ({document['seconds']:.0f} s)"
    yield from _wrapped(f"{document['directory']} on {head}", "", "  ")
    titles = {check.name: check.title for check in CHECKS}
    marks = {"ok": "ok", "failed": "FAILED", "not possible here": "-"}
    for result in results:
        indent = "  " + marks[result["outcome"]].ljust(8)
        possible = "" if result["outcome"] != "not possible here" else "not possible here: "
        yield from _wrapped(f"{titles[result['name']]}: {possible}{result['detail']}", indent, " " * 12)


def _wrapped(words: str, first: str, below: str) -> list[str]:
    return textwrap.wrap(
        words, WIDTH, initial_indent=first, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )


_SETTINGS = re.compile(
    r"(NEURON|XLA|PJRT|TORCH|NCCL|GLOO|FI|OMP|CUDA|NXD_CKPT|MASTER|LOCAL|WORLD|PYTHON)(_\w+|HASHSEED)?"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|SIGN", re.IGNORECASE)


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how torch, XLA and Neuron run.

    A value that may be secret is left out by name, and so is what stands between "://" and "@" in one.
    """
    return {
        name: "(not shown)" if _SECRET.search(name) else re.sub(r"://[^/@\s]*@", "://", value)
        for name, value in sorted(environment.items())
        if _SETTINGS.fullmatch(name)
    }


_PROGRAM = "nxd_ckpt.testing.selftest"
"""Run by each rank. It is no import: that package is above this one."""

UNUSABLE = 2
"""Exit code of a rank that has noted why nothing can be tested."""

_POLL_SECONDS = 0.05
_GRACE = 30.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
_LOG_BYTES = 4000
_TIMES = 6
"""At most so many times the measured bytes of all ranks are on the disk at once."""
_SMALL = 16 * 2**20
"""Bytes: more than all that is not measured takes."""


def run_selftest(
    directory: str,
    *,
    device: str | None,
    ranks: int,
    nbytes: int,
    storage_options: StorageOptions | None,
    timeout: float,
) -> SelfTest | None:
    """Run all checks on a device and in a directory, and return their results.

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
    size_of_world = ranks if ours else int(os.environ.get("WORLD_SIZE", "1"))
    if size_of_world < 2:
        raise InvalidArgument(
            f"a self-test needs 2 ranks or more, found {size_of_world}: pass --ranks 2, or start more with torchrun"
        )
    if device == "xla" and find_spec("torch_xla") is None:
        raise InvalidArgument("device xla: torch_xla cannot be imported; it is not installed for this Python")
    place = directory if is_url(directory) else os.path.abspath(local_path(directory))
    storage = open_storage(place, storage_options=storage_options)
    _require_space(place, size_of_world * nbytes)
    started = time.monotonic()
    with _folder(storage, ours) as folder, tempfile.TemporaryDirectory(prefix="nxd-ckpt-selftest-") as local:
        plan = {
            "place": join(place, folder),
            "storage_options": dict(storage_options or {}),
            "device": device,
            "nbytes": nbytes,
            "emulated": device == "xla" and find_spec("libneuronxla") is None,
        }
        run = _Run(Path(local), plan, ours, size_of_world, started + timeout)
        died = run.job("killed")
        message = next((note["detail"] for note in run.notes("killed") if "detail" in note), None)
        run.plan["killed"] = {"told": message, "ended": died, "why": _last_line(run.logs("killed"))}
        ended = run.job("checks")
        if not ours and os.environ["RANK"] != "0":
            return None
        return run.finished(without_password(place), ended)


@dataclass
class _Run:
    """The two jobs of a self-test: one of which a rank is killed, and the checks."""

    local: Path
    plan: dict[str, Any]
    ours: bool
    size: int
    deadline: float
    started: float = field(default_factory=time.monotonic)

    @property
    def ranks(self) -> list[int]:
        """The ranks that this process starts."""
        return list(range(self.size)) if self.ours else [int(os.environ["RANK"])]

    def job(self, name: str) -> str:
        """Run one job to its end, and return how its ranks ended, in words."""
        port = _free_port() if self.ours else 0
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in self.ranks:
                with _deferred_signals():
                    processes.append(self._start(name, rank, port))
            left = self.deadline - time.monotonic()
            deadline = time.monotonic() + (left / 2 if name == "killed" else left)
            ended = _watched(
                processes, self.ranks, deadline, expected={None, 0, -signal.SIGKILL if name == "killed" else 0}
            )
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

    def _start(self, name: str, rank: int, port: int) -> subprocess.Popen[bytes]:
        plan = self.plan | {"job": name, "notes": str(self.local / f"{name}-{rank}.notes")}
        path = self.local / f"{name}-{rank}.plan"
        path.write_text(json.dumps(plan))  # not an argument: options of the storage may be secret
        root = str(Path(__file__).parents[2])
        environment = os.environ | _coordinates(name, rank, self.size, port, self.ours)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        return _spawned(path, environment, self.local / f"{name}-{rank}.log")

    def notes(self, name: str) -> Iterator[dict[str, Any]]:
        """Return what the ranks of this host have noted in a job, by rank."""
        for rank in self.ranks:
            with suppress(FileNotFoundError):
                yield from map(json.loads, (self.local / f"{name}-{rank}.notes").read_text().splitlines())

    def logs(self, name: str = "") -> dict[str, str]:
        """Return the end of what the ranks of a job on this host have printed; by default of both jobs."""
        printed = {path.stem: path.read_bytes() for path in sorted(self.local.glob(f"{name}*.log"))}
        return {stem: text[-_LOG_BYTES:].decode(errors="replace") for stem, text in printed.items()}

    def finished(self, place: str, ended: str) -> SelfTest:
        """Return all results. A check without one, and a job that did not end as it should, have failed."""
        notes = list(self.notes("checks"))
        device = next((note["device"] for note in notes if "device" in note), str(self.plan["device"]))
        results_by_name = {note["name"]: CheckResult(**note) for note in notes if "outcome" in note}
        why = _last_line(self.logs("checks")) or ended
        results = tuple(
            results_by_name.get(check.name, CheckResult(check.name, "failed", f"it did not come to an end: {why}"))
            for check in checks_for(device)
        )
        seconds = time.monotonic() - self.started
        test = SelfTest(place, device, self.size, results, seconds, safe_environment(os.environ))
        return test if test else replace(test, logs=self.logs())


def _spawned(plan: Path, environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a rank. Its stdin is a pipe that closes when this process ends, however it ends."""
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


def _coordinates(job: str, rank: int, size: int, port: int, ours: bool) -> dict[str, str]:
    """Return the variables that tell a rank where it is.

    Variables of torchrun stay, except the meeting point: each job has one of its own.
    """
    number = ("killed", "checks").index(job)
    if ours:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        } | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})  # the host's own name may not resolve
    # Not in torchrun's own store: addresses of the job that has lost a rank are still in it.
    port_of_job = int(os.environ.get("MASTER_PORT", "29500")) + 1 + number
    return {"MASTER_PORT": str(port_of_job), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def _watched(
    processes: Sequence[subprocess.Popen[bytes]], ranks: Sequence[int], deadline: float, expected: set[int | None]
) -> str:
    """Wait until all have ended. After an exit code that is not ``expected``, the others have a little time."""
    grace = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if now > deadline:
            return "its time was over"
        codes = {process.poll() for process in processes}
        if UNUSABLE in codes:
            break
        if codes - expected:
            grace = grace or now + _GRACE
            if now > grace:
                break
        time.sleep(_POLL_SECONDS)
    ended = [(rank, process.poll()) for rank, process in zip(ranks, processes, strict=True)]
    return ", ".join(f"rank {rank} {_ending(code)}" for rank, code in ended)


def _ending(code: int | None) -> str:
    if code is None:
        return "did not end"
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _require_space(place: str, nbytes: int) -> None:
    """Refuse a directory that is not there, and a disk that the files of the self-test would fill."""
    if is_url(place):
        return
    if not os.path.isdir(place):
        raise InvalidArgument(f"{place}: no such directory; a self-test makes none, as a mount may be missing there")
    needed, disk = _TIMES * nbytes + _SMALL, shutil.disk_usage(place)
    if needed > disk.free and disk.total:  # some mounts do not say how large they are
        raise InvalidArgument(
            f"{place}: a self-test needs {size(needed)}, {size(disk.free)} are free there; --size measures with less"
        )


@contextmanager
def _folder(storage: Storage, ours: bool) -> Iterator[str]:
    """The folder of a self-test, which goes when it ends, by Ctrl-C and SIGTERM too."""
    if ours:
        name = f"selftest-{uuid.uuid4().hex[:8]}"
    else:  # all ranks find the same
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


@contextmanager
def _deferred_signals() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM wait: a process that has been started is known to the code that ends it."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda arrived, _: came.append(arrived)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for arrived in came:
            signal.raise_signal(arrived)


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


def _last_line(logs: Mapping[str, str]) -> str:
    """Return the last line that a rank has printed, which names the error that ended it."""
    lines = [line for log in logs.values() for line in log.splitlines() if line]
    return lines[-1] if lines else ""
