"""Local directories for copies that the processes of a host share.

``STORE/NAME/`` holds copies, ``STORE/NAME.lock`` says who has them open. Locks are the system's: it frees those of a
process that dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nxd_ckpt.errors import InvalidArgument

_LOCK = ".lock"


@contextmanager
def opened(store: Path, name: str) -> Iterator[Path]:
    """The directory ``name`` of ``store``, which nobody removes meanwhile.

    All others of the same store that no process has open are removed first: of each store, one is kept.
    """
    store.mkdir(parents=True, exist_ok=True)
    with locked(store / f"{name}{_LOCK}", fcntl.LOCK_SH):
        _remove_others(store, name)
        yield store / name


@contextmanager
def locked(path: Path, operation: int) -> Iterator[None]:
    """Hold flock(2) on the file ``path``, which is made if need be. Raises BlockingIOError with LOCK_NB."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, operation)
            if _is_still(fd, path):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # it was removed between our opening and locking it: a lock on it excludes nobody
    try:
        yield
    finally:
        os.close(fd)


def default_work_dir() -> Path:
    """One of this user's below the system's temporary directory. Raises InvalidArgument where others could write."""
    path = Path(tempfile.gettempdir()) / f"nxd_ckpt-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or not path.is_dir() or path.is_symlink():
        raise InvalidArgument(f"{path} belongs to another user, or others may write to it; set TMPDIR, or work_dir=")
    return path


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_others(store: Path, name: str) -> None:
    for lock in store.glob(f"*{_LOCK}"):
        other = lock.name.removesuffix(_LOCK)
        if other == name:
            continue
        with suppress(BlockingIOError, FileNotFoundError), locked(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(store / other, ignore_errors=True)
            lock.unlink(missing_ok=True)
