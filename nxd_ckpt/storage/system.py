"""System calls that differ between operating systems: positioned reads and writes, syncing, locks, mounts, copies.

Linux has all of them. macOS lacks few; Windows, where people look at checkpoints on a laptop, most. Nothing here checks
a system's name: a missing call is replaced, or (`require_locks`) refused by name.

Copies that the processes of a host share lie in ``STORE/NAME/``; locks on ``STORE/NAME.lock`` show which processes have
them open. Where the system has no locks, processes share nothing.
"""

from __future__ import annotations

import ctypes
import errno
import getpass
import os
import re
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nxd_ckpt.core.units import size
from nxd_ckpt.errors import InvalidArgument, UnsupportedSystem

try:
    import fcntl
except ImportError:
    HAS_LOCKS = False
else:
    HAS_LOCKS = True
"""True if files can be locked for as long as a process lives."""

_PIECE = 16 * 2**20
_moving = threading.Lock()
"""Guards a descriptor's position on systems whose reads and writes cannot take an offset."""
_thread_locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
"""Replacement for file locks, among the threads of this process."""


_WORKING_DIRECTORY, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""
_CLONE = 0x40049409
"""FICLONE of Linux."""
_CANNOT_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
_renameat2: Callable[..., int] | None
try:
    _renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
except (AttributeError, OSError, TypeError):  # not Linux, or an older libc
    _renameat2 = None


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add the path to errors of calls that know only a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@cache
def flags(*names: str) -> int:
    """Return those of the named flags of open(2) that this system has, and the flag for binary files."""
    bits = getattr(os, "O_BINARY", 0)
    for name in names:
        bits |= getattr(os, name, 0)
    return int(bits)


def read_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers from byte ``offset`` on with one call; return the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, buffers, offset)
    first = next(buffer for buffer in buffers if len(buffer))
    with _moving:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, min(len(first), _PIECE))
    first[: len(data)] = data
    return len(data)


def write_at(fd: int, view: memoryview, offset: int) -> int:
    """Write at byte ``offset`` with one call; return the number of bytes."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, view[: 1 << 30], offset)
    with _moving:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, view[:_PIECE])


def exchange(first: Path | str, second: Path | str) -> bool:
    """Exchange the names of two files or directories atomically; False if system or file system cannot."""
    if _renameat2 is None:
        return False
    status = os.lstat(first)
    if _renameat2(_WORKING_DIRECTORY, os.fsencode(first), _WORKING_DIRECTORY, os.fsencode(second), _EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in _CANNOT_EXCHANGE:
        return False
    with suppress(OSError):
        if os.path.samestat(status, os.lstat(second)):  # a server that did not answer has exchanged them
            return True
    raise OSError(error, os.strerror(error), str(first), None, str(second))


def clone(fd: int, new: int) -> bool:
    """Let the empty file ``new`` share the blocks of ``fd`` on the disk; False if the file system cannot."""
    if not HAS_LOCKS:
        return False
    try:
        fcntl.ioctl(new, _CLONE, fd)
    except OSError:  # file systems without it answer differently
        return False
    return True


def sync_file(fd: int) -> None:
    """Return when the bytes written to the file are on the disk."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    elif HAS_LOCKS and hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # macOS: its fsync leaves bytes in the disk's cache
    else:
        os.fsync(fd)


def sync_path(path: Path | str) -> None:
    """Sync a file that others may have written, or a directory's entries, if directories can be opened."""
    has_directories = hasattr(os, "O_DIRECTORY")
    if not has_directories and os.path.isdir(path):
        return
    fd = os.open(path, flags("O_RDONLY" if has_directories else "O_RDWR", "O_CLOEXEC"))
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def missing_directories(path: str) -> list[str]:
    """Return ``path`` and the directories above it that do not exist, the innermost first."""
    missing: list[str] = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def remove_empty(folder: str) -> None:
    """Remove the directory and those in it, as far as no files are in them."""
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(path)


def require_locks() -> None:
    """Raise UnsupportedSystem if files cannot be locked, which a save needs."""
    if not HAS_LOCKS:
        raise UnsupportedSystem(
            "saving needs file locks that end with their process (fcntl.flock), which this system does not have: do "
            "it on Linux or macOS. Reading, converting and the nxd-ckpt command work here"
        )


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold a lock on a file within the block, see `lock`."""
    release = lock(path, shared=shared, wait=wait)
    try:
        yield
    finally:
        release()


def lock(path: Path, *, shared: bool = False, wait: bool = True) -> Callable[[], None]:
    """Lock the file ``path``, which is made if need be, and return the function that unlocks it.

    The system unlocks it if this process dies. Without such locks, only threads of this process exclude each other.
    Raises BlockingIOError if it is held and ``wait`` is false.
    """
    if not HAS_LOCKS:
        if not _thread_locks[path].acquire(blocking=wait):
            raise BlockingIOError(f"{path} is locked")
        return _thread_locks[path].release
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        fd = os.open(path, flags("O_RDWR", "O_CREAT", "O_CLOEXEC"), 0o600)
        try:
            fcntl.flock(fd, operation)
            if _is_still(fd, path):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was removed between our opening and locking it: a lock on it excludes nobody

    def release() -> None:
        unlock(fd)
        os.close(fd)

    return release


def try_lock(fd: int, path: Path) -> bool:
    """Return whether this descriptor, opened at ``path``, now has the only lock on the file at that path."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_still(fd, path)


