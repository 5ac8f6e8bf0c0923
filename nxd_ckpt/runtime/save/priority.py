"""Threads that give way to the training they run beside, where threads have their own priority (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading

_NICENESS = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_THIS_THREAD = 1, 0  # IOPRIO_WHO_PROCESS, and of those the calling one
_BEST_EFFORT_LOWEST = 2 << 13 | 7  # class and level; the idle class could wait for ever


def yield_disk_to_others() -> None:
    """Lower the calling thread's priority for the disk."""
    call = _IOPRIO_SET.get(platform.machine()) if platform.system() == "Linux" else None
    if call is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(call, *_THIS_THREAD, _BEST_EFFORT_LOWEST)


def yield_processor_to_others() -> None:
    """Lower the calling thread's priority for the processor.

    Not for a thread that runs Python for long: preempted, it would still hold the interpreter.
    """
    if platform.system() == "Linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
