"""A directory of a file system that the ranks share (local disk, NFS, Lustre)."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TypeVar

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import DirEntry, Reader, Storage, Version, Writer, checked_key, checked_length, completed
from nxd_ckpt.storage.local_files import (
    LocalReader,
    LocalWriter,
    duplicate,
    in_the_way,
    open_regular,
    overwrite,
    stat_of,
    version_of,
)
from nxd_ckpt.storage.system import exchange, naming, sync_path

ResultT = TypeVar("ResultT")


class LocalStorage(Storage):
    """A directory as a storage. ``durable=False`` skips every fsync: for scratch space whose loss is acceptable."""

    renames = True
    may_be_unmounted = True
    duplicates = True
    read_nbytes = 512 * 2**10  # a core's cache holds it until its digest is computed: a fifth less time than 4 MiB

    def __init__(self, root: str | os.PathLike[str], durable: bool = True) -> None:
        self.root: Path = Path(root).absolute()
        self.durable = durable
        self.url: str = str(self.root)
        self._prefix = os.path.join(self.url, "")
        self.concurrency: int = min(_cores(), 8)

    def is_link(self, key: str) -> bool:
        return stat.S_ISLNK(_mode(self._at(key), follow=False))

    def without_links(self) -> LocalStorage:
        return LocalStorage(self.root.resolve(), self.durable)

    def without_syncs(self) -> LocalStorage:
        other = copy(self)
        other.durable = False
        return other

    def path(self, key: str) -> Path:
        return Path(self._at(key))

    def _at(self, key: str) -> str:
        """Return the path as text: a save looks at more than a hundred, and a Path costs more than that."""
        return f"{self._prefix}{checked_key(key, self.url)}" if key else self.url

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return _read(self._at(key), limit)

    def open(self, key: str) -> Reader:
        return LocalReader(self._at(key))

    def size(self, key: str) -> int:
        return stat_of(self._at(key), stat.S_IFREG).st_size

    def is_dir(self, key: str) -> bool:
        return stat.S_ISDIR(_mode(self._at(key)))

    def is_file(self, key: str) -> bool:
        return stat.S_ISREG(_mode(self._at(key)))

    def in_the_way(self, key: str) -> str | None:
        """Return what lies where the directory should be, as "/data/run is a file"; None if nothing does."""
        return in_the_way(self._at(key))

    def list(self, key: str = "") -> list[DirEntry]:
        path = self._at(key)
        try:
            with os.scandir(path) as entries:
                return sorted(DirEntry(entry.name, _is_dir(entry)) for entry in entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise MalformedFile(f"{in_the_way(path) or f'{path} is a file'}, expected a directory") from error
            raise

    def write(self, key: str, data: bytes) -> None:
        temporary = self._write_aside(key, data)
        try:
            _replace(temporary, self._at(key))
        except BaseException:
            _unlink(temporary)
            raise

    def write_reserved(self, reserve: str, key: str, data: bytes) -> None:
        old = self._own(reserve)
        new = self._own(key)
        self._make_parents(new)
        overwrite(old, data, self.durable)
        os.replace(old, new)

    def link_new(self, key: str, data: bytes) -> bool:
        temporary = self._write_aside(key, data)
        try:
            return _link_new(temporary, self._at(key))
        finally:
            _unlink(temporary)

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        # One of several that try moves the file aside. If its content is not the expected one after all, it comes back
        # at once: while it is away, somebody else may take its name. So a file that visibly differs is not moved.
        path = self._own(key)
        aside = _beside(path)
        try:
            if _read(path, DOCUMENT) != expected:
                return False
            os.rename(path, aside)
        except FileNotFoundError:
            return False
        try:
            if _read(aside, DOCUMENT) != expected:
                _link_new(aside, path)
                return False
        finally:
            _unlink(aside)
        return self.link_new(key, data)

    def create(self, key: str, nbytes: int) -> Writer:
        path = self._own(key)
        return self._below(path, lambda: LocalWriter(path, nbytes, self.durable))

    def make_dir(self, key: str) -> None:
        path = self._own(key)
        if key:
            _refuse_link(path)
        missing: list[str] = []
        folder = path
        while not (mode := _mode(folder)) and folder != os.path.dirname(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        if missing or not stat.S_ISDIR(mode):
            _make_dirs(path)
        if not key:
            self._sync_way()
            return
        for folder in missing:
            self._sync(os.path.dirname(folder))

    def sync_dir(self, key: str) -> None:
        self._sync(self._at(key))

    def rename(self, source: str, target: str) -> None:
        # rename(2) replaces an empty directory or a file silently; this contract does not.
        old = self._own(source)
        new = self._own(target)
        if _mode(new, follow=False):
            raise FileExistsError(f"cannot rename {old} to {new}: it exists")
        try:
            self._below(new, lambda: os.rename(old, new))
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise FileExistsError(f"cannot rename {old} to {new}: it exists") from error

    def share(self, source: str, target: str) -> bool:
        try:
            old = self._own(source)
            new = self._own(target)
            if not stat.S_ISREG(_mode(old, follow=False)):
                return False
            self._below(new, lambda: os.link(old, new))
        except OSError as error:
            if error.errno not in {*_NO_LINKS, errno.EEXIST, errno.EMLINK, errno.ELOOP}:
                raise
            return False
        return True

    def swap(self, one: str, other: str) -> bool:
        """Exchange the names of two files or directories atomically; False if the file system cannot."""
        return exchange(self._own(one), self._own(other))

    def remove(self, key: str) -> None:
        path = self._own(key)
        try:
            is_dir = stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return
        if is_dir:
            shutil.rmtree(path)
        else:
            _unlink(path)

    def drop_empty(self, key: str) -> None:
        os.rmdir(self._own(key) if key else self.url)

    def time(self, key: str) -> float:
        return stat_of(self._at(key), stat.S_IFREG, stat.S_IFDIR).st_mtime

    def inode(self, key: str) -> tuple[int, int]:
        """Return the file's or directory's number and its change time (ns), equal on all hosts that share it."""
        status = stat_of(self._at(key), stat.S_IFREG, stat.S_IFDIR)
        return status.st_ino, status.st_ctime_ns

    def version(self, key: str) -> Version:
        return version_of(stat_of(self._at(key), stat.S_IFREG))

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        path = self._own(target)
        self._make_parents(path)
        return duplicate(self._at(source), version, path, self.durable)

    def set_time(self, key: str, seconds: float) -> None:
        os.utime(self._own(key), (seconds, seconds), follow_symlinks=os.utime not in os.supports_follow_symlinks)

    def _own(self, key: str) -> str:
        """Return the path of a key that is about to change: it lies below the root itself, not behind a link."""
        path = self._at(key)
        end = len(self._prefix)
        while (end := path.find("/", end) + 1) and _refuse_link(path[: end - 1]):
            pass
        return path

    def _make_parents(self, path: str) -> None:
        """Make the directories above a file.

        Names below the root are made durable by their writer, the root by its maker.
        """
        if not self.is_dir(""):
            self.make_dir("")
        _make_dirs(os.path.dirname(path))

    def _below(self, path: str, act: Callable[[], ResultT]) -> ResultT:
        """Return the result of ``act``, which needs the directories above ``path``: nearly always they are there.

        Another process may remove those that it needs no more before anything is in them, and they are made again.
        """
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                return act()
            with suppress(FileNotFoundError, FileExistsError):
                self._make_parents(path)
        self._make_parents(path)
        return act()

    def _sync_way(self) -> None:
        """Make the root's name, and those above it, durable: their makers may not have done that."""
        for folder in (self.root.resolve(), *self.root.resolve().parents):
            if os.path.ismount(folder):
                return
            try:
                self._sync(folder.parent)
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise

    def _sync(self, folder: str | Path) -> None:
        if self.durable:
            sync_path(folder)

    def _write_aside(self, key: str, data: bytes) -> str:
        """Write ``data`` to a file of its own beside ``key``, check its length, sync it, and return its path."""
        path = self._own(key)
        temporary = _beside(path)
        writer = self._below(path, lambda: LocalWriter(temporary, len(data), self.durable))
        with completed(writer):
            writer.write_at(0, data)
        return temporary


