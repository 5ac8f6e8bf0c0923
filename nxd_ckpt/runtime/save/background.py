"""Threads beside the caller's: one that runs tasks in order, others that help it; and what a caller holds of a save."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from nxd_ckpt.runtime.forks import require_own
from nxd_ckpt.runtime.save.priority import yield_disk_to_others, yield_processor_to_others

logger = logging.getLogger("nxd_ckpt")


class Worker:
    """A daemon thread with a queue. Daemon: the exit hook decides how long an exit may take, not the interpreter."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` after those before it. It must not raise."""
        self._tasks.put(task)

    def stop(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        yield_disk_to_others()
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # a defect of ours: without this thread every later save would hang
                logger.exception("nxd_ckpt: unexpected error in the background thread")
            del task  # it holds what was saved


class Helpers(Executor):
    """Daemon threads that run tasks side by side.

    All are started at once and run until they are shut down. An exiting interpreter, which may still have a save to
    finish, starts no threads, and stops those of concurrent.futures first.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system gives no more
                if not self._threads:
                    raise
                break
            self._threads.append(thread)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        yield_disk_to_others()
        yield_processor_to_others()
        while (task := self._tasks.get()) is not None:
            _complete(*task)
            del task  # it looks into memory that is to be used again


def _complete(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


class SaveProgress:
    """How far a save is. The code that does the save sets it; the caller sees it as a :class:`PendingSave`.

    Attributes:
        staged: the snapshot is complete.
        voted: this rank has done its part: its own bytes are durable, or it failed.
        decided: the tag is visible, or the save failed.
        reported: its failure was raised, or need not be.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.timings: Mapping[str, float] = {}
        self.nbytes = 0
        self.reported = False
        self.pid = os.getpid()
        self.staged, self.voted, self.decided = threading.Event(), threading.Event(), threading.Event()
        self.error: BaseException | None = None

    @property
    def unreported(self) -> bool:
        """Whether it failed, and the failure was not raised yet."""
        return self.error is not None and not self.reported

    def settle(self, error: BaseException | None) -> None:
        """Decide it."""
        self.error = error
        for event in (self.staged, self.voted, self.decided):
            event.set()
        if self.unreported:
            logger.error("nxd_ckpt: %s: %s", type(error).__name__, error)


class PendingSave:
    """A save under way, as its caller sees it. Made by ``Checkpointer.save``."""

    def __init__(self, progress: SaveProgress) -> None:
        self._progress = progress

    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self.error is not None else "done"
        return f"<PendingSave {self.tag!r}: {state}>"

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
        return self._await(self._progress.staged, timeout)

    @property
    def done(self) -> bool:
        """Whether it is decided: visible, or failed."""
        return self._progress.decided.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while undecided and after success."""
        return self._progress.error

    def wait(self, timeout: float | None = None) -> None:
        """Return once the tag is visible and durable.

        Raises:
            SaveFailed, OutcomeUnknown: it failed; see :mod:`nxd_ckpt.errors`.
            TimeoutError: undecided after ``timeout`` seconds; it goes on.
        """
        if not self._await(self._progress.decided, timeout):
            raise TimeoutError(f"save of {self.tag!r} is still under way after {timeout} s")
        if self._progress.error is not None:
            self._progress.reported = True
            raise self._progress.error

    def wait_decided(self, timeout: float | None = None) -> bool:
        """Like :meth:`wait`, but never raises: whether it is decided after ``timeout`` seconds."""
        return self._await(self._progress.decided, timeout)

    def _await(self, event: threading.Event, timeout: float | None) -> bool:
        if not event.is_set():
            require_own(self._progress.pid, f"save of {self.tag!r}")
        return event.wait(timeout)
