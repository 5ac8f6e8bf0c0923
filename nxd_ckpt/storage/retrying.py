"""A storage that tries again what failed for a reason that may go away by itself: :data:`TRANSIENT` errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.storage.base import DirEntry, Reader, Storage, Writer

TRANSIENT = (ConnectionError, TimeoutError, BlockingIOError)
"""A missing file, a refusal, or a full disk stay what they are."""

T = TypeVar("T")


class RetryingStorage:
    """Repeats every operation that may be done twice, at most ``retries`` times, with growing pauses and jitter.

    :meth:`link_new`, :meth:`exchange` and writes are not repeated, because nothing shows whether the first try arrived:
    their errors are raised.
    """

    def __init__(self, inner: Storage, retries: int = 5, sleep: Callable[[float], None] = time.sleep) -> None:
        self.inner, self._retries, self._sleep = inner, retries, sleep
        self.url, self.renames, self.concurrency = inner.url, inner.renames, inner.concurrency

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return self.repeated(lambda: self.inner.read(key, limit))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.repeated(lambda: self.inner.read_into(key, offset, buffer))

    def open(self, key: str) -> Reader:
        return _RetryingReader(self, self.repeated(lambda: self.inner.open(key)))

    def size(self, key: str) -> int:
        return self.repeated(lambda: self.inner.size(key))

    def is_dir(self, key: str) -> bool:
        return self.repeated(lambda: self.inner.is_dir(key))

    def is_file(self, key: str) -> bool:
        return self.repeated(lambda: self.inner.is_file(key))

    def list(self, key: str = "") -> list[DirEntry]:
        return self.repeated(lambda: self.inner.list(key))

    def write(self, key: str, data: bytes) -> None:
        self.repeated(lambda: self.inner.write(key, data))

    def create(self, key: str, nbytes: int) -> Writer:
        return self.repeated(lambda: self.inner.create(key, nbytes))

    def link_new(self, key: str, data: bytes) -> bool:
        return self.inner.link_new(key, data)

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        return self.inner.exchange(key, expected, data)

    def make_dir(self, key: str) -> None:
        self.repeated(lambda: self.inner.make_dir(key))

    def sync_dir(self, key: str) -> None:
        self.repeated(lambda: self.inner.sync_dir(key))

    def rename(self, source: str, target: str) -> None:
        self.inner.rename(source, target)

    def remove(self, key: str) -> None:
        self.repeated(lambda: self.inner.remove(key))

    def discard_unfinished(self, key: str) -> None:
        self.repeated(lambda: self.inner.discard_unfinished(key))

    def time(self, key: str) -> float:
        return self.repeated(lambda: self.inner.time(key))

    def set_time(self, key: str, seconds: float) -> None:
        self.repeated(lambda: self.inner.set_time(key, seconds))

    def repeated(self, operation: Callable[[], T]) -> T:
        """What ``operation`` returns in the end; raises what its last try raised."""
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

        tries = Retrying(
            retry=retry_if_exception_type(TRANSIENT),
            stop=stop_after_attempt(self._retries + 1),
            wait=wait_random_exponential(multiplier=0.1, max=20),
            sleep=self._sleep,
            reraise=True,
        )
        result: T = tries(operation)
        return result


class _RetryingReader:
    def __init__(self, storage: RetryingStorage, inner: Reader) -> None:
        self._storage, self._inner = storage, inner

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._storage.repeated(lambda: self._inner.read_ranges(ranges))

    def close(self) -> None:
        self._inner.close()
