"""One file of a directory: opened with a check of its kind, read in few system calls, written past the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import Version
from nxd_ckpt.storage.system import clone, flags, naming, read_at, sync_file, write_at

NEW_FILE = flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_CLOEXEC")

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path | str) -> tuple[int, int]:
    """Return a descriptor to read a file, and its size in bytes. Opening a FIFO would block: this never does.

    Raises:
        MalformedFile: it is no regular file, nor a link to one.
    """
    try:
        fd = os.open(path, flags("O_RDONLY", "O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY"))
    except OSError as error:
        raise _of_path(error, path) from error
    try:
        return fd, _checked(os.fstat(fd), path, stat.S_IFREG).st_size
    except BaseException:
        os.close(fd)
        raise


def stat_of(path: Path | str, *kinds: int) -> os.stat_result:
    """Return the result of stat(2). Raises MalformedFile for anything but these kinds."""
    try:
        return _checked(os.stat(path), path, *kinds)
    except OSError as error:
        raise _of_path(error, path) from error


def in_the_way(path: str) -> str | None:
    """Return what lies where a directory should be, itself or one above: "/data/run is a file"; None if nothing does.
    """
    place = next(filter(os.path.lexists, (path, *map(str, Path(path).parents))), None)
    if place is None or os.path.isdir(place):
        return None
    try:
        return f"{place} is {_KINDS.get(stat.S_IFMT(os.stat(place).st_mode), 'something else')}"
    except OSError:
        return f"{place} is a link that leads nowhere"


def _checked(status: os.stat_result, path: Path | str, *kinds: int) -> os.stat_result:
    kind = stat.S_IFMT(status.st_mode)
    if kind not in kinds:
        raise MalformedFile(f"{path} is {_KINDS.get(kind, 'something else')}, expected {_KINDS[kinds[0]]}")
    return status


def _of_path(error: OSError, path: Path | str) -> Exception:
    """Return the exception to raise for an error of opening a file."""
    if error.errno == errno.ENOTDIR or (error.errno == errno.ELOOP and not os.path.islink(path)):
        # A file, or a link to itself, stands where one of its directories should.
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if error.errno in (errno.ELOOP, errno.ENXIO) or (error.errno == errno.ENOENT and os.path.islink(path)):
        what = "a socket" if error.errno == errno.ENXIO else f"a link that leads nowhere ({error.strerror})"
        return MalformedFile(f"{path} is {what}, expected a file")
    return error


def version_of(status: os.stat_result) -> Version:
    """Return the version. It has no time that changes with the number of links."""
    return Version(status.st_size, f"{status.st_dev} {status.st_ino} {status.st_mtime_ns}")


def overwrite(path: str, data: bytes, durable: bool) -> None:
    """Overwrite an existing file with these bytes, in its blocks."""
    fd = os.open(path, flags("O_WRONLY", "O_CLOEXEC", "O_NOFOLLOW"))
    try:
        with naming(path):
            _write_all(fd, memoryview(data), 0)
            os.ftruncate(fd, len(data))
            if durable:
                sync_file(fd)
    finally:
        os.close(fd)


def duplicate(source: str, version: Version, target: str, durable: bool) -> bool:
    """Give the free path ``target`` the bytes of ``source``, if it still has ``version``; False otherwise.

    The new file shares the blocks on the disk if the file system can, else it is another name for the same file.
    """
    fd, _ = open_regular(source)
    try:
        if version_of(os.fstat(fd)) != version:
            return False
        if durable:
            sync_file(fd)  # its writer may not have synced it
        if _clone(fd, target, durable):
            return True
        os.link(source, target)
    finally:
        os.close(fd)
    if version_of(os.lstat(target)) != version:  # the name leads to another file by now, or to a link
        os.unlink(target)
        return False
    return True


def _clone(fd: int, target: str, durable: bool) -> bool:
    """Make a new file with the same blocks on the disk, which are copied if one of the two is written to."""
    new = os.open(target, NEW_FILE, 0o666)
    try:
        cloned = clone(fd, new)
        if cloned and durable:
            sync_file(new)
    except BaseException:
        os.unlink(target)
        raise
    finally:
        os.close(new)
    if not cloned:
        os.unlink(target)
    return cloned


class LocalReader:
    """A reader in which neighbouring ranges share a system call, which also reads the bytes between them."""

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._fd, _ = open_regular(path)

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for offset, buffers in _runs(ranges):
            self._read(offset, buffers)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _read(self, offset: int, buffers: list[memoryview]) -> None:
        left = sum(map(len, buffers))
        while left:
            with naming(self._path):
                count = read_at(self._fd, buffers, offset)
            if count == 0:
                raise EOFError(f"{self._path}: {left} bytes missing at byte {offset}")
            left -= count
            offset += count
            if left:
                buffers = _after(count, buffers)


_HOLE = memoryview(bytearray(8 * 2**10))
"""Memory for bytes between ranges, as long as it pays to read them. It is never read."""
_BUFFERS = 1000
"""Maximum number of buffers of a system call; Linux takes 1,024."""
_BYTES = 2**30
"""Approximate maximum bytes of a system call; some systems refuse more than twice as many."""


def _runs(ranges: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield (offset, buffers to be filled one after the other) of every system call."""
    begin = 0
    end = 0
    buffers: list[memoryview] = []
    for offset, buffer in ranges:
        if buffers and 0 <= offset - end <= len(_HOLE) and len(buffers) < _BUFFERS and offset - begin < _BYTES:
            if offset > end:
                buffers.append(_HOLE[: offset - end])
        else:
            if buffers:
                yield begin, buffers
            begin = offset
            buffers = []
        buffers.append(buffer)
        end = offset + len(buffer)
    if buffers:
        yield begin, buffers


