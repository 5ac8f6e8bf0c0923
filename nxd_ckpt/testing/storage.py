"""Storage doubles: a wrapper that calls a hook before every operation, and hooks that record, fail, delay or kill.

::

    log: list[Operation] = []
    storage = HookedStorage(LocalStorage(path), recording(log))
    storage = HookedStorage(LocalStorage(path), failing("write_at", "optim/*", OSError(errno.ENOSPC, "full")))
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from nxd_ckpt.storage.base import Duplicating, Reader, Storage, Swapping, Version, Writer
from nxd_ckpt.storage.wrapper import StorageWrapper

T = TypeVar("T")


class Operation(NamedTuple):
    """One call on a storage: the method's name and the key.

    Methods of writers are ``write_at`` and ``close``, of readers ``read_ranges``. ``nbytes`` are the bytes that
    ``read_into`` and ``read_ranges`` request, that ``write`` and ``write_at`` write, or those of the file that
    ``duplicate`` duplicates.
    """

    name: str
    key: str
    nbytes: int = 0


Hook = Callable[[Operation], None]


class HookedStorage(StorageWrapper):
    """A storage that calls ``hook`` before every operation, which fails if the hook raises."""

    def __init__(self, inner: Storage, hook: Hook) -> None:
        super().__init__(inner)
        self.hook = hook

    def around(self, name: str, key: str, operation: Callable[[], T]) -> T:
        self.hook(Operation(name, key))
        return operation()

    def write(self, key: str, data: bytes) -> None:
        self.hook(Operation("write", key, len(data)))
        self.inner.write(key, data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.hook(Operation("read_into", key, len(buffer)))
        self.inner.read_into(key, offset, buffer)

    def open(self, key: str) -> Reader:
        return _HookedReader(super().open(key), key, self.hook)

    def create(self, key: str, nbytes: int) -> Writer:
        return _HookedWriter(super().create(key, nbytes), key, self.hook)

    def swap(self, one: str, other: str) -> bool:
        self.hook(Operation("swap", f"{one} <-> {other}"))
        return isinstance(self.inner, Swapping) and self.inner.swap(one, other)

    def version(self, key: str) -> Version:
        self.hook(Operation("version", key))
        if not isinstance(self.inner, Duplicating):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), key)
        return self.inner.version(key)

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        self.hook(Operation("duplicate", f"{source} -> {target}", version.nbytes))
        return isinstance(self.inner, Duplicating) and self.inner.duplicate(source, version, target)


class _HookedReader:
    def __init__(self, inner: Reader, key: str, hook: Hook) -> None:
        self._inner, self._key, self._hook = inner, key, hook

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._hook(Operation("read_ranges", self._key, sum(len(buffer) for _, buffer in ranges)))
        self._inner.read_ranges(ranges)

    def close(self) -> None:
        self._inner.close()


class _HookedWriter:
    def __init__(self, inner: Writer, key: str, hook: Hook) -> None:
        self._inner, self._key, self._hook = inner, key, hook

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._hook(Operation("write_at", self._key, len(data)))
        self._inner.write_at(offset, data)

    def settle(self) -> None:
        self._hook(Operation("settle", self._key))
        self._inner.settle()

    def close(self) -> None:
        self._hook(Operation("close", self._key))
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


def recording(log: list[Operation]) -> Hook:
    """Return a hook that appends every operation to ``log``."""
    return log.append


def failing(name: str, pattern: str, error: BaseException, after: int = 0) -> Hook:
    """Return a hook that raises ``error`` at operations ``name`` with keys like ``pattern``, after the first ``after``.
    """
    seen = 0

    def hook(operation: Operation) -> None:
        nonlocal seen
        if operation.name == name and fnmatchcase(operation.key, pattern):
            seen += 1
            if seen > after:
                raise error

    return hook


def delaying(name: str, pattern: str, seconds: float) -> Hook:
    """Return a hook that sleeps before operations ``name`` whose key matches the glob ``pattern``."""

    def hook(operation: Operation) -> None:
        if operation.name == name and fnmatchcase(operation.key, pattern):
            time.sleep(seconds)

    return hook


def killing(name: str, pattern: str) -> Hook:
    """Return a hook that SIGKILLs this process before an operation ``name`` whose key matches the glob ``pattern``."""

    def hook(operation: Operation) -> None:
        if operation.name == name and fnmatchcase(operation.key, pattern):
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def chained(*hooks: Hook) -> Hook:
    """Return a hook that calls all of ``hooks``, in order."""

    def hook(operation: Operation) -> None:
        for each in hooks:
            each(operation)

    return hook
