"""Storages that wrap other ones: their base classes, several storages as one, and retries.

A storage with retries repeats operations after errors that may go away by themselves (`TRANSIENT`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nxd_ckpt import effects
from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.storage.base import DirEntry, Reader, Storage

T = TypeVar("T")


def _passed_on(name: str) -> Any:
    """Return the method ``name`` of a `StorageWrapper`, whose first argument is a key."""

    def method(wrapper: StorageWrapper, key: str = "", *more: Any, **named: Any) -> Any:
        return wrapper.around(name, key, lambda: getattr(wrapper.inner, name)(key, *more, **named))

    return method


class StorageWrapper(Storage):
    """A storage that passes every operation on to ``inner`` through `around`, which subclasses override."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url: str = inner.url
        self.renames: bool = inner.renames
        self.concurrency: int = inner.concurrency
        self.read_nbytes: int = inner.read_nbytes
        self.may_lack_files: bool = inner.may_lack_files
        self.may_be_unmounted: bool = inner.may_be_unmounted

    def is_link(self, key: str) -> bool:
        return self.inner.is_link(key)

    def without_links(self) -> Storage | None:
        return self.inner.without_links()

    def around(self, name: str, key: str, operation: Callable[[], T]) -> T:
        """Return the result of the method ``name``, called for ``key``; ``operation`` calls it on ``inner``."""
        return operation()

    read = _passed_on("read")
    read_into = _passed_on("read_into")
    open = _passed_on("open")
    size = _passed_on("size")
    is_dir = _passed_on("is_dir")
    is_file = _passed_on("is_file")
    list = _passed_on("list")
    write = _passed_on("write")
    create = _passed_on("create")
    link_new = _passed_on("link_new")
    exchange = _passed_on("exchange")
    make_dir = _passed_on("make_dir")
    sync_dir = _passed_on("sync_dir")
    remove = _passed_on("remove")
    drop_empty = _passed_on("drop_empty")
    discard_unfinished = _passed_on("discard_unfinished")
    time = _passed_on("time")
    set_time = _passed_on("set_time")

    def rename(self, source: str, target: str) -> None:
        self.around("rename", f"{source} -> {target}", lambda: self.inner.rename(source, target))

    def share(self, source: str, target: str) -> bool:
        return self.around("share", f"{source} -> {target}", lambda: self.inner.share(source, target))


class RoutedStorage(StorageWrapper):
    """A wrapped storage of which some files are read from elsewhere: subclasses choose the place."""

    def _at(self, key: str) -> Storage:
        """Return the storage from which the file ``key`` is read."""
        raise NotImplementedError

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return self._at(key).read(key, limit)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._at(key).read_into(key, offset, buffer)

    def open(self, key: str) -> Reader:
        return self._at(key).open(key)

    def size(self, key: str) -> int:
        return self._at(key).size(key)


class LayeredStorage(RoutedStorage):
    """The first of ``places``, except for the files ``elsewhere``: each is read from the place of that number.

    They are also listed as if the first place had them. No other place is asked: a file that was verified in one place
    is not read from another.
    """

    def __init__(self, places: Sequence[Storage], elsewhere: Mapping[str, int]) -> None:
        super().__init__(places[0])
        self._places = places
        self._elsewhere = elsewhere
        self.used: list[Storage] = [places[number] for number in sorted({0, *elsewhere.values()})]
        self.renames: bool = all(place.renames for place in self.used)
        self.concurrency: int = max(place.concurrency for place in self.used)
        self.read_nbytes: int = max(place.read_nbytes for place in self.used)

    def around(self, name: str, key: str, operation: Callable[[], T]) -> T:
        raise OSError(errno.EROFS, f"{name}: a storage of several places is read-only", f"{self.url}/{key}")

    def _at(self, key: str) -> Storage:
        return self._places[self._elsewhere.get(key, 0)]

    def time(self, key: str) -> float:
        return self._at(key).time(key)

    def is_file(self, key: str) -> bool:
        return key in self._elsewhere or self.inner.is_file(key)

    def is_dir(self, key: str) -> bool:
        return self.inner.is_dir(key) or bool(self._taken_below(key))

    def list(self, key: str = "") -> list[DirEntry]:
        return sorted({*self.inner.list(key), *self._taken_below(key)})

    def _taken_below(self, key: str) -> set[DirEntry]:
        """Return the entries in the directory ``key`` of files that are elsewhere."""
        prefix = f"{key}/" if key else ""
        below = (file.removeprefix(prefix).partition("/") for file in self._elsewhere if file.startswith(prefix))
        return {DirEntry(name, bool(slash)) for name, slash, _ in below}


TRANSIENT = (ConnectionError, TimeoutError, BlockingIOError)
"""Errors that may go away. A missing file, a refusal, or a full disk do not."""

_ONCE = ("link_new", "exchange", "rename")
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 20.0
"""Seconds before an operation is repeated, at most: `_FIRST_PAUSE` at first, doubled each time up to this."""



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
        self._storage = storage
        self._inner = inner

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._storage.repeated(lambda: self._inner.read_ranges(ranges))

    def close(self) -> None:
        self._inner.close()
