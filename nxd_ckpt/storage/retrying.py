"""Retries: a storage that repeats operations after errors that may go away by themselves (`TRANSIENT`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from nxd_ckpt import effects
from nxd_ckpt.storage.base import Reader, Storage
from nxd_ckpt.storage.wrapper import StorageWrapper

TRANSIENT = (ConnectionError, TimeoutError, BlockingIOError)
"""Errors that may go away. A missing file, a refusal, or a full disk do not."""

_ONCE = ("link_new", "exchange", "rename")
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 20.0
"""Seconds before an operation is repeated, at most: `_FIRST_PAUSE` at first, doubled each time up to this."""

T = TypeVar("T")


def retried(
    operation: Callable[[], T],
    errors: type[Exception] | tuple[type[Exception], ...],
    retries: int,
    pause: Callable[[int], float],
) -> T:
    """Return the result of ``operation``, repeated at most ``retries`` times after one of ``errors``.

    ``pause`` returns the seconds to wait, given the number of earlier repetitions. Raises the error of the last try.
    """
    for tries in range(retries):
        try:
            return operation()
        except errors:
            effects.sleep(pause(tries))
    return operation()


class RetryingStorage(StorageWrapper):
    """A storage that repeats operations, at most ``retries`` times, with growing pauses and jitter.

    `link_new`, `exchange` and writes are not repeated, because nothing shows whether the first try arrived: their
    errors are raised.
    """

    def __init__(self, inner: Storage, retries: int = 5) -> None:
        super().__init__(inner)
        self._retries = retries

    def around(self, name: str, key: str, operation: Callable[[], T]) -> T:
        return operation() if name in _ONCE else self.repeated(operation)

    def open(self, key: str) -> Reader:
        return _RetryingReader(self, super().open(key))

    def repeated(self, operation: Callable[[], T]) -> T:
        """Return the result of ``operation``; raise the error of its last try."""
        return retried(operation, TRANSIENT, self._retries, pause_after)


def pause_after(tries: int) -> float:
    """Return the seconds before the next repetition, after ``tries`` earlier ones.

    They grow, with jitter, so that several clients do not retry in step.
    """
    doubled: float = _FIRST_PAUSE * 2 ** min(tries, 10)
    return effects.uniform(0, min(doubled, _LONGEST_PAUSE))


class _RetryingReader:
    def __init__(self, storage: RetryingStorage, inner: Reader) -> None:
        self._storage, self._inner = storage, inner

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._storage.repeated(lambda: self._inner.read_ranges(ranges))

    def close(self) -> None:
        self._inner.close()
