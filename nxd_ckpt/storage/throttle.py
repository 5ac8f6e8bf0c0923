"""A cap on bytes per second that everything in the process which names the same cap shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache


class Throttle:
    """Lets ``bytes_per_second`` through, on average; None is no cap."""

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_second, clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def block(self) -> int:
        """Bytes to ask for at once: few where there is a cap, so that no connection is silent for long."""
        return 2**20 if self._rate is None else 64 * 2**10

    def take(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may pass."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            free_at = max(self._free_at, now)
            self._free_at = free_at + nbytes / self._rate
        if free_at > now:
            self._sleep(free_at - now)


@cache
def shared_throttle(bytes_per_second: float | None) -> Throttle:
    """The one of this process for this cap."""
    return Throttle(bytes_per_second)
