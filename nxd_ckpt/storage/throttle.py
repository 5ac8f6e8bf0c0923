"""A cap on bytes per second that everything in the process which names the same cap shares."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from nxd_ckpt.effects import in_forked_children
from nxd_ckpt.errors import InvalidArgument


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


class Limits(NamedTuple):
    """The options of every store that are ours: how often a request is repeated, and a cap in bytes per second on
    uploads and downloads together."""

    retries: int
    max_bytes_per_second: float | None

    @staticmethod
    def of(retries: int, max_bytes_per_second: float | None, url: str) -> Limits:
        """Raises InvalidArgument."""
        if retries < 0:
            raise InvalidArgument(f"{url}: retries is {retries}; expected 0 or more")
        if max_bytes_per_second is not None and max_bytes_per_second <= 0:
            raise InvalidArgument(f"{url}: max_bytes_per_second is {max_bytes_per_second}; expected more than 0")
        return Limits(retries, max_bytes_per_second)

    @property
    def throttle(self) -> Throttle:
        """The one that the process has for this cap."""
        return shared_throttle(self.max_bytes_per_second)


@cache
def shared_throttle(bytes_per_second: float | None) -> Throttle:
    """The one of this process for this cap."""
    return Throttle(bytes_per_second)


in_forked_children(shared_throttle.cache_clear)  # its lock may have been held
