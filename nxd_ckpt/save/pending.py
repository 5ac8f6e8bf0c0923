"""How far a save is: for the code that does it, and for its caller."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping
from concurrent import futures
from functools import partial
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.coordination.forks import require_own
from nxd_ckpt.save.failures import Failures

logger = logging.getLogger("nxd_ckpt")


class SaveProgress:
    """How far a save is. The code that does the save sets it; its caller holds the ``future``.

    Attributes:
        staged: the snapshot is complete.
        voted: this rank has done its part: its own bytes are durable, or it failed.
        reported: its failure was raised.
        tolerated: its failure need not be raised.
        future: is done once the tag is visible, or the save failed.
    """

    def __init__(self, tag: str, failures: Failures) -> None:
        self.tag, self._failures = tag, failures
        self.timings: Mapping[str, float] = {}
        self.nbytes = 0
        self.reported = self.tolerated = False
        self.pid = os.getpid()
        self.staged, self.voted = effects.Event(), effects.Event()
        self.error: BaseException | None = None
        self.future = PendingSave(self)

    @property
    def unreported(self) -> bool:
        """Whether it failed, and the failure is still to be raised."""
        return self.error is not None and not self.reported and not self.tolerated

    def settle(self, error: BaseException | None) -> None:
        """Decide it, and call what the caller added to be called then."""
        self.error = error
        self.tolerated = self._failures.decided(error, told=self.reported)
        self.staged.set()
        self.voted.set()
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class UnfinishedSaves:
    """The saves of one Checkpointer that are under way, or whose failure is still to be raised.

    There is no lock: signal handlers save too, and every change of the list is atomic.
    """

    def __init__(self) -> None:
        self._saves: list[SaveProgress] = []

    @property
    def saves(self) -> list[SaveProgress]:
        return list(self._saves)

    def add(self, save: SaveProgress) -> None:
        self._saves.append(save)

    def wait(self) -> None:
        """Return once all are decided."""
        for save in self.saves:
            save.future.wait_decided()

    def finish(self, grace: float | None) -> bool:
        """Wait until all are decided; with a ``grace``, at most so many seconds from when this rank has done its part.

        Whether they are.
        """
        pending = self.saves
        if grace is not None:
            for save in pending:
                save.voted.wait()
        deadline = None if grace is None else effects.monotonic() + grace
        for save in pending:
            save.future.wait_decided(None if deadline is None else max(deadline - effects.monotonic(), 0.0))
        return all(save.future.done() for save in pending)

    def settle(self) -> None:
        """As :meth:`wait`, and forget those of which there is nothing to raise."""
        for save in self.saves:
            save.future.wait_decided()
            if not save.unreported:
                self._drop(save)

    def raise_unreported(self) -> None:
        """Forget what is decided, and raise the first failure that was not raised before."""
        # What another thread has begun meanwhile stays: the next save has to wait for it.
        decided = [save for save in self.saves if save.future.done() and self._drop(save)]
        failed = [save for save in decided if save.unreported]
        for save in failed:
            save.reported = True
        if failed and failed[0].error is not None:
            raise failed[0].error

    def _drop(self, save: SaveProgress) -> bool:
        """Keep a save no longer; whether no other thread did that before."""
        try:
            self._saves.remove(save)
        except ValueError:
            return False
        return True


class PendingSave(futures.Future[None]):
    """A save under way, as its caller sees it: a future, which can also be awaited. Made by ``Checkpointer.save``.

    It cannot be cancelled. What ``add_done_callback`` was given is called on the thread that writes: it must be quick,
    and must neither save nor wait.
    """

    def __init__(self, progress: SaveProgress) -> None:
        super().__init__()
        self._progress = progress
        self.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self.error is not None else "done"
        return f"<PendingSave {self.tag!r}: {state}>"

    def __await__(self) -> Generator[Any, None, None]:
        import asyncio

        return asyncio.wrap_future(self).__await__()

    @property
    def tag(self) -> str:
        """What is being saved."""
        return self._progress.tag

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per phase (``stage_seconds``, ``write_seconds``, ``commit_seconds``), complete once it is done."""
        return self._progress.timings

    @property
    def nbytes(self) -> int:
        """Bytes that this rank wrote, complete once it is done."""
        return self._progress.nbytes

    def staged(self, timeout: float | None = None) -> bool:
        """Whether the snapshot is complete, waiting up to ``timeout`` seconds (None: until it is).

        From then on the live state may change without being seen. ``save`` returns only staged saves.
        """
        if not self._progress.staged.is_set():
            self._require_own()
        return self._progress.staged.wait(timeout)

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while undecided and after success. Looking at it does not count as being told."""
        return self._progress.error

    def wait(self, timeout: float | None = None) -> None:
        """Return once the tag is visible and durable.

        Raises:
            SaveFailed, OutcomeUnknown: it failed; see :mod:`nxd_ckpt.errors`.
            TimeoutError: undecided after ``timeout`` seconds; it goes on.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def result(self, timeout: float | None = None) -> None:
        """As :meth:`wait`."""
        self.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`wait` would raise, or None. It is not raised again by ``Checkpointer.wait`` or ``close``.

        Raises:
            TimeoutError: undecided after ``timeout`` seconds; it goes on.
        """
        if not self.wait_decided(timeout):
            raise TimeoutError(f"save of {self.tag!r} is still under way after {timeout} s")
        self._progress.reported = True
        return self.error

    def wait_decided(self, timeout: float | None = None) -> bool:
        """Like :meth:`wait`, but never raises: whether it is decided after ``timeout`` seconds."""
        if not self.done():
            self._require_own()
        try:
            super().exception(timeout)
        except futures.TimeoutError:
            return False
        return True

    def add_done_callback(self, fn: Callable[[futures.Future[None]], object]) -> None:
        """Call ``fn`` once it is done, at once if it is. On the thread that writes, whatever it raises is logged."""
        super().add_done_callback(fn if self.done() else partial(_call, fn))

    def _require_own(self) -> None:
        """In a forked child the thread that would decide it does not run."""
        require_own(self._progress.pid, f"save of {self.tag!r}")


def _call(fn: Callable[[futures.Future[None]], object], save: futures.Future[None]) -> None:
    try:
        fn(save)
    except BaseException:  # futures let an exit pass: the callbacks after it would not be called
        logger.exception("nxd_ckpt: unexpected error in a callback of %r", save)
