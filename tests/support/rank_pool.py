"""A pool of ranks: processes that join one process group once, and then run many scenarios.

::

    with RankPool(nproc=4, xla=True) as pool:
        results = pool.run(train_two_steps, "/tmp/ckpt")    # train_two_steps(rank, "/tmp/ckpt") on every rank

With ``xla=True`` the ranks are an emulated CPU-XLA world with ``init_process_group("xla")``, else plain CPU
torch with ``init_process_group("gloo")``. Functions are module-level; they are sent as file and name, their
arguments and results pickled (tensors on the CPU).
"""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from nxd_ckpt.emulation.launcher import free_ports, rank_environment
from tests.support.processes import FORKED
from tests.support.rank_worker import work

_POLL_SECONDS = 0.1
_LOG_TAIL_BYTES = 4000


class WorkerError(Exception):
    """A function failed on a rank.

    ``rank`` says where, ``traceback`` is its text (empty for a rank that died),
    ``cause`` is the exception itself where it can be pickled, else None.
    """

    def __init__(self, message: str, rank: int, traceback: str = "", cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.cause = cause


class WorkerDied(WorkerError):
    """The rank's process ended in the middle of a run."""


class WorkerTimeout(WorkerError):
    """The rank did not finish in time; the traceback holds the stacks of its threads. It was killed."""


@dataclass
class _Worker:
    process: ForkServerProcess
    channel: Connection
    busy: bool = False


class RankPool:
    """``nproc`` ranks, from construction to :meth:`close`.

    ``xla`` says that they are an emulated CPU-XLA world (needs torch-xla), else plain CPU torch and gloo; ``env`` has
    further environment variables.
    """

    def __init__(self, nproc: int, xla: bool = False, *, env: dict[str, str] | None = None) -> None:
        self.nproc = nproc
        self.xla = xla
        self._env = dict(env or {})
        self._logs = Path(tempfile.mkdtemp(prefix="nxd_ckpt_workers_"))
        self._call_ids = itertools.count()
        self._workers: list[_Worker] = []
        try:
            self._start_workers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """``fn(rank, *args)`` on every rank; results by rank. As ``start(fn, *args).result(**options)``."""
        return self.start(fn, *args).result(**options)

    def start(self, fn: Callable[..., Any], *args: Any) -> RankCall:
        """Start ``fn(rank, *args)`` on every rank and return at once: on new ranks, where an earlier run left some dead
        or hanging."""
        if not all(worker.process.is_alive() and not worker.busy for worker in self._workers):
            self._end_workers()
            self._start_workers()
        call_id = next(self._call_ids)
        message = (call_id, list(sys.path), _address(fn), pickle.dumps(args))
        for worker in self._workers:
            worker.busy = True
            worker.channel.send(message)
        return RankCall(self, call_id, getattr(fn, "__qualname__", repr(fn)))

    def close(self) -> None:
        """End all ranks. Safe to call again."""
        self._end_workers()
        shutil.rmtree(self._logs, ignore_errors=True)

    def log(self, rank: int) -> str:
        """The last 4 kB that the rank printed since it started, on stdout and stderr."""
        path = self._log_path(rank)
        return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace") if path.exists() else ""

    def _start_workers(self) -> None:
        ports = free_ports()
        self._workers = [self._spawn(rank, ports) for rank in range(self.nproc)]
        call_id = next(self._call_ids)
        for worker in self._workers:
            worker.busy = True
            worker.channel.send((call_id, list(sys.path), (__file__, __name__, "_join"), pickle.dumps((self.xla,))))
        RankCall(self, call_id, "joining the process group").result()

    def _spawn(self, rank: int, ports: tuple[int, int]) -> _Worker:
        environment = rank_environment(rank, self.nproc, ports) | self._env
        channel, far_end = FORKED.Pipe()
        files = (self._log_path(rank), self._stacks_path(rank))
        process = FORKED.Process(target=work, args=(far_end, rank, environment, *files))
        with far_end:
            process.start()
        return _Worker(process, channel)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.channel.close()
        self._workers = []

    def _log_path(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.log"

    def _stacks_path(self, rank: int) -> Path:
        return self._logs / f"rank_{rank}.stacks"


class RankCall:
    """One call in progress on every rank of a pool. Its methods are for one thread."""

    def __init__(self, pool: RankPool, call_id: int, name: str) -> None:
        self._pool = pool
        self._workers = list(pool._workers)  # a restart replaces the pool's
        self._call_id = call_id
        self._name = name
        self._outcomes: dict[int, Any] = {}

    def result(self, timeout: float = 600.0, grace: float = 10.0, return_errors: bool = False) -> list[Any]:
        """Results by rank, waiting up to ``timeout`` seconds for all ranks.

        With ``return_errors=True`` a failed rank's entry is its :class:`WorkerError`. Otherwise the first
        failure is raised: ranks that still run then, perhaps waiting for the failed one, get ``grace``
        seconds to end, and what they reported is in the message.
        """
        deadline = time.monotonic() + timeout
        grace_given = return_errors
        while self._missing() and (left := deadline - time.monotonic()) > 0:
            self._collect(min(left, _POLL_SECONDS))
            if not grace_given and any(isinstance(outcome, WorkerError) for outcome in self._outcomes.values()):
                deadline = min(deadline, time.monotonic() + grace)
                grace_given = True
        if hung := self._missing():
            self._give_up(hung)
        errors = [outcome for outcome in self._outcomes.values() if isinstance(outcome, WorkerError)]
        if errors and not return_errors:
            raise _first_cause(errors)
        return [self._outcomes[rank] for rank in range(len(self._workers))]

    def _missing(self) -> list[int]:
        return [rank for rank in range(len(self._workers)) if rank not in self._outcomes]

    def _collect(self, seconds: float) -> None:
        """Take in what ranks reported within ``seconds``, and notice those that died."""
        missing = self._missing()
        # Before the channels are read: what a rank sent before it died still counts.
        dead = [rank for rank in missing if not self._workers[rank].process.is_alive()]
        channels = {self._workers[rank].channel: rank for rank in missing}
        readable = wait([channel for channel in channels if not channel.closed], 0 if dead else seconds)
        for channel, rank in channels.items():
            if channel in readable and (outcome := self._receive(channel, rank)) is not None:
                self._outcomes[rank] = outcome[0]
                self._workers[rank].busy = False
        for rank in dead:
            if rank not in self._outcomes:
                code = self._workers[rank].process.exitcode or 0
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                self._outcomes[rank] = WorkerDied(self._message(rank, f"the process ended {how}"), rank)

    def _receive(self, channel: Connection, rank: int) -> tuple[Any] | None:
        try:
            call_id, succeeded, payload = channel.recv()
        except (EOFError, OSError):
            return None  # the process is ending, and is seen to be dead next
        if call_id != self._call_id:
            return None  # the late answer of a run that was abandoned
        if succeeded:
            return (pickle.loads(payload),)
        summary, traceback, pickled = payload
        cause = pickle.loads(pickled) if pickled else None
        return (WorkerError(f"rank {rank}, {self._name}: {summary}\n{traceback}", rank, traceback, cause),)

    def _give_up(self, hung: Sequence[int]) -> None:
        """Kill the ranks that did not end; their stacks become their outcome."""
        for rank in hung:
            os.kill(self._workers[rank].process.pid or 0, signal.SIGUSR1)  # faulthandler writes the stacks
        for rank in hung:
            stacks = _written(self._pool._stacks_path(rank))
            self._workers[rank].process.kill()
            self._workers[rank].process.join()
            message = self._message(rank, f"did not finish in time, and was killed here:\n{stacks}")
            self._outcomes[rank] = WorkerTimeout(message, rank, stacks)

    def _message(self, rank: int, what: str) -> str:
        log = self._pool.log(rank)
        return f"rank {rank}, {self._name}: {what}" + (f"\nits output ended:\n{log}" if log else "")


def _first_cause(errors: Sequence[WorkerError]) -> WorkerError:
    """One error for all, given in order of arrival: a death goes first, a hang last."""
    cause, *others = sorted(errors, key=lambda error: _CAUSE_ORDER.index(type(error)))
    message = "\n\n".join([str(cause), *(f"also: {other}" for other in others)])
    return type(cause)(message, cause.rank, cause.traceback, cause.cause)


_CAUSE_ORDER = (WorkerDied, WorkerError, WorkerTimeout)


def _written(path: Path) -> str:
    """What another process writes to the file, once no more comes; nothing after half a minute without any."""
    text, deadline = "", time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.2)
        before, text = text, path.read_text(errors="replace") if path.exists() else ""
        if text and text == before:
            break
    return text


def _address(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """File, module name and qualified name, by which a worker finds ``fn``."""
    name = getattr(fn, "__qualname__", "")
    module = sys.modules.get(getattr(fn, "__module__", ""))
    file = getattr(module, "__file__", None)
    if file is None or not name or "<" in name:
        raise ValueError(f"{fn!r} cannot be sent to workers: pass a function defined at the top level of a file")
    return os.path.abspath(file), str(fn.__module__), name


def _join(rank: int, xla: bool) -> None:
    """The first thing that a worker runs: join the process group of the pool."""
    if xla:
        from nxd_ckpt.emulation.install import install

        install()
    import torch.distributed

    torch.distributed.init_process_group("xla" if xla else "gloo")
    if xla:
        torch.distributed.barrier()
