"""Pauses between two looks at something that is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nxd_ckpt import effects
from nxd_ckpt.storage.base import Storage

ResultT = TypeVar("ResultT")

LONGEST = 0.25
"""Longest pause in seconds where a look costs little."""


def pause_after(waited: float, longest: float = LONGEST) -> float:
    """Return the pause in seconds: a 25th of the time waited so far, from 2 ms on.

    So an event is seen soon after it comes, compared with the time it took.
    """
    return min(max(waited / 25, 0.002), longest)


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
