"""Threads beside the caller's: one that runs tasks in order, others that help it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from nxd_ckpt import host

logger = logging.getLogger("nxd_ckpt")


class Worker:
    """A daemon thread with a queue. Daemon: the exit hook decides how long an exit may take, not the interpreter."""

    def __init__(self, name: str) -> None:
        self._tasks: host.SimpleQueue[Callable[[], None] | None] = host.SimpleQueue()
        self._thread = host.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` after those before it. It must not raise."""
        self._tasks.put(task)

    def stop(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        host.yield_disk_to_others()
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException:  # a defect of ours, or an exit: without this thread later saves would hang
                logger.exception("nxd_ckpt: unexpected error in the background thread")
            del task  # it holds what was saved


class Helpers(Executor):
    """Daemon threads that run tasks side by side.

    All are started at once and run until they are shut down. An exiting interpreter, which may still have a save to
    finish, starts no threads, and stops those of concurrent.futures first.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: host.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = host.SimpleQueue()
        self._threads: list[host.Thread] = []
        self._cancels = False
        for number in range(count):
            thread = host.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
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
        self._cancels = cancel_futures
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        host.yield_disk_to_others()
        host.yield_processor_to_others()
        while (task := self._tasks.get()) is not None:
            if self._cancels:
                task[0].cancel()
            _complete(*task)
            del task  # it looks into memory that is to be used again


def _complete(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
