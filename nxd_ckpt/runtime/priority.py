"""Threads that give way: to the training they run beside, for the processor and for the disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading

_NICENESS = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_THIS_THREAD = 1  # IOPRIO_WHO_PROCESS with a thread's id, or 0 for the calling one
_BEST_EFFORT_LOWEST = 2 << 13 | 7  # class and level; the idle class could wait for ever


def yield_to_others() -> None:
    """Lower the priority of the calling thread, where the system lets a thread have its own (Linux)."""
    if platform.system() != "Linux":
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    call = _IOPRIO_SET.get(platform.machine())
    if call is not None:
        ctypes.CDLL(None).syscall(call, _THIS_THREAD, 0, _BEST_EFFORT_LOWEST)
