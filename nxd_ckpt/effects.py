"""System effects of a job: time, threads, their priority, randomness, the process's identity, and the log.

The folders from ``coordination`` to ``load``, ``storage.s3`` and the ``Checkpointer`` ask for them here, as
``effects.sleep(1)``, so that a simulation can replace them (``tests/simulation/world``). Two places do not, and are not
simulated: ``coordination/peers.py``, which watches the system's connections, and the pool of ``tag/side_by_side.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import threading
from _thread import start_new_thread
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from random import uniform
from threading import (
    Condition,
    Event,
    Lock,
    Semaphore,
    Thread,
    current_thread,
    get_ident,
    get_native_id,
    local,
    main_thread,
)
from time import monotonic, monotonic_ns, sleep, time
from typing import TypeVar

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.surroundings import collect_in_child

__all__ = [
    "Condition",
    "Event",
    "Lock",
    "Semaphore",
    "SimpleQueue",
    "Thread",
    "born",
    "current_thread",
    "get_ident",
    "in_forked_children",
    "local",
    "logger",
    "monotonic",
    "monotonic_ns",
    "pid",
    "processes",
    "sleep",
    "start_new_thread",
    "time",
    "uniform",
    "yield_disk_to_others",
    "yield_processor_to_others",
]

logger: logging.Logger = logging.getLogger("nxd_ckpt")
"""The logger of all modules, so that users set its level by one name."""

ResultT = TypeVar("ResultT")

pid: Callable[[], int] = os.getpid

_NICENESS = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_THIS_THREAD = 1, 0  # IOPRIO_WHO_PROCESS, and of those the calling one
_BEST_EFFORT_LOWEST = 2 << 13 | 7  # class and level; the idle class could wait for ever


def yield_disk_to_others() -> None:
    """Lower the calling thread's disk priority, where threads have their own (Linux)."""
    call = _IOPRIO_SET.get(platform.machine()) if platform.system() == "Linux" else None
    if call is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(call, *_THIS_THREAD, _BEST_EFFORT_LOWEST)


def yield_processor_to_others() -> None:
    """Lower the calling thread's processor priority, where threads have their own (Linux).

    Not for a thread that runs Python for long: preempted, it would still hold the interpreter.
    """
    if platform.system() == "Linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICENESS)


def in_forked_children(call: Callable[[], object]) -> None:
    """Have every child that is forked from now on call it first, where a system forks at all."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def has_started(thread: Thread) -> bool:
    """Start the thread; return False if the interpreter is exiting, which starts none from Python 3.12 on.

    Raises RuntimeError if the system gives no more.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if "interpreter shutdown" not in str(error):
            raise
        return False
    return True


def before_exit_handlers(call: Callable[[], object]) -> None:
    """Have it called once the main thread's work is done; not at all if the interpreter has come that far."""
    with contextlib.suppress(RuntimeError):
        threading._register_atexit(call)  # type: ignore[attr-defined]


def is_exiting() -> bool:
    """Return whether the interpreter has come to its exit handlers."""
    return not main_thread().is_alive()


def processes() -> str:
    """Return this machine's boot and process namespace: pids have a meaning only within it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = ""
        namespace = ""
    return f"{platform.node()}/{boot}/{namespace}"


def born(pid: int) -> str | None:
    """Return the process's start time (clock ticks since boot, from /proc), or None if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Field 3 (state) follows the command: a zombie no longer runs. Field 22 is the start time.
    return None if fields[0] in "ZX" else fields[19]


in_forked_children(collect_in_child)


def side_by_side(*calls: Callable[[], ResultT]) -> list[ResultT]:
    """Run the calls at the same time, and return their results when all have ended; raise the first one's error.

    For calls that wait for a disk: what it syncs together takes it no longer than one sync. Where no thread can be
    started (an exiting interpreter starts none), they run one after the other.
    """
    results: dict[int, ResultT] = {}
    errors: dict[int, BaseException] = {}

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors[number] = error

    threads = [Thread(target=run, args=(number,), name="nxd_ckpt-sync", daemon=True) for number in range(1, len(calls))]
    for number, thread in enumerate(threads, start=1):
        try:
            thread.start()
        except RuntimeError:
            run(number)
    if calls:
        run(0)
    for thread in threads:
        if thread.is_alive():
            thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(calls))]


def require_own(pid: int, what: str) -> None:
    """Raise CheckpointError unless this is the process ``pid``, which made ``what``."""
    if os.getpid() != pid:
        raise CheckpointError(
            f"{what}: process {os.getpid()} was forked from process {pid}, which made this Checkpointer and keeps its "
            "threads, lease and staging memory; make a Checkpointer here, for another directory if this one is in use"
        )
