"""A few threads that read, and the caller's own thread while it waits.

Tasks start in the order of submission. An error stops those that have not started. If several fail, the error of the
first task is raised, whichever thread was faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nxd_ckpt import effects
from nxd_ckpt.core.closing import Closing
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.storage.arena import private_memory

PIECE = CRC_BLOCK
"""Bytes of scratch memory per thread, and of a task's read.

Large enough that threads seldom contend, small enough that the bytes are still in the cache when their digest is
computed; and a block of a tensor is verified at once.
"""

Task = Callable[[memoryview], None]
"""Called with ``PIECE`` bytes of scratch memory that belong to the thread."""


class ReadPool(Closing):
    """Pool that runs tasks on ``threads`` threads, the caller's included.

    The storage's ``concurrency``. Must be closed.
    """

    def __init__(self, threads: int) -> None:
        self._others = threads - 1
        self._threads: list[effects.Thread] = []
        self._changed = effects.Condition()
        self._queue: deque[tuple[int, Task]] = deque()
        self._running: dict[int, int] = {}  # tasks, and the threads that they run on
        self._failed: tuple[int, BaseException] | None = None
        self._closed = False
        self._own = effects.local()
        self.submitted = 0

    def submit(self, task: Task) -> None:
        """Run ``task`` soon. Raises the error of an earlier one."""
        if self._failed is not None:
            self.wait_for(self.submitted)
        with self._changed:
            self._queue.append((self.submitted, task))
            self.submitted += 1
            self._changed.notify()
        # A single task is for the caller, which waits for it next.
        if len(self._queue) > 1 and len(self._threads) < self._others:
            thread = effects.Thread(target=self._work, name="nxd_ckpt-reader", daemon=True)
            self._threads.append(thread)  # first: an interrupt may come out of start()
            try:
                thread.start()
            except RuntimeError:  # the system gives no more; the caller's own thread does it all in the end
                self._threads.pop()
                self._others = len(self._threads)

    def wait_for(self, count: int) -> None:
        """Return once the first ``count`` tasks are done, and help with them.

        Raises the error of the first that failed.
        """
        while (item := self._next(count)) is not None:
            self._run(*item)
        if self._failed is not None:
            (_, error), self._failed = self._failed, None
            raise error

    def close(self) -> None:
        """Drop tasks that have not started and end the threads; returns when no task runs any more."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            # By tasks, since a thread whose start was interrupted cannot be joined; it will find nothing to do.
            while any(thread != effects.get_ident() for thread in self._running.values()):
                self._changed.wait()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _next(self, count: int) -> tuple[int, Task] | None:
        """Return the next of the first ``count`` tasks to run here; None once all of them are done."""
        with self._changed:
            while True:
                if self._queue and self._queue[0][0] < count:
                    return self._start_next()
                if not any(number < count for number in self._running):
                    return None
                self._changed.wait()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                item = self._start_next()
            self._run(*item)

    def _start_next(self) -> tuple[int, Task]:
        number, task = self._queue.popleft()
        self._running[number] = effects.get_ident()
        return number, task

    def _run(self, number: int, task: Task) -> None:
        try:
            task(self._scratch())
        except BaseException as error:  # an interrupt too: it reaches the caller as any other
            with self._changed:
                self._queue.clear()
                if self._failed is None or number < self._failed[0]:
                    self._failed = number, error
        finally:
            with self._changed:
                del self._running[number]
                self._changed.notify_all()

    def _scratch(self) -> memoryview:
        if not hasattr(self._own, "memory"):
            self._own.memory = memoryview(private_memory(PIECE))
        memory: memoryview = self._own.memory
        return memory
