"""News of keys: a rank tells the others over `nxd_ckpt.coordination.peers` which file it has written for them.

An object store charges for every look of every rank, and each takes tens of milliseconds. So ranks that wait for a file
in one are told when it is there, and hardly look meanwhile. News decide nothing: what counts is the file. News that
are lost, with a connection, only delay a rank until it looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nxd_ckpt import effects
from nxd_ckpt.coordination.peers import Peers

LONGEST = 5.0
"""Seconds after which a rank looks although nothing was told."""

_SLICE = 0.25
"""Seconds of a wait, after which to check whether there is a reason to end it."""


class News:
    """The news of one session on one rank; none without connections."""

    def __init__(self, peers: Peers | None = None, channel: int = 0, world_size: int = 1) -> None:
        """Listen to the ``channel``, of which rank 0 chose the number."""
        self._peers, self._channel = peers, channel
        self._most = 4 * world_size + 16
        """Number of keys after which the oldest are forgotten: each rank writes a few for each save."""
        self._keys = dict[str, None]()
        self._changed = effects.Condition()
        self.count = 0
        """How often anything was told."""
        if peers is not None:
            peers.listen(channel, self._hear)

    @property
    def come(self) -> bool:
        """True if all ranks are connected, so that a rank which waits may rely on being told."""
        return self._peers is not None

    def tell(self, key: str) -> None:
        """Tell the others, or on another rank than 0 rank 0, that there is a file ``key`` now."""
        if self._peers is not None:
            self._peers.tell(self._channel, key)

    def has(self, key: str) -> bool:
        """Return whether it was told that there is a file ``key``."""
        return key in self._keys

    def wait(self, count: int, until: float, is_over: Callable[[], bool]) -> None:
        """Wait for other news than the first ``count``, or until ``is_over``.

        It ends at the time ``until`` at the latest (seconds, as effects.monotonic()).
        """
        with self._changed:
            while self.count == count and (left := until - effects.monotonic()) > 0:
                self._changed.wait(min(left, _SLICE))
                if is_over():
                    return

    def close(self) -> None:
        """Listen no longer."""
        if self._peers is not None:
            self._peers.listen(self._channel, None)
            self._peers = None

    def _hear(self, rank: int, word: Any) -> None:
        """Handle a word, or None from a rank that is gone. Runs on the thread of the connections."""
        with self._changed:
            self.count += 1
            if isinstance(word, str):
                self._keys[word] = None
                while len(self._keys) > self._most:
                    del self._keys[next(iter(self._keys))]
            self._changed.notify_all()