def _after(count: int, buffers: list[memoryview]) -> list[memoryview]:
    """Return ``buffers`` without their first ``count`` bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


class LocalWriter:
    """A writer whose large aligned writes bypass the page cache if the file system allows it.

    Direct writes cost what the disk costs; buffered ones are copied first, and their sync then competes with every
    other dirty page of the host. Where a file system refuses (tmpfs, some network ones), all writes are buffered.
    """

    def __init__(self, path: str, nbytes: int, durable: bool) -> None:
        self._path = path
        self._nbytes = nbytes
        self._durable = durable
        self._fd = os.open(path, NEW_FILE, 0o666)
        self._direct = -1
        if durable and nbytes >= _DIRECT_FROM:
            with contextlib.suppress(OSError, AttributeError):  # no O_DIRECT on this system, or not on this disk
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        first = -offset % _ALIGNMENT
        with naming(self._path):
            last = first + self._write_direct(offset + first, view[first:])
            _write_all(self._fd, view[:first], offset)
            _write_all(self._fd, view[last:], offset + last)

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write the leading part that direct IO can take; return its length in bytes."""
        length = len(view) // _ALIGNMENT * _ALIGNMENT
        if self._direct < 0 or length < _DIRECT_FROM or view.readonly or _address(view) % _ALIGNMENT:
            return 0
        try:
            _write_all(self._direct, view[:length], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(self._direct)  # it opens, but refuses direct writes
            self._direct = -1
            return 0
        return length

    def settle(self) -> None:
        """Do nothing: every write is done when it returns."""

    def close(self) -> None:
        """Complete the file. Raises OSError if it is too short: a full disk may show only here."""
        try:
            with naming(self._path):
                size = os.fstat(self._fd).st_size
                if size != self._nbytes:
                    raise OSError(f"{self._path}: wrote {size} bytes, expected {self._nbytes}")
                if self._durable:
                    sync_file(self._fd)
        except BaseException:
            with contextlib.suppress(OSError):  # it would hide the cause
                self._close()
            raise
        self._close()

    def abort(self) -> None:
        """Remove the file, unless another file has its name since."""
        with contextlib.suppress(OSError):
            own = os.fstat(self._fd) if self._fd >= 0 else None
            self._close()
            if own is None or os.path.samestat(own, os.lstat(self._path)):
                os.unlink(self._path)

    def _close(self) -> None:
        fds = [fd for fd in (self._fd, self._direct) if fd >= 0]
        self._fd = self._direct = -1
        with contextlib.ExitStack() as closing:  # all of them, also if one fails
            for fd in fds:
                closing.callback(os.close, fd)


_ALIGNMENT = 4096
_DIRECT_FROM = 256 * 2**10
"""Minimum bytes of a write that bypasses the page cache."""


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = write_at(fd, view, offset)
        view = view[count:]
        offset += count


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
