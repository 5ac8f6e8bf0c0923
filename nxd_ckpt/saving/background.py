"""Background threads: one that runs tasks in order, and helpers that run tasks side by side."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.coordination import at_exit

logger = logging.getLogger("nxd_ckpt")


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
