"""Storage doubles: a store in memory, and a wrapper whose hooks see every operation: they record, fail, delay or kill.

::

    log: list[Operation] = []
    storage = HookedStorage(LocalStorage(path), recording(log))
    storage = HookedStorage(LocalStorage(path), failing("write_at", "optim/*", OSError(errno.ENOSPC, "full")))
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.storage.base import DirEntry, MemoryReader, Reader, Storage, Version, Writer, checked_length
from nxd_ckpt.storage.wrapper import StorageWrapper


@dataclass
class _Store:
    """The content that all storages of one name share. ``writers`` are those that neither closed nor aborted."""

    files: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    writers: list[_MemoryWriter] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)


_stores: dict[str, _Store] = {}


class MemoryStorage(Storage):
    """Keys in memory, shared by all storages of the same ``name`` in this process; without a name, a new store.

    It is an object store, as awkward as the contract allows, so that code which works here works elsewhere: a writer
    reads the given memory as late as it may, a key that was taken meanwhile is refused when the writer closes, times
    are whole seconds. For a file system there is `LocalStorage`.
    """

    duplicates = True

    def __init__(self, name: str | None = None) -> None:
        self.name: str = name if name is not None else uuid.uuid4().hex[:12]
        self.url: str = f"memory://{self.name}"
        self.concurrency = 2
        self.read_nbytes = 3 * CRC_BLOCK
        self._store = _stores.setdefault(self.name, _Store())

    @property
    def keys(self) -> list[str]:
        """Every key, sorted."""
        with self._store.lock:
            return sorted(self._store.files)

    @property
    def unfinished(self) -> list[str]:
        """Keys of writers that neither closed nor aborted, sorted."""
        with self._store.lock:
            return sorted(writer.key for writer in self._store.writers)

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        data = self._file(key)[0]
        checked_length(len(data), limit, f"{self.url}/{key}")
        return data

    def open(self, key: str) -> Reader:
        return MemoryReader(self._file(key)[0], f"{self.url}/{key}")

    def size(self, key: str) -> int:
        return len(self._file(key)[0])

    def is_dir(self, key: str) -> bool:
        with self._store.lock:
            return any(self._below(key))

    def is_file(self, key: str) -> bool:
        with self._store.lock:
            return key in self._store.files

    def list(self, key: str = "") -> list[DirEntry]:
        prefix = f"{key}/" if key else ""
        with self._store.lock:
            files = [name[len(prefix) :].partition("/") for name in self._below(key)]
        return sorted({DirEntry(name, bool(slash)) for name, slash, _ in files})

    def write(self, key: str, data: bytes) -> None:
        with self._store.lock:
            self._put(key, data)

    def create(self, key: str, nbytes: int) -> Writer:
        writer = _MemoryWriter(self, key, nbytes)
        with self._store.lock:
            self._store.writers.append(writer)
        return writer

    def link_new(self, key: str, data: bytes) -> bool:
        with self._store.lock:
            if key in self._store.files:
                return False
            self._put(key, data)
            return True

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        with self._store.lock:
            if key not in self._store.files or self.read(key) != expected:
                return False
            self._put(key, data)
            return True

    def remove(self, key: str) -> None:
        self.remove_if(key, lambda: True)

    def remove_if(self, key: str, confirm: Callable[[], bool]) -> bool:
        with self._store.lock:
            files = {name: self._store.files[name] for name in [key, *self._below(key)] if name in self._store.files}
        if files and not confirm():
            return False
        with self._store.lock:
            for name, file in files.items():
                if self._store.files.get(name) is file:
                    del self._store.files[name]
        return True

    def discard_unfinished(self, key: str) -> None:
        with self._store.lock:
            self._store.writers = [each for each in self._store.writers if not each.key.startswith(f"{key}/")]

    def time(self, key: str) -> float:
        return self._file(key)[1]

    def version(self, key: str) -> Version:
        data = self._file(key)[0]
        return Version(len(data), str(id(data)))

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        with self._store.lock:
            if self.version(source) != version or target in self._store.files:
                return False
            self._put(target, self._file(source)[0])
            return True

    def complete(self, writer: _MemoryWriter, data: bytes) -> None:
        """Put a writer's bytes under its key. Raises FileExistsError if the key was taken meanwhile."""
        with self._store.lock:
            if writer not in self._store.writers:
                raise OSError(f"{self.url}/{writer.key}: its upload was discarded")
            self._store.writers.remove(writer)
            if writer.key in self._store.files:
                raise FileExistsError(f"{self.url}/{writer.key} was written by somebody else meanwhile")
            self._put(writer.key, data)

    def forget(self, writer: _MemoryWriter) -> None:
        """Drop a writer that gives up."""
        with self._store.lock:
            if writer in self._store.writers:
                self._store.writers.remove(writer)

    def _below(self, key: str) -> Sequence[str]:
        return [name for name in self._store.files if not key or name.startswith(f"{key}/")]

    def _file(self, key: str) -> tuple[bytes, float]:
        with self._store.lock:
            if key not in self._store.files:
                raise FileNotFoundError(f"{self.url}/{key} does not exist")
            return self._store.files[key]

    def _put(self, key: str, data: bytes) -> None:
        self._store.files[key] = (bytes(data), float(int(time.time())))


