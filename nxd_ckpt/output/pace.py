"""A limit on the bytes per second that all threads of a tool move together."""

from __future__ import annotations

import threading

from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.throttle import Throttle


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
        if self.stop.wait(self._throttle.schedule(nbytes)[1]):
            raise CheckpointError("stopped: another file could not be copied")
