"""Requests to stop the training: a signal, or a function of the caller's, on any rank of a job.

A caught signal has no effect until the next step. If no step comes, because a script never calls it or hangs, the
signal must still be able to end the process: see `SignalFlag`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.coordination import worker_shield
from nxd_ckpt.coordination.agreement import Agreement
from nxd_ckpt.coordination.stopping import Stopping
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.options.checkpointer_options import PreemptionOptions

_APART = 5.0
"""Seconds within which a signal that comes twice is one request: of a scheduler to all processes, and of torchrun."""


class Preemption:
    """The requests to stop that one Checkpointer sees.

    Its signals are caught from the beginning; the other ranks are joined at the first step. ``has_stopped``: a step
    said to stop.
    """

    def __init__(self, options: PreemptionOptions) -> None:
        """Catch the signals. Raises InvalidArgument for one that cannot be caught."""
        self._asked = options.preemption
        self._grace = options.preemption_grace
        self.has_stopped: bool = False
        self._flags = [SignalFlag(number, self._grace) for number in options.signals]
        self._stopping: Stopping | None = None
        try:
            for flag in self._flags:
                flag.install()
        except InvalidArgument:
            for flag in self._flags:
                flag.remove()
            raise

    def step(self, number: int, meet: Callable[[], Agreement | None]) -> bool:
        """Return whether all ranks stop after step ``number``; at the first call ``meet`` joins the ranks.

        Raises as ``Checkpointer.step`` does.
        """
        if not self._asked:
            return False
        for flag in self._flags:
            flag.poll()
        if self._stopping is None:
            self._stopping = self._joined(meet)
        stops = self._stopping.step(number)
        for flag in self._flags if stops else ():
            flag.answer()
        self.has_stopped |= stops
        return stops

    def warn_if_not_asked(self) -> None:
        """Warn, at the end of a run that saved, if nothing could have stopped it."""
        if self._asked and self._stopping is None:
            logger.warning(
                "nxd_ckpt: preemption= had no effect: Checkpointer.step(number), which tells whether to save and stop, "
                "was not called; call it after every step"
            )

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Make no further step; after the block the signals have their former effect."""
        try:
            for flag in self._flags:
                flag.close()
            if self._stopping is not None:
                self._stopping.leave()
                self._stopping = None
            yield
        finally:
            for flag in self._flags:
                flag.remove()

    def _joined(self, meet: Callable[[], Agreement | None]) -> Stopping:
        agreement = meet()
        if agreement is None:
            raise CheckpointError(
                "preemption: no process group joins the ranks, so they cannot agree on a step to stop at; "
                "initialise torch.distributed, or leave preemption= out"
            )
        return Stopping(agreement, self._notice, self._grace)

    def _notice(self) -> str | None:
        """Return why this rank is to stop; None if it is not."""
        if callable(self._asked):
            return "preemption() is true" if self._asked() else None
        return next((flag.name for flag in self._flags if flag.is_set), None)


