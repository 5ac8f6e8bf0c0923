"""A fair lock: calls of several threads, one at a time, in the order in which they came."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from nxd_ckpt import effects
from nxd_ckpt.coordination.backoff import pause_after
from nxd_ckpt.errors import CheckpointError


class FairLock:
    """A lock that threads get in the order in which they asked for it, which other locks do not promise.

    It uses no locks or events: a signal handler may interrupt their holder anywhere, and ask for a turn itself.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[int, object]] = []  # the first has its turn; every change is atomic

    @contextmanager
    def held(self, what: str, timeout: float | None = None) -> Iterator[None]:
        """Hold the lock; ``what`` names the call in errors.

        Raises:
            CheckpointError: this very thread has the lock, or waits for it: a signal handler interrupted it.
            TimeoutError: it was not this thread's turn after ``timeout`` seconds.
        """
        mine = (effects.get_ident(), object())
        if any(thread == mine[0] for thread, _ in list(self._queue)):
            raise CheckpointError(
                f"{what}: this thread is in another save or load of the same Checkpointer; a signal handler "
                "that interrupted one must not start another: let it set a flag that the training loop looks at"
            )
        try:
            self._queue.append(mine)
            self._await(mine, what, math.inf if timeout is None else timeout)
            yield
        finally:
            if mine in self._queue:
                self._queue.remove(mine)

    def _await(self, mine: tuple[int, object], what: str, timeout: float) -> None:
        began = effects.monotonic()
        while self._queue[0] is not mine:
            waited = effects.monotonic() - began
            if waited >= timeout:
                raise TimeoutError(f"{what}: another thread's save or load is still under way")
            effects.sleep(pause_after(waited, 0.05))