def unlock(fd: int) -> None:
    """Unlock, besides closing: a process forked meanwhile (a data loader's) has the descriptor as well."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def _is_still(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


_MOUNTS = Path("/proc/self/mountinfo")
"""Linux's list of mounts. Elsewhere a directory counts as visible only under its own path."""


class _Mount(NamedTuple):
    """A mount: the directory ``root`` of a file system, shown at ``point``."""

    device: str
    root: str
    point: str


def aliases(path: str | os.PathLike[str]) -> list[str]:
    """Return all paths of ``path``, also if it does not exist yet; its own path without links comes first."""
    own = os.path.realpath(path)
    mounts = _mounts()
    covering = [mount for mount in mounts if is_below(own, mount.point)]
    if not covering:
        return [own]
    # Of several mounts on one point the last is visible.
    mount = max(reversed(covering), key=lambda candidate: len(candidate.point))
    inside = _joined(mount.root, os.path.relpath(own, mount.point))
    others = [
        _joined(mounted.point, os.path.relpath(inside, mounted.root))
        for mounted in mounts
        if mounted.device == mount.device and is_below(inside, mounted.root)
    ]
    return list(dict.fromkeys([own, *(alias for alias in others if _is_same(own, alias))]))


def is_below(inner: str, outer: str) -> bool:
    """Return whether the path ``inner`` is ``outer`` or lies in it; both without links."""
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def _is_same(own: str, other: str) -> bool:
    """Return whether both paths show one directory, not another file system mounted over ``other``.

    A directory that does not exist yet is judged by those above it.
    """
    while not os.path.lexists(own) and os.path.basename(own) == os.path.basename(other) != "":
        own = os.path.dirname(own)
        other = os.path.dirname(other)
    try:
        return os.path.samefile(own, other)
    except OSError:
        return False


def is_mount_point(path: str | os.PathLike[str]) -> bool:
    """Return whether another file system begins at ``path``, or another part of the same one is shown there."""
    own = os.path.realpath(path)
    return os.path.ismount(own) or any(mount.point == own for mount in _mounts())


def _mounts() -> list[_Mount]:
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    fields = [line.split(" ") for line in lines]
    return [_Mount(parts[2], _unescaped(parts[3]), _unescaped(parts[4])) for parts in fields if len(parts) > 4]


def _unescaped(path: str) -> str:
    """Return the path with its octal escapes (of spaces, for example) decoded."""
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), os.fsencode(path))
    return os.fsdecode(raw)


def _joined(above: str, below: str) -> str:
    return os.path.normpath(os.path.join(above, below))


def tell_room(error: BaseException, place: str, nbytes: int) -> None:
    """Add to the error of a full disk how many bytes were to be written to ``place``, and how many are free there.

    Not to a subclass, by which the disk of another host is told.
    """
    ending = "are free"
    if type(error) is OSError and error.errno in (errno.ENOSPC, errno.EDQUOT) and ending not in str(error):
        with suppress(OSError):
            free = shutil.disk_usage(place).free
            error.strerror = f"{error.strerror} ({size(nbytes)} are to be written, {size(free)} {ending})"


_LOCK = ".lock"


@contextmanager
def opened(store: Path, name: str) -> Iterator[Path]:
    """Keep the directory ``name`` of ``store`` from being removed within the block.

    All others of the same store that no process has open are removed first: of each store, one is kept.
    """
    store.mkdir(parents=True, exist_ok=True)
    if not HAS_LOCKS:
        with tempfile.TemporaryDirectory(prefix=f"{name[:8]}-", dir=store, ignore_cleanup_errors=True) as own:
            yield Path(own)
        return
    with locked(store / f"{name}{_LOCK}", shared=True):
        _remove_others(store, name)
        yield store / name


def default_work_dir() -> Path:
    """Return this user's directory below the temporary one. Raises InvalidArgument if others could write to it."""
    path = Path(tempfile.gettempdir()) / f"nxd_ckpt-{_user()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if not hasattr(os, "getuid"):  # there the temporary directory is the user's own
        return path
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or not path.is_dir() or path.is_symlink():
        raise InvalidArgument(f"{path} belongs to another user, or others may write to it; set TMPDIR, or work_dir=")
    return path


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


def _remove_others(store: Path, name: str) -> None:
    for lock in store.glob(f"*{_LOCK}"):
        copy_name = lock.name.removesuffix(_LOCK)
        if copy_name == name:
            continue
        with suppress(BlockingIOError, FileNotFoundError), locked(lock, wait=False):
            shutil.rmtree(store / copy_name, ignore_errors=True)
            lock.unlink(missing_ok=True)
