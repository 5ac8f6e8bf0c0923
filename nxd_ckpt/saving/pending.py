"""Progress of a save, for the code that performs it, its caller and the threads; and the policy for saves that fail."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from nxd_ckpt import effects
from nxd_ckpt.coordination import at_exit
from nxd_ckpt.effects import logger, require_own
from nxd_ckpt.errors import CheckpointError, DirectoryInUse, InvalidArgument, translated
from nxd_ckpt.options.checkpointer_options import CheckpointerOptions

_Begun = TypeVar("_Begun")


class Failures:
    """Counter of the failed saves of one Checkpointer.

    Every rank counts its own. A save fails on all ranks or on none, so the counts are equal, except if the outcome
    is unknown to one.
    """

    def __init__(self, options: CheckpointerOptions) -> None:
        self._warns = options.on_save_failure == "warn"
        self._limit = options.max_failed_saves
        self.in_a_row: int = 0

    @property
    def warns(self) -> bool:
        """True if a failure need not be raised."""
        return self._warns

    def require_other_thread(self, call: str) -> None:
        """Raise InvalidArgument in a callback of a save: who has the Checkpointer may wait for that thread."""
        if _calling.get(effects.get_ident()) is self:
            raise InvalidArgument(
                f"{call}: this function of add_done_callback runs on the thread that writes, and would wait for "
                "itself: leave saving, loading and waiting to another thread"
            )

    def decided(self, error: BaseException | None, informed: bool) -> bool:
        """Record the outcome of a save. Return whether its failure is tolerated.

        ``error`` is logged, unless its caller was ``informed``. No later save succeeds where another job saves, so that
        is not tolerated.
        """
        if error is None:
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        tolerated = self._warns and self.in_a_row < self._limit and not isinstance(error, DirectoryInUse)
        if tolerated:
            logger.warning(
                "nxd_ckpt: a save failed, and training continues (%d in a row; the %d. is raised): %s: %s",
                self.in_a_row,
                self._limit,
                type(error).__name__,
                error,
            )
        elif not informed:
            logger.error("nxd_ckpt: %s: %s", type(error).__name__, error)
        return tolerated

    @contextmanager
    def before_training(self, url: str, options: Sequence[str]) -> Iterator[None]:
        """Context in which the directory ``url`` is taken, because of ``options``, long before the first save.

        With "warn", an error of the storage is logged, and not raised.
        """
        try:
            yield
        except DirectoryInUse as error:
            shown = ", ".join(f"{name}=" for name in options)
            error.args = (f"{error}. A Checkpointer that only loads is not refused: make it without {shown}",)
            raise
        except OSError as error:
            if not self._warns:
                raise
            logger.warning("nxd_ckpt: %s cannot be saved to; the first save tries again: %s", url, error)


class SaveProgress:
    """Progress of a save. The code that performs the save updates it; its caller holds the ``future``.

    Attributes:
        staged: the snapshot is complete.
        voted: this rank has done its part: its own bytes are durable, or it failed.
        awaited: somebody waits until it is decided.
        reported: its failure was raised.
        tolerated: its failure need not be raised.
        future: is done once the tag is visible, or the save failed.
    """

    def __init__(self, tag: str, failures: Failures) -> None:
        self.tag: str = tag
        self.failures: Failures = failures
        self.timings: Mapping[str, float] = {}
        self.nbytes = 0
        self.reported: bool = False
        self.tolerated: bool = False
        self.pid: int = os.getpid()
        self.staged: effects.Event = effects.Event()
        self.voted: effects.Event = effects.Event()
        self.awaited: effects.Event = effects.Event()
        self.error: BaseException | None = None
        self.future: PendingSave = PendingSave(self)

    @property
    def warns(self) -> bool:
        """True if its failure need not be raised."""
        return self.failures.warns

    @property
    def unreported(self) -> bool:
        """True if it failed, and the failure is still to be raised."""
        return self.error is not None and not self.reported and not self.tolerated

    def begun(self, begin: Callable[[], _Begun]) -> _Begun | None:
        """Return the result of ``begin``; None if a first save failed, on all ranks, and need not be raised."""
        try:
            with translated():
                return begin()
        except CheckpointError as error:
            if not self.failures.warns:
                raise
            self.settle(error)
            if self.unreported:
                raise
            return None

    def settle(self, error: BaseException | None) -> None:
        """Record the outcome, and call the caller's callbacks."""
        self.error = error
        self.tolerated = self.failures.decided(error, informed=self.reported)
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

    @property
    def has_unreported(self) -> bool:
        """True if one failed, and the failure is still to be raised."""
        return any(save.unreported for save in self.saves)

    def add(self, save: SaveProgress) -> None:
        self._saves.append(save)

    def wait(self) -> None:
        """Return once all are decided."""
        for save in self.saves:
            save.future.wait_decided()

    def finish(self, grace: float | None) -> bool:
        """Wait until all are decided, with ``grace`` at most that many seconds after this rank has done its part.

        Returns whether all are decided.
        """
        pending = self.saves
        if grace is not None:
            for save in pending:
                save.awaited.set()
                save.voted.wait()
        deadline = None if grace is None else effects.monotonic() + grace
        for save in pending:
            save.future.wait_decided(None if deadline is None else max(deadline - effects.monotonic(), 0.0))
        return all(save.future.done() for save in pending)

    def settle(self) -> None:
        """Wait until all are decided, and drop those without a failure to raise."""
        for save in self.saves:
            save.future.wait_decided()
            if not save.unreported:
                self._drop(save)

    def raise_unreported(self) -> None:
        """Drop the decided saves, and raise the first failure that was not raised before."""
        # What another thread has begun meanwhile stays: the next save has to wait for it.
        decided = [save for save in self.saves if save.future.done() and self._drop(save)]
        failed = [save for save in decided if save.unreported]
        for save in failed:
            save.reported = True
        if failed and failed[0].error is not None:
            raise failed[0].error

    def _drop(self, save: SaveProgress) -> bool:
        """Remove a save. Return False if another thread did that before."""
        try:
            self._saves.remove(save)
        except ValueError:
            return False
        return True


