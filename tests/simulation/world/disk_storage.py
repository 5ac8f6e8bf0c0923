"""A :class:`~nxd_ckpt.storage.base.Storage` on a simulated disk: the system calls of ``LocalStorage``, in its order."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from copy import copy
from functools import lru_cache, partial
from threading import RLock

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import DirEntry, Reader, Storage, Version, Writer, checked_key, checked_length
from tests.simulation.world.disk import Disk, File, Folder, Unanswered

Turn = Callable[[str, str], None]
"""Called with the name of a system call (``look`` for one that changes nothing) and a path, before it happens: what it
raises is what fails, and while it waits, others run."""

_checked = lru_cache(8192)(partial(checked_key, where="disk:"))


class DiskStorage(Storage):
    """Keys below the root of ``disk``, as one process sees them. ``swaps``: whether the file system can exchange names.
    """

    renames = duplicates = True
    concurrency = 2
    read_nbytes = CRC_BLOCK
    _path = staticmethod(_checked)

    def __init__(self, disk: Disk, turn: Turn = lambda call, path: None, *, swaps: bool = True) -> None:
        self.disk, self._turn, self._swaps = disk, turn, swaps
        self.url, self._syncs = "disk:", True
        self._lock = RLock()  # never held while others run

    def without_syncs(self) -> DiskStorage:
        other = copy(self)
        other._syncs = False
        return other

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        file = self._file(key)
        checked_length(len(file.data), limit, self._where(key))
        return bytes(file.data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, buffer)])

    def open(self, key: str) -> Reader:
        return _Reader(self, key, self._file(key))

    def size(self, key: str) -> int:
        return len(self._file(key).data)

    def is_dir(self, key: str) -> bool:
        self._turn("look", key)
        return isinstance(self.disk.find(self._path(key)), Folder)

    def is_file(self, key: str) -> bool:
        self._turn("look", key)
        return isinstance(self.disk.find(self._path(key)), File)

    def list(self, key: str = "") -> list[DirEntry]:
        self._turn("look", key)
        node = self.disk.find(self._path(key))
        if node is None:
            return []
        if isinstance(node, File):
            raise MalformedFile(f"{self._where(key)} is a file, expected a directory")
        return [DirEntry(*listed) for listed in node.listing()]

    def write(self, key: str, data: bytes) -> None:
        aside = self._write_aside(key, data)
        try:
            self._call("rename", key, lambda: self.disk.rename(aside, self._path(key)))
        except BaseException:
            self._discard(aside)
            raise

    def create(self, key: str, nbytes: int) -> Writer:
        self._make_parents(key)
        return _Writer(self, key, nbytes)

    def link_new(self, key: str, data: bytes) -> bool:
        aside = self._write_aside(key, data)
        try:
            file = self.disk.file(aside)
            self._call("link", key, lambda: self.disk.link(file, self._path(key)))
        except FileExistsError:
            return False
        finally:
            self._discard(aside)
        return True

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        aside, path = self._aside(key), self._path(key)
        try:
            if self.read(key) != expected:
                return False
            self._call("rename", key, lambda: self.disk.rename(path, aside))
        except FileNotFoundError:
            return False
        moved = self.disk.file(aside)
        if is_other := bytes(moved.data) != expected:
            with suppress(FileExistsError):
                self._call("link", key, lambda: self.disk.link(moved, path))
        self._discard(aside)
        return not is_other and self.link_new(key, data)

    def make_dir(self, key: str) -> None:
        made = self._make_folders(self._path(key))
        for folder in reversed(made):
            self.sync_dir(folder.rpartition("/")[0])

    def sync_dir(self, key: str) -> None:
        self._call("fsync", key, lambda: self.disk.sync(self.disk.folder(self._path(key))))

    def sync_file(self, key: str) -> None:
        """Make a file's bytes durable, whoever wrote them."""
        self._call("fsync", key, self._file(key).sync)

    def rename(self, source: str, target: str) -> None:
        old, new = self._path(source), self._path(target)

        def rename() -> None:
            if self.disk.find(new) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._where(target))
            self.disk.rename(old, new)

        self._make_parents(target)
        self._call("rename", f"{source} -> {target}", rename)

    def swap(self, one: str, other: str) -> bool:
        if self._swaps:
            self._call("rename", f"{one} <-> {other}", lambda: self.disk.exchange(self._path(one), self._path(other)))
        return self._swaps

    def share(self, source: str, target: str) -> bool:
        file = self._file(source)
        self._make_parents(target)
        try:
            self._call("link", target, lambda: self.disk.link(file, self._path(target)))
        except FileExistsError:
            return False
        return True

    def remove(self, key: str) -> None:
        node = self.disk.find(self._path(key))
        if node is None:
            return
        if isinstance(node, Folder):
            for name in node.names_to_remove():
                self.remove(f"{key}/{name}")
        with suppress(FileNotFoundError):
            self._call("unlink", key, lambda: self.disk.unlink(self._path(key)))

    def discard_unfinished(self, key: str) -> None:
        """Nothing: what is unfinished lies among the files, and goes with them."""

    def time(self, key: str) -> float:
        self._turn("look", key)
        node = self.disk.find(self._path(key))
        return node.time if isinstance(node, File) else self._file(key).time

    def set_time(self, key: str, seconds: float) -> None:
        def set_time() -> None:
            self.disk.file(self._path(key)).time = seconds

        self._call("utime", key, set_time)

    def version(self, key: str) -> Version:
        return _version(self._file(key))

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        self._make_parents(target)
        file = self._file(source)
        if _version(file) != version:
            return False
        self._call("fsync", source, file.sync)
        self._call("link", target, lambda: self.disk.link(self.disk.file(self._path(source)), self._path(target)))
        if self._file(target) is not file:
            self._discard(self._path(target))
            return False
        return True

    def _file(self, key: str) -> File:
        self._turn("look", key)
        return self.disk.file(self._path(key))

    def _call(self, call: str, path: str, act: Callable[[], object]) -> None:
        if call == "fsync" and not self._syncs:
            return
        lost = None
        try:
            self._turn(call, path)
        except Unanswered as error:
            lost = error
        with self._lock:
            act()
        if lost is not None:
            raise lost

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _aside(self, key: str) -> str:
        parent, _, name = self._path(key).rpartition("/")
        self.disk.asides += 1
        return f"{parent}/.{name}.{self.disk.asides}".lstrip("/")

    def _write_aside(self, key: str, data: bytes) -> str:
        """``data`` in a synced file of its own beside ``key``."""
        self._make_parents(key)
        aside = self._aside(key)
        writer = _Writer(self, aside, len(data))
        try:
            writer.write_at(0, data)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        return aside

    def _discard(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._call("unlink", path, lambda: self.disk.unlink(path))

    def _make_parents(self, key: str) -> None:
        parent = self._path(key).rpartition("/")[0]
        if parent and not isinstance(self.disk.find(parent), Folder):
            self._make_folders(parent)

    def _make_folders(self, path: str) -> Sequence[str]:
        """Make it with those above it; those that were missing, from top to bottom."""
        made = []
        parts = path.split("/") if path else []
        for folder in ("/".join(parts[: depth + 1]) for depth in range(len(parts))):
            if isinstance(self.disk.find(folder), Folder):
                continue
            with suppress(FileExistsError):  # another process was faster
                self._call("mkdir", folder, lambda folder=folder: self.disk.make_folder(folder))  # type: ignore[misc]
                made.append(folder)
            self.disk.folder(folder)
        return made

    def _missing(self, key: str, nbytes: int, offset: int) -> EOFError:
        return EOFError(f"{self._where(key)}: {nbytes} bytes missing at byte {offset}")


def _version(file: File) -> Version:
    return Version(len(file.data), f"{id(file)} {file.time}")


class _Reader:
    """Goes on reading the file that it opened, whatever becomes of its name."""

    def __init__(self, storage: DiskStorage, key: str, file: File) -> None:
        self._storage, self._key, self._file = storage, key, file

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._storage._turn("look", self._key)
        for offset, buffer in ranges:
            view = memoryview(buffer).cast("B")
            found = self._file.data[offset : offset + len(view)]
            view[: len(found)] = found
            if len(found) < len(view):
                raise self._storage._missing(self._key, len(view) - len(found), offset + len(found))

    def close(self) -> None:
        """Nothing is held."""


class _Writer:
    """Copies what it was given as late as it may: a caller that reuses its memory too early writes something else."""

    def __init__(self, storage: DiskStorage, key: str, nbytes: int) -> None:
        self._storage, self._key, self._nbytes = storage, key, nbytes
        self._pending: list[tuple[int, memoryview]] = []
        self._written, self._is_open = 0, True
        made: list[File] = []
        storage._call("create", key, lambda: made.append(storage.disk.create(storage._path(key))))
        self._file = made[0]

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        self._pending.append((offset, memoryview(data).cast("B")))

    def settle(self) -> None:
        for offset, view in self._pending:
            self._storage._turn("write", self._key)
            data = self._file.data
            data.extend(bytes(max(offset + len(view) - len(data), 0)))
            data[offset : offset + len(view)] = view
            self._written += len(view)
        self._pending.clear()

    def close(self) -> None:
        try:
            self.settle()
            if not self._written == len(self._file.data) == self._nbytes:
                raise OSError(f"{self._key}: wrote {self._written} bytes, expected {self._nbytes}")
            try:
                self._storage._call("fsync", self._key, self._file.sync)
            except OSError:
                self._file.drops_pages = True
                raise
            self._is_open = False
        finally:
            self.abort()

    def abort(self) -> None:
        self._pending.clear()
        if self._is_open:
            self._is_open = False
            with suppress(OSError):
                self._storage._discard(self._storage._path(self._key))
