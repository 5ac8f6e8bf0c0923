"""A limit on bytes per second, shared by everything in the process that names the same limit."""

from __future__ import annotations

import threading
from functools import cache

from nxd_ckpt import effects
from nxd_ckpt.errors import InvalidArgument


class Throttle:
    """A limit of ``bytes_per_second`` on average; None is unlimited. Unused time is not saved up."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def block(self) -> int:
        """Bytes to request at once: few with a limit, so that no connection is silent for long."""
        return 2**20 if self._rate is None else 64 * 2**10

    def take(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may pass."""
        begin, _ = self.schedule(nbytes)
        if begin > 0:
            effects.sleep(begin)

    def schedule(self, nbytes: int) -> tuple[float, float]:
        """Return the seconds until ``nbytes`` more may begin to pass, and until they have passed."""
        if self._rate is None:
            return 0.0, 0.0
        with self._lock:
            now = effects.monotonic()
            begin = max(self._free_at, now)
            self._free_at = begin + nbytes / self._rate
            return begin - now, self._free_at - now


class SavePace:
    """A limit of ``bytes_per_second`` on each of two kinds of work on the same bytes, which overlap.

    It ends once ``hurry`` is set.
    """

    def __init__(self, bytes_per_second: float, hurry: effects.Event) -> None:
        self._digests, self._writes = Throttle(bytes_per_second), Throttle(bytes_per_second)
        self._hurry = hurry

    def digest(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may be digested."""
        self._wait(self._digests.schedule(nbytes)[0])

    def write(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may be written."""
        self._wait(self._writes.schedule(nbytes)[0])

    def _wait(self, seconds: float) -> None:
        if seconds > _SHORT:
            self._hurry.wait(seconds)


_SHORT = 0.02
"""Seconds for which no thread sleeps: to wake up for each of many small tensors would cost more than to digest them."""


def check_limits(retries: int, max_bytes_per_second: float | None, url: str) -> None:
    """Raise InvalidArgument for impossible options of a store: retries, and the limit of all transfers."""
    if retries < 0:
        raise InvalidArgument(f"{url}: retries is {retries}; expected 0 or more")
    if max_bytes_per_second is not None and max_bytes_per_second <= 0:
        raise InvalidArgument(f"{url}: max_bytes_per_second is {max_bytes_per_second}; expected more than 0")


@cache
def shared_throttle(bytes_per_second: float | None) -> Throttle:
    """Return the process's throttle for this limit."""
    return Throttle(bytes_per_second)


effects.in_forked_children(shared_throttle.cache_clear)  # its lock may have been held
