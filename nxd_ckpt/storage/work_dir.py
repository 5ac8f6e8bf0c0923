"""Local directories for copies that the processes of a host share.

``STORE/NAME/`` has copies; locks on ``STORE/NAME.lock`` show which processes have them open. Locks are the system's: it
frees those of a process that dies. Where it has none, processes share nothing.
"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.system import HAS_LOCKS, locked

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
