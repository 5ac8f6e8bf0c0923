"""A limit on the bytes per second that all threads of a tool move together."""

from __future__ import annotations

import threading
import time

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.progress import Counter


class Throttle:
    """A rate limit shared by threads. Unused rate is not saved up for later.

    ``bytes_per_second`` None is no limit.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate, self._free_at, self._lock = bytes_per_second, 0.0, threading.Lock()

    def delay(self, nbytes: int) -> float:
        """Return the seconds to wait after ``nbytes`` were moved, before more are."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self._rate
            return self._free_at - now


class Pace:
    """Rate limit, progress and cancellation of a copy, shared by all of its threads.

    ``stop`` makes each of them give up at its next piece. ``bytes_per_second`` None is no limit.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self.stop = threading.Event()
        self._throttle, self._counter = Throttle(bytes_per_second), Counter()

    @property
    def nbytes(self) -> int:
        """Bytes that were moved so far."""
        return self._counter.nbytes

    def moved(self, nbytes: int) -> None:
        """Count ``nbytes``, and return when more may be moved. Raises CheckpointError once the copy is to stop."""
        self._counter.add(nbytes)
        if self.stop.wait(self._throttle.delay(nbytes)):
            raise CheckpointError("stopped: another file could not be copied")