class _MemoryWriter:
    """A writer that copies its data as late as it may: reusing the memory too early writes other bytes."""

    def __init__(self, storage: MemoryStorage, key: str, nbytes: int) -> None:
        self.key = key
        self._storage = storage
        self._data = bytearray(nbytes)
        self._written = 0
        self._pending: list[tuple[int, memoryview]] = []

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._pending.append((offset, memoryview(data).cast("B")))

    def settle(self) -> None:
        for offset, view in self._pending:
            if offset + len(view) > len(self._data):
                raise OSError(f"{self._where}: byte {offset + len(view)} written, {len(self._data)} expected")
            self._data[offset : offset + len(view)] = view
            self._written += len(view)
        self._pending.clear()

    def close(self) -> None:
        try:
            self.settle()
            if self._written != len(self._data):
                raise OSError(f"{self._where}: wrote {self._written} bytes, expected {len(self._data)}")
            self._storage.complete(self, bytes(self._data))
        finally:
            self.abort()

    def abort(self) -> None:
        self._pending.clear()
        self._storage.forget(self)

    @property
    def _where(self) -> str:
        return f"{self._storage.url}/{self.key}"


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
        self.hook: Hook = hook
        self.duplicates: bool = inner.duplicates

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
        return self.inner.swap(one, other)

    def version(self, key: str) -> Version:
        self.hook(Operation("version", key))
        return self.inner.version(key)

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        self.hook(Operation("duplicate", f"{source} -> {target}", version.nbytes))
        return self.inner.duplicate(source, version, target)


class _HookedReader:
    def __init__(self, inner: Reader, key: str, hook: Hook) -> None:
        self._inner = inner
        self._key = key
        self._hook = hook

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._hook(Operation("read_ranges", self._key, sum(len(buffer) for _, buffer in ranges)))
        self._inner.read_ranges(ranges)

    def close(self) -> None:
        self._inner.close()


class _HookedWriter:
    def __init__(self, inner: Writer, key: str, hook: Hook) -> None:
        self._inner = inner
        self._key = key
        self._hook = hook

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

    def fail() -> None:
        nonlocal seen
        seen += 1
        if seen > after:
            raise error

    return _at(name, pattern, fail)


def delaying(name: str, pattern: str, seconds: float) -> Hook:
    """Return a hook that sleeps before operations ``name`` whose key matches the glob ``pattern``."""
    return _at(name, pattern, lambda: time.sleep(seconds))


def killing(name: str, pattern: str) -> Hook:
    """Return a hook that SIGKILLs this process before an operation ``name`` whose key matches the glob ``pattern``."""
    return _at(name, pattern, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _at(name: str, pattern: str, act: Callable[[], None]) -> Hook:
    def hook(operation: Operation) -> None:
        if operation.name == name and fnmatchcase(operation.key, pattern):
            act()

    return hook


def chained(*hooks: Hook) -> Hook:
    """Return a hook that calls all of ``hooks``, in order."""

    def hook(operation: Operation) -> None:
        for each in hooks:
            each(operation)

    return hook
