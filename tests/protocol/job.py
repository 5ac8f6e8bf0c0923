"""Jobs: ranks that are new processes, as a launcher starts them, and that may be killed. Each takes little to start."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from nxd_ckpt.emulation.launcher import free_ports
from tests.support.processes import FORKED

HANGS = 600.0
"""Seconds after which a rank counts as hanging: far more than a busy machine takes."""


class Died(Exception):
    """The outcome of a rank whose process ended before its function did."""


@dataclass
class Raised:
    """The outcome of a rank whose function raised."""

    error: BaseException


class Job:
    """``fn(rank, *args)`` on ``nproc`` ranks, started at once.

    ``group=True`` joins them in a gloo process group first. ``fn`` is module-level.
    """

    def __init__(self, nproc: int, fn: Callable[..., Any], *args: Any, group: bool = False) -> None:
        port = free_ports()[0] if group else None
        self._ranks = []
        for rank in range(nproc):
            ours, theirs = FORKED.Pipe(duplex=False)
            process = FORKED.Process(target=_run, args=(theirs, rank, nproc, port, fn, args), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def kill(self, rank: int) -> None:
        """SIGKILL, and wait until it is gone."""
        process, _ = self._ranks[rank]
        process.kill()
        process.join()

    def signal(self, rank: int, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid(rank), number)

    def pid(self, rank: int) -> int:
        process, _ = self._ranks[rank]
        assert process.pid is not None
        return process.pid

    def kill_all(self) -> None:
        for rank in range(len(self._ranks)):
            self.kill(rank)

    def alive(self, rank: int) -> bool:
        return self._ranks[rank][0].is_alive()

    def outcomes(self, timeout: float = HANGS) -> list[Any]:
        """What each rank returned, Raised with its exception, or Died.

        Raises TimeoutError, after killing all, if a rank hangs; its stacks are on stderr by then.
        """
        deadline = time.monotonic() + timeout
        try:
            return [self.outcome(rank, deadline - time.monotonic()) for rank in range(len(self._ranks))]
        finally:
            self.kill_all()

    def values(self, timeout: float = HANGS) -> list[Any]:
        """As :meth:`outcomes`, but raises the first exception."""
        found = self.outcomes(timeout)
        for outcome in found:
            if isinstance(outcome, Raised):
                raise outcome.error
            if isinstance(outcome, Died):
                raise outcome
        return found

    def outcome(self, rank: int, timeout: float = HANGS) -> Any:
        """The outcome of one rank; the others may go on."""
        process, connection = self._ranks[rank]
        if not wait([connection], max(timeout, 0.0)):
            raise TimeoutError(f"rank {rank} hangs")
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            process.join()
            return Died(f"rank {rank} ended with exit code {process.exitcode}")


def _run(
    connection: Connection, rank: int, nproc: int, port: int | None, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    faulthandler.dump_traceback_later(HANGS - 5)
    os.environ["LOCAL_WORLD_SIZE"] = str(nproc)
    try:
        if port is not None:
            import torch.distributed as dist

            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=nproc)
        outcome = fn(rank, *args)
    except Exception as error:
        outcome = Raised(error)
    connection.send_bytes(pickle.dumps(outcome))
    if port is not None and rank == 0:
        signal.pause()  # the group's store lives here, and others may still have an answer to fetch


def lead_a_group() -> None:
    """This rank may have children, as ranks of a launcher may, and one signal reaches all of them."""
    os.setpgid(0, 0)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def outcome_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def until(holds: Callable[[], bool]) -> None:
    """Return once it does. Raises TimeoutError where it never will."""
    deadline = time.monotonic() + HANGS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("what a test waits for does not come")
        time.sleep(0.01)