_TRIES = 2
"""Further times that directories are made which another process removes at once."""

_NO_LINKS = {errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV}
"""Errors of link(2) on file systems without hard links (FAT, mounted object stores)."""

_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF}
"""Errors of stat(2) if there is no such file, or a link leads nowhere."""

_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL}
"""Errors of a directory that others made and we may not read, or of a file system without syncs."""


def _read(path: str, limit: int) -> bytes:
    fd, nbytes = open_regular(path)
    try:
        checked_length(nbytes, limit, path)
        with naming(path):
            return b"".join(iter(lambda: os.read(fd, nbytes + 1), b""))
    finally:
        os.close(fd)


def _beside(path: str) -> str:
    """Return the path of a new hidden file in the same directory."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name[:200]}.{uuid.uuid4().hex[:12]}")


def _link_new(old: str, new: str) -> bool:
    """Give a file another name; False if that is taken. Afterwards the old one may be gone."""
    # link(2) fails if the name exists and is atomic on NFS too, where O_EXCL has a history of not being.
    try:
        os.link(old, new)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _claim(old, new)
    return True


def _claim(written: str, path: str) -> bool:
    """Give the content of a file a name on a file system without links; False if the name is taken.

    It is written under that name: to rename the file would replace what another process, which took this one for dead
    while it stood still, has put there since.
    """
    data = _read(written, DOCUMENT)
    try:
        writer = LocalWriter(path, len(data), True)
    except FileExistsError:
        return False
    with completed(writer):
        writer.write_at(0, data)
    with suppress(FileNotFoundError):
        return _read(path, DOCUMENT) == data
    return False


def _replace(old: str, new: str) -> None:
    """Give a small file its name. Raises OSError, which says what to do where nothing can be renamed."""
    try:
        os.replace(old, new)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise OSError(
            error.errno,
            "nothing can be renamed here, as on a bucket that mountpoint-s3 mounts. Pass the store itself as the path, "
            "s3://BUCKET/FOLDER: it has all that a directory has",
            new,
        ) from error


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _make_dirs(path: str) -> None:
    """Make a directory, and those above it, if it does not exist."""
    try:
        _make_dir(path)
    except FileNotFoundError:
        above = os.path.dirname(path)
        if path == above:
            raise
        _make_dirs(above)
        _make_dir(path)  # /proc, for one, makes none though it is there


def _make_dir(path: str) -> None:
    try:
        os.mkdir(path)
    except FileNotFoundError:
        raise
    except OSError as error:  # of several errors a system may tell another than that it exists
        if os.path.isdir(path):
            return
        obstacle = in_the_way(path)
        if obstacle is None:
            raise
        advice = "move it away, or choose another path"
        raise type(error)(error.errno, f"{obstacle}, expected a directory: {advice}") from error


def _refuse_link(folder: str) -> bool:
    """Return whether the folder exists. Raises OSError for a link."""
    mode = _mode(folder, follow=False)
    if stat.S_ISLNK(mode):
        raise OSError(
            errno.ELOOP,
            "is a link: nothing is written, moved or removed through one, as it may lead out of the directory; "
            "replace it by its target, or remove it",
            folder,
        )
    return bool(mode)


def _mode(path: str, *, follow: bool = True) -> int:
    """Return the mode from stat(2); 0 if nothing is there. Raises OSError if that is unknown, as for a stale handle.

    Newer versions of Python no longer tell the two apart.
    """
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        return 0


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a directory that we may not read
        return False


def _cores() -> int:
    """Return the number of cores this process may use, if the system tells; else of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
