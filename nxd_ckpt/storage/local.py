"""A directory of a file system that the ranks share (local disk, NFS, Lustre)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import DirEntry, Reader, Writer, checked_key, checked_length
from nxd_ckpt.storage.system import flags, read_at, sync_file, sync_path, write_at


class LocalStorage:
    """Keys below ``root``. ``durable=False`` skips every fsync: for scratch space whose loss is acceptable."""

    renames = True

    def __init__(self, root: str | os.PathLike[str], durable: bool = True) -> None:
        self.root = Path(root).absolute()
        self.durable = durable
        self.url = str(self.root)
        self.concurrency = min(_cores(), 8)

    def path(self, key: str) -> Path:
        return self.root / checked_key(key, self.url) if key else self.root

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        return _read(self.path(key), limit)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, memoryview(buffer).cast("B"))])

    def open(self, key: str) -> Reader:
        return _LocalReader(self.path(key))

    def size(self, key: str) -> int:
        return _stat(self.path(key), stat.S_IFREG).st_size

    def is_dir(self, key: str) -> bool:
        return self.path(key).is_dir()

    def is_file(self, key: str) -> bool:
        return self.path(key).is_file()

    def list(self, key: str = "") -> list[DirEntry]:
        path = self.path(key)
        try:
            with os.scandir(path) as entries:
                return sorted(DirEntry(entry.name, _is_dir(entry)) for entry in entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise MalformedFile(f"{path} is a file, or a link that leads nowhere, expected a directory") from error
            raise

    def write(self, key: str, data: bytes) -> None:
        temporary = self._write_aside(key, data)
        try:
            os.replace(temporary, self.path(key))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def link_new(self, key: str, data: bytes) -> bool:
        # link(2) fails if the name exists and is atomic on NFS too, where O_EXCL has a history of not being.
        temporary = self._write_aside(key, data)
        try:
            os.link(temporary, self.path(key))
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._claim(temporary, self.path(key))
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        # Taken aside, by one of those who try; if it is not what was expected after all, it goes back.
        path = self._own(key)
        aside = path.parent / f".{path.name[:200]}.{uuid.uuid4().hex[:12]}"
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return False
        try:
            found = _read(aside, DOCUMENT)
        finally:
            aside.unlink(missing_ok=True)
        as_expected = found == expected
        return self.link_new(key, data if as_expected else found) and as_expected

    def create(self, key: str, nbytes: int) -> Writer:
        path = self._own(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _LocalWriter(path, nbytes, self.durable)

    def make_dir(self, key: str) -> None:
        path = self._own(key)
        _refuse_links([path] if key else [])
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self._sync(folder.parent)

    def sync_dir(self, key: str) -> None:
        self._sync(self.path(key))

    def rename(self, source: str, target: str) -> None:
        # rename(2) replaces an empty directory or a file silently; this contract does not.
        old, new = self._own(source), self._own(target)
        if os.path.lexists(new):
            raise FileExistsError(f"cannot rename {old} to {new}: it exists")
        new.parent.mkdir(parents=True, exist_ok=True)
        os.rename(old, new)

    def remove(self, key: str) -> None:
        path = self._own(key)
        try:
            is_dir = stat.S_ISDIR(path.lstat().st_mode)
        except FileNotFoundError:
            return
        if is_dir:
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def discard_unfinished(self, key: str) -> None:
        """Nothing: what is unfinished lies among the files, and goes with them."""

    def time(self, key: str) -> float:
        return _stat(self.path(key), stat.S_IFREG, stat.S_IFDIR).st_mtime

    def set_time(self, key: str, seconds: float) -> None:
        os.utime(self._own(key), (seconds, seconds), follow_symlinks=os.utime not in os.supports_follow_symlinks)

    def _own(self, key: str) -> Path:
        """The path of a key that is about to change: it lies below the root itself, and not behind a link."""
        path = self.path(key)
        _refuse_links(path.parents[: key.count("/")])
        return path

    def _sync(self, folder: Path) -> None:
        if self.durable:
            sync_path(folder)

    def _claim(self, temporary: Path, path: Path) -> bool:
        """Where there are no links: whoever creates the name may replace it by what was written aside."""
        try:
            os.close(os.open(path, _NEW_FILE, 0o666))
        except FileExistsError:
            return False
        try:
            os.replace(temporary, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return True

    def _write_aside(self, key: str, data: bytes) -> Path:
        """``data`` in a file of its own beside ``key``: written, its length checked, synced."""
        path = self._own(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name[:200]}.{uuid.uuid4().hex[:12]}"
        writer = _LocalWriter(temporary, len(data), self.durable)
        try:
            writer.write_at(0, data)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        return temporary


_NEW_FILE = flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_CLOEXEC")
_NO_LINKS = {errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV}
"""What file systems without hard links (FAT, mounted object stores) answer to link(2)."""


_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path) -> tuple[int, int]:
    """A descriptor to read a file from, and its size in bytes. Opening a FIFO would block: this never does.

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


def _read(path: Path, limit: int) -> bytes:
    fd, nbytes = open_regular(path)
    with open(fd, "rb", buffering=0) as file:
        checked_length(nbytes, limit, str(path))
        return file.readall()


