"""Requests to stop the training: a signal, or a function of the caller's, on any rank of a job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from nxd_ckpt.coordination import worker_shield
from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.coordination.stopping import Stopping
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.options.checkpointer_options import PreemptionOptions


class Preemption:
    """The requests to stop that one Checkpointer sees.

    Its signal is caught from the beginning; the other ranks are joined at the first step.
    """

    def __init__(self, options: PreemptionOptions) -> None:
        """Catch the signal. Raises InvalidArgument for invalid options."""
        options.validate()
        self._asked, self._grace = options.preemption, options.preemption_grace
        self._flag: SignalFlag | None = None
        self._stopping: Stopping | None = None
        if self._asked and not callable(self._asked):
            self._flag = SignalFlag(signal.SIGTERM if self._asked is True else self._asked)
            self._flag.install()

    def step(self, number: int, meet: Callable[[], Agreement | None]) -> bool:
        """Return whether all ranks stop after step ``number``; at the first call ``meet`` joins the ranks.

        Raises as ``Checkpointer.step`` does.
        """
        if not self._asked:
            return False
        if self._stopping is None:
            self._stopping = self._joined(meet)
        return self._stopping.step(number)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Make no further step; after the block the signal has its former meaning. A later step would start again."""
        try:
            if self._stopping is not None:
                self._stopping.leave()
                self._stopping = None
            yield
        finally:
            if self._flag is not None:
                self._flag.remove()

    def _joined(self, meet: Callable[[], Agreement | None]) -> Stopping:
        agreement = meet()
        if agreement is None:
            raise CheckpointError(
                "preemption: no process group joins the ranks, so they cannot agree on a step to stop at; "
                "initialise torch.distributed, or leave preemption= out"
            )
        if self._flag is not None:
            self._flag.install()
        return Stopping(agreement, self._notice, self._grace)

    def _notice(self) -> str | None:
        """Return why this rank is to stop; None if it is not."""
        if self._flag is not None:
            return self._flag.name if self._flag.is_set else None
        return "preemption() is true" if callable(self._asked) and self._asked() else None


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