class PendingSave(futures.Future[None]):
    """A save under way, for its caller: a future, which can also be awaited. Made by ``Checkpointer.save``.

    To wait by one of its methods, or to await it, ends ``max_bytes_per_second``; ``done()`` and functions of
    concurrent.futures do not. It cannot be cancelled. Callbacks of ``add_done_callback`` run on the thread that writes:
    they must be quick, and must neither save nor wait.
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

        self._progress.awaited.set()
        return asyncio.wrap_future(self).__await__()

    @property
    def tag(self) -> str:
        """The tag that is being saved."""
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
        """Return whether the snapshot is complete, waiting up to ``timeout`` seconds (None: until it is).

        From then on changes of the live state do not affect it. ``save`` returns only staged saves.
        """
        if not self._progress.staged.is_set():
            self._require_own()
        return self._progress.staged.wait(timeout)

    @property
    def error(self) -> BaseException | None:
        """The failure; None while undecided and after success. Reading it does not mark the failure as reported."""
        return self._progress.error

    def wait(self, timeout: float | None = None) -> None:
        """Return once the tag is visible and durable.

        Raises:
            SaveFailed, OutcomeUnknown: it failed; see `nxd_ckpt.errors`.
            TimeoutError: undecided after ``timeout`` seconds; it continues.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def result(self, timeout: float | None = None) -> None:
        """Return once the tag is visible and durable. Raises the errors of `wait`."""
        self.wait(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that `wait` would raise, or None. ``Checkpointer.wait`` and ``close`` do not raise it again.

        Raises:
            TimeoutError: undecided after ``timeout`` seconds; it continues.
        """
        if not self.wait_decided(timeout):
            raise TimeoutError(f"save of {self.tag!r} is still under way after {timeout} s")
        self._progress.reported = True
        return self.error

    def wait_decided(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds; return whether it is decided. Never raises the failure."""
        if not self.done():
            self._require_own()
            self._progress.failures.require_other_thread(f"waiting for the save of {self.tag!r}, which goes on")
            self._progress.awaited.set()
        try:
            super().exception(timeout)
        except futures.TimeoutError:
            return False
        return True

    def add_done_callback(self, fn: Callable[[futures.Future[None]], object]) -> None:
        """Call ``fn`` once it is done, at once if it is. On the thread that writes, its exceptions are logged."""
        super().add_done_callback(fn if self.done() else partial(_call, fn, self._progress.failures))

    def _require_own(self) -> None:
        """Raise in a forked child, where the thread that would decide it does not run."""
        require_own(self._progress.pid, f"save of {self.tag!r}")


_calling: dict[int, Failures] = {}
"""By thread that runs a callback, those of the Checkpointer that it writes for."""


def _call(fn: Callable[[futures.Future[None]], object], failures: Failures, save: futures.Future[None]) -> None:
    _calling[effects.get_ident()] = failures
    try:
        fn(save)
    except BaseException:  # futures propagate an exit: the callbacks after it would not be called
        logger.exception("nxd_ckpt: unexpected error in a callback of %r", save)
    finally:
        del _calling[effects.get_ident()]


class Worker:
    """A daemon thread with a queue. Daemon: the exit hook decides how long an exit may take, not the interpreter.

    At the end of the process, when no thread starts any more or nobody would wait for it, tasks run on the submitting
    thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: effects.SimpleQueue[Callable[[], None] | None] = effects.SimpleQueue()
        self._thread = effects.Thread(target=self._run, name=name, daemon=True)
        self.is_thread: bool = not at_exit.is_over() and effects.has_started(self._thread)

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` after those before it. It must not raise."""
        if self.is_thread:
            self._tasks.put(task)
        else:
            _run(task)

    def stop(self) -> None:
        """Finish all submitted tasks, then end the thread."""
        if self.is_thread:
            self._tasks.put(None)
            self._thread.join()

    def _run(self) -> None:
        effects.yield_disk_to_others()
        while (task := self._tasks.get()) is not None:
            _run(task)
            del task  # it holds what was saved


class Helpers(Executor):
    """At most ``count`` daemon threads that run tasks side by side, and end when there is nothing left to run.

    Threads of concurrent.futures would wait until they are shut down: as many for each directory that was saved to. An
    exiting interpreter, which may still have a save to finish, stops those first, and starts no threads. Tasks then run
    on the submitting thread.
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        # Locks that nobody waits for: a signal handler may submit while its thread does.
        self._places = [effects.Lock() for _ in range(count)]
        self._threads: dict[int, effects.Thread] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.append((future, partial(fn, *args, **kwargs)))
        for number, place in enumerate(self._places):
            if place.acquire(blocking=False):
                self._start(number)
                break
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all submitted tasks; with ``cancel_futures`` drop those that have not begun."""
        while cancel_futures and (task := self._next()) is not None:
            task[0].cancel()
        for thread in list(self._threads.values()) if wait else ():
            thread.join()

    def _start(self, number: int) -> None:
        thread = effects.Thread(target=partial(self._run, number), name=f"{self._name}-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more, or the interpreter exits
            self._places[number].release()
            self._run_tasks()
        else:
            self._threads[number] = thread

    def _run(self, number: int) -> None:
        effects.yield_disk_to_others()
        effects.yield_processor_to_others()
        place = self._places[number]
        while True:
            self._run_tasks()
            place.release()
            # A task that came after the last look, while all places were taken, has no thread of its own.
            if not self._tasks or not place.acquire(blocking=False):
                return

    def _run_tasks(self) -> None:
        while (task := self._next()) is not None:
            _complete(*task)
            del task  # it looks into memory that is to be used again

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        try:
            return self._tasks.popleft()
        except IndexError:
            return None


def _run(task: Callable[[], None]) -> None:
    try:
        task()
    except BaseException:  # a defect of ours, or an exit: without this thread later saves would hang
        logger.exception("nxd_ckpt: unexpected error in the background thread")


def _complete(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
