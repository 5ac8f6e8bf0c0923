"""A signal that only sets a flag, while a flag of this process waits for it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from nxd_ckpt.coordination import worker_shield
from nxd_ckpt.errors import InvalidArgument


class SignalFlag:
    """A flag that is set once this process has got the signal."""

    def __init__(self, number: int) -> None:
        self.number, self.pid = number, os.getpid()
        self.is_set = False

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def install(self) -> None:
        """Replace the signal's handler. Raises InvalidArgument if this thread may not, or the signal has no handlers.

        """
        if self in _installed:
            return
        try:
            present: Any = signal.getsignal(self.number)
            signal.signal(self.number, present if isinstance(present, _Handler) else _Handler(present))
        except (ValueError, OSError) as error:
            raise InvalidArgument(
                f"preemption: the signal {self.number} cannot be handled here ({error}): make the Checkpointer on the "
                "main thread, or give a function that says whether to stop"
            ) from error
        _installed.append(self)
        worker_shield.keep(self.number)

    def remove(self) -> None:
        """Restore the previous handler, once no other flag waits.

        If our handler cannot be removed, it passes the signal on.
        """
        if self in _installed:
            _installed.remove(self)
            if self.pid == os.getpid():
                worker_shield.release(self.number)
        present: Any = signal.getsignal(self.number)
        if isinstance(present, _Handler) and not _waiting(self.number):
            with suppress(ValueError):  # not on the main thread: it stays
                signal.signal(self.number, present.before)


_installed: list[SignalFlag] = []
"""Flags of all signals. There is no lock: handlers read it, and every change of it is atomic."""


def _waiting(number: int) -> list[SignalFlag]:
    """Return this process's flags for the signal: in a forked child its parent's do not count."""
    return [flag for flag in list(_installed) if flag.number == number and flag.pid == os.getpid()]


class _Handler:
    """A handler that sets all waiting flags. ``before`` never changes and is none of ours: no two call each other."""

    def __init__(self, before: Any) -> None:
        self.before = signal.SIG_DFL if before is None else before  # None: it was not installed by Python

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Set the flags. Since it may interrupt anything, it takes no lock and logs nothing."""
        waiting = _waiting(number)
        for flag in waiting:
            flag.is_set = True
        if not waiting:
            worker_shield.pass_on(self.before, number, frame)
