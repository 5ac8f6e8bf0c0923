"""Turns: the calls of several threads, one at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from nxd_ckpt.errors import CheckpointError


class Turns:
    """Gives threads their turn in the order in which they asked for it, which a lock does not promise."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, threading.Event]] = deque()  # the first has its turn
        self._lock = threading.RLock()  # a signal handler may interrupt its holder, and ask for a turn itself

    @contextmanager
    def taken(self, what: str, timeout: float | None = None) -> Iterator[None]:
        """Within, it is this thread's turn; ``what`` it is for, in an error.

        Raises:
            CheckpointError: this very thread has a turn already, or waits for one: a signal handler interrupted it.
            TimeoutError: it was not this thread's turn after ``timeout`` seconds.
        """
        mine = (threading.get_ident(), threading.Event())
        try:
            with self._lock:
                if any(thread == mine[0] for thread, _ in self._queue):
                    raise CheckpointError(
                        f"{what}: this thread is in another save or load of the same Checkpointer; a signal handler "
                        "that interrupted one must not start another: let it set a flag that the training loop looks at"
                    )
                self._queue.append(mine)
                self._queue[0][1].set()
            if not mine[1].wait(timeout):
                raise TimeoutError(f"{what}: another thread's save or load is still under way")
            yield
        finally:
            with self._lock:
                if mine in self._queue:
                    self._queue.remove(mine)
                if self._queue:
                    self._queue[0][1].set()
