"""A storage that tries again what failed for a reason that may go away by itself: `TRANSIENT` errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from nxd_ckpt import effects
from nxd_ckpt.storage.base import Reader, Storage
from nxd_ckpt.storage.wrapper import StorageWrapper

TRANSIENT = (ConnectionError, TimeoutError, BlockingIOError)
"""A missing file, a refusal, or a full disk stay what they are."""

_ONCE = ("link_new", "exchange", "rename")
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 20.0
"""Seconds before an operation is repeated, at most: the first time, then twice as many each time, up to the second."""

T = TypeVar("T")


class RetryingStorage(StorageWrapper):
    """Repeats every operation that may be done twice, at most ``retries`` times, with growing pauses and jitter.

    `link_new`, `exchange` and writes are not repeated, because nothing shows whether the first try arrived:
    their errors are raised.
    """

    def __init__(self, inner: Storage, retries: int = 5, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._retries, self._sleep = retries, sleep

    def around(self, name: str, key: str, operation: Callable[[], T]) -> T:
        return operation() if name in _ONCE else self.repeated(operation)

    def open(self, key: str) -> Reader:
        return _RetryingReader(self, super().open(key))

    def repeated(self, operation: Callable[[], T]) -> T:
        """What ``operation`` returns in the end; raises what its last try raised."""
        for tries in range(self._retries):
            try:
                return operation()
            except TRANSIENT:
                self._sleep(pause_after(tries))
        return operation()


def pause_after(tries: int) -> float:
    """Seconds to wait until an operation is repeated that has been repeated ``tries`` times: longer each time, and not
    in step with others."""
    doubled: float = _FIRST_PAUSE * 2 ** min(tries, 10)
    return effects.uniform(0, min(doubled, _LONGEST_PAUSE))


class _RetryingReader:
    def __init__(self, storage: RetryingStorage, inner: Reader) -> None:
        self._storage, self._inner = storage, inner

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._storage.repeated(lambda: self._inner.read_ranges(ranges))

    def close(self) -> None:
        self._inner.close()
