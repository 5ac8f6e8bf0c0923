"""Waiting: pauses between two looks at something, and a fair lock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from nxd_ckpt import effects
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import Storage

ResultT = TypeVar("ResultT")

LONGEST = 0.25
"""Longest pause in seconds where a look costs little."""


def pause_after(waited: float, longest: float = LONGEST) -> float:
    """Return the pause in seconds: a 25th of the time waited so far; up to 2 ms all of it, from 0.1 ms on.

    So an event is seen soon after it comes, compared with the time it took.
    """
    return min(max(waited / 25, min(waited, 0.002), 0.0001), longest)


class Backoff:
    """Growing pauses between looks at ``storage``, see `pause_after`; up to 2 s where a look takes long.

    Listing thousands of votes takes long: a rank that did nothing else would slow down the training beside it. An
    object store charges for every look of every rank, so pauses grow up to 2 s there too.
    """

    def __init__(self, storage: Storage) -> None:
        self._busy = 0.0
        self._longest = LONGEST if storage.renames else 2.0
        self.reset()

    def reset(self) -> None:
        self._since = effects.monotonic()

    def timed(self, look: Callable[[], ResultT]) -> ResultT:
        started = effects.monotonic()
        try:
            return look()
        finally:
            self._busy = effects.monotonic() - started

    def pause(self) -> None:
        waited = effects.monotonic() - self._since
        effects.sleep(max(pause_after(waited, self._longest), min(8 * self._busy, 2.0)))


class FairLock:
    """A lock that threads get in the order in which they asked for it, which other locks do not promise.

    It uses no locks or events: a signal handler may interrupt their holder anywhere, and ask for a turn itself.
    """

    def __init__(self, require: Callable[[str], None] = lambda what: None) -> None:
        """Make a lock; ``require`` raises, with the name of the call, on a thread that its holders may wait for."""
        self._require = require
        self._queue: list[tuple[int, object]] = []  # the first has its turn; every change is atomic

    @contextmanager
    def held(self, what: str, timeout: float | None = None) -> Iterator[None]:
        """Hold the lock; ``what`` names the call in errors.

        Raises:
            CheckpointError: this very thread has the lock, or waits for it: a signal handler interrupted it.
            TimeoutError: it was not this thread's turn after ``timeout`` seconds.
        """
        self._require(what)
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