class SignalFlag:
    """A flag that is set once this process has got the signal.

    The signal has its former effect too, so that it ends a process that does not heed the flag: ``grace`` seconds after
    it came, or when it comes again, if no step has ever looked at the flag; when it comes again later than that, if
    there were steps, but none since; and if a step said to stop, but others follow.
    """

    def __init__(self, number: int, grace: float) -> None:
        self.number: int = number
        self.pid: int = os.getpid()
        self._grace = grace
        self._main_thread = effects.get_ident()  # no other one can install a handler
        self.is_polled: bool = False
        """True if a step has looked at it."""
        self._came_at: float | None = None
        self._is_seen = self._is_answered = self._is_ignored = False
        self._is_over = effects.Event()

    @property
    def is_set(self) -> bool:
        return self._came_at is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def come(self) -> None:
        """Set it, in a handler."""
        if self._came_at is None:
            self._came_at = effects.monotonic()
            with suppress(RuntimeError):  # no thread is left: nothing is logged then
                effects.start_new_thread(self._watch, ())  # Thread takes locks that the interrupted code may hold

    def gives_way(self) -> bool:
        """Return, in a handler, whether the signal that comes now has its former effect."""
        if self._is_ignored:
            return True
        if self._came_at is None or self._is_seen or self._is_answered:
            return False
        return effects.monotonic() - self._came_at >= (self._grace if self.is_polled else self._patience)

    def poll(self) -> None:
        """Note that a step looks at it."""
        self.is_polled = True
        self._is_seen = self.is_set

    def answer(self) -> None:
        """Note that a step says to stop. Another step after that is warned of."""
        if self._is_answered and not self._is_ignored:
            self._is_ignored = True
            logger.warning(
                "nxd_ckpt: preemption: Checkpointer.step() has returned True, which means to save and to stop, but the "
                "training goes on: another %s ends the process as usual",
                self.name,
            )
        self._is_answered = True
        self._is_over.set()

    def close(self) -> None:
        """Let the signal have no effect at all, while the last save is written."""
        self._is_answered = True
        self._is_ignored = False
        self._is_over.set()

    @property
    def _patience(self) -> float:
        return min(_APART, self._grace)

    def _watch(self) -> None:
        """Log, on a thread, a signal that is not heeded; give it its former effect if no step ever looked."""
        if not _is_polled(self.number):
            logger.warning(
                "nxd_ckpt: preemption: %s came, but this process has not called Checkpointer.step() yet, which would "
                "tell it to stop. If it does not within %g s (preemption_grace), or if the signal comes again after "
                "%g s, it ends the process as usual",
                self.name,
                self._grace,
                self._patience,
            )
        if self._is_over.wait(self._grace) or self._is_seen:
            return
        if _is_polled(self.number):
            logger.warning(
                "nxd_ckpt: preemption: %g s (preemption_grace) have passed since %s, without a call of "
                "Checkpointer.step(). The next one tells the training to stop; another %s ends the process as usual",
                self._grace,
                self.name,
                self.name,
            )
        else:
            logger.error("nxd_ckpt: preemption: Checkpointer.step() was not called: %s ends the process", self.name)
            signal.pthread_kill(self._main_thread, self.number)

    def install(self) -> None:
        """Replace the signal's handler. Raises InvalidArgument if this thread may not, or the signal has no handlers.
        """
        try:
            present: Any = signal.getsignal(self.number)
            signal.signal(self.number, present if isinstance(present, _Handler) else _Handler(present))
        except (ValueError, OSError) as error:
            raise InvalidArgument(
                f"preemption: the signal {self.number} cannot be handled here ({error}): make the Checkpointer on the "
                "main thread, or give a function that says whether to stop"
            ) from error
        _installed.append(self)
        worker_shield.shield(self.number)

    def remove(self) -> None:
        """Restore the previous handler, once no other flag waits.

        If our handler cannot be removed, it passes the signal on.
        """
        if self in _installed:
            _installed.remove(self)
        present: Any = signal.getsignal(self.number)
        if isinstance(present, _Handler) and not _waiting(self.number):
            with suppress(ValueError):  # not on the main thread: it stays
                signal.signal(self.number, present.before)


_installed: list[SignalFlag] = []
"""Flags of all signals. There is no lock: handlers read it, and every change of it is atomic."""


def _waiting(number: int) -> list[SignalFlag]:
    """Return this process's flags for the signal: in a forked child its parent's do not count."""
    return [flag for flag in list(_installed) if flag.number == number and flag.pid == os.getpid()]


def _is_polled(number: int) -> bool:
    """Return whether steps of any Checkpointer look at the signal."""
    return any(flag.is_polled for flag in _waiting(number))


class _Handler:
    """A handler that sets all waiting flags. ``before`` never changes and is none of ours: no two call each other."""

    def __init__(self, before: Any) -> None:
        self.before = signal.SIG_DFL if before is None else before  # None: it was not installed by Python

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Set the flags. Since it may interrupt anything, it takes no lock; a thread logs."""
        waiting = _waiting(number)
        gives_way = all(flag.gives_way() for flag in waiting)
        for flag in waiting:
            flag.come()
        if gives_way:
            self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.before == signal.SIG_IGN:
            return
        if callable(self.before):
            self.before(number, frame)
            return
        present = signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, present)  # the default was not to end
