"""A limit on how many bytes are moved in a second, by all threads of a tool together."""

from __future__ import annotations

import threading
import time

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.progress import Counter


class Throttle:
    """Tells each thread how long it has to wait. Bytes that were not moved in time are not made up for later."""

    def __init__(self, bytes_per_second: int | None) -> None:
        """None sets no limit."""
        self._rate, self._free_at, self._lock = bytes_per_second, 0.0, threading.Lock()

    def delay(self, nbytes: int) -> float:
        """Seconds to wait, after so many bytes were moved, before more are."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self._rate
            return self._free_at - now


class Pace:
    """How fast a copy goes, how far it is, and whether it goes on: for all of its threads together.

    ``stop`` makes each of them give up at its next piece.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        """None sets no limit."""
        self.stop = threading.Event()
        self._throttle, self._counter = Throttle(bytes_per_second), Counter()

    @property
    def nbytes(self) -> int:
        """Bytes that were moved so far."""
        return self._counter.nbytes

    def moved(self, nbytes: int) -> None:
        """Return when more may be moved than these. Raises CheckpointError once the copy is to stop."""
        self._counter.add(nbytes)
        if self.stop.wait(self._throttle.delay(nbytes)):
            raise CheckpointError("stopped: another file could not be copied")