def _stat(path: Path, *kinds: int) -> os.stat_result:
    """What stat(2) says. Raises MalformedFile for what is of none of these kinds."""
    try:
        return _checked(path.stat(), path, *kinds)
    except OSError as error:
        raise _of_path(error, path) from error


def _checked(found: os.stat_result, path: Path, *kinds: int) -> os.stat_result:
    kind = stat.S_IFMT(found.st_mode)
    if kind not in kinds:
        raise MalformedFile(f"{path} is {_KINDS.get(kind, 'something else')}, expected {_KINDS[kinds[0]]}")
    return found


def _of_path(error: OSError, path: Path) -> Exception:
    """What is to be raised for an error of opening a file."""
    if error.errno == errno.ENOTDIR or (error.errno == errno.ELOOP and not path.is_symlink()):
        # A file, or a link to itself, stands where one of its directories should.
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if error.errno in (errno.ELOOP, errno.ENXIO) or (error.errno == errno.ENOENT and path.is_symlink()):
        what = "a socket" if error.errno == errno.ENXIO else f"a link that leads nowhere ({error.strerror})"
        return MalformedFile(f"{path} is {what}, expected a file")
    return error


def _refuse_links(folders: Sequence[Path]) -> None:
    for folder in folders:
        if folder.is_symlink():
            raise OSError(
                errno.ELOOP,
                "is a link: nothing is written, moved or removed through one, as it may lead out of the directory; put "
                "what it leads to in its place, or remove it",
                str(folder),
            )


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a directory that is not ours to look into
        return False


class _LocalReader:
    """Neighbouring ranges share a system call, what lies between them (headers of small records) is read along."""

    def __init__(self, path: Path) -> None:
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
            try:
                count = read_at(self._fd, buffers, offset)
            except OSError as error:
                error.filename = str(self._path)  # many files are being read: which one it was, only we know
                raise
            if count == 0:
                raise EOFError(f"{self._path}: {left} bytes missing at byte {offset}")
            left, offset = left - count, offset + count
            if left:
                buffers = _after(count, buffers)


_HOLE = memoryview(bytearray(8 * 2**10))
"""Memory for what is read along, of the length from which on a read of its own is cheaper. Nobody looks into it."""
_BUFFERS = 1000
"""Buffers that a system call fills, at most; Linux takes 1,024."""
_BYTES = 2**30
"""Bytes that a system call reads, about; some systems refuse more than twice as many."""


def _runs(ranges: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """(offset, buffers to be filled one after the other) of every system call."""
    begin, end, buffers = 0, 0, list[memoryview]()
    for offset, buffer in ranges:
        if buffers and 0 <= offset - end <= len(_HOLE) and len(buffers) < _BUFFERS and offset - begin < _BYTES:
            if offset > end:
                buffers.append(_HOLE[: offset - end])
        else:
            if buffers:
                yield begin, buffers
            begin, buffers = offset, []
        buffers.append(buffer)
        end = offset + len(buffer)
    if buffers:
        yield begin, buffers


def _after(count: int, buffers: list[memoryview]) -> list[memoryview]:
    """``buffers`` without their first ``count`` bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


class _LocalWriter:
    """Large aligned writes bypass the page cache where the file system takes that, all others go through it.

    Direct writes cost what the disk costs; buffered ones are copied first, and their sync then competes with every
    other dirty page of the host. Where a file system refuses (tmpfs, some network ones), all writes are buffered.
    """

    def __init__(self, path: Path, nbytes: int, durable: bool) -> None:
        self._path, self._nbytes, self._durable = path, nbytes, durable
        self._fd = os.open(path, _NEW_FILE, 0o666)
        self._direct = -1
        if durable and nbytes >= _DIRECT_FROM:
            with contextlib.suppress(OSError, AttributeError):  # no O_DIRECT on this system, or not on this disk
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        aligned = self._write_direct(offset, view) if self._direct >= 0 else 0
        _write_all(self._fd, view[aligned:], offset + aligned)

    def _write_direct(self, offset: int, view: memoryview) -> int:
        """Write the leading part that direct IO can take; how many bytes that was."""
        length = len(view) // _ALIGNMENT * _ALIGNMENT
        if length < _DIRECT_FROM or view.readonly or offset % _ALIGNMENT or _address(view) % _ALIGNMENT:
            return 0
        try:
            _write_all(self._direct, view[:length], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(self._direct)  # opened, but not meant
            self._direct = -1
            return 0
        return length

    def settle(self) -> None:
        """Nothing: every write is done when it returns."""

    def close(self) -> None:
        """Raises OSError where the file did not get its full length: a full disk may say so only here."""
        try:
            found = os.fstat(self._fd).st_size
            if found != self._nbytes:
                raise OSError(f"{self._path}: wrote {found} bytes, expected {self._nbytes}")
            if self._durable:
                sync_file(self._fd)
        finally:
            self._close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_ALIGNMENT = 4096
_DIRECT_FROM = 256 * 2**10
"""Bytes from which on a write bypasses the page cache."""


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = write_at(fd, view, offset)
        view, offset = view[count:], offset + count


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
