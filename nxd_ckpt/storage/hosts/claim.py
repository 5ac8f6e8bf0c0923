"""A job's claim on one host's directory, which its ranks on that host share.

The job's lease is on the host of rank 0. A job of which only some hosts are also this job's does not see it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nxd_ckpt import effects
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.storage.system import HAS_LOCKS, lock, locked

_WITHIN = 10.0
"""Seconds for which a claim of another job is watched: a data loader that outlives its job may hold it a little longer.
"""
_PAUSE = 0.1
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of file systems without locks."""


def claim(folder: Path, run_id: str) -> Callable[[], None]:
    """Claim this host's directory for the run, and return the function that gives it back.

    ``folder`` has a lock file of each run. The system frees the locks of a process that dies. Nothing is claimed where
    a system or file system has none.

    Raises DirectoryInUse if a process of another run on this host has it.
    """
    if not HAS_LOCKS:
        return lambda: None
    own = folder / run_id
    try:
        unlock = lock(own, shared=True)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return lambda: None

    def give_back() -> None:
        unlock()
        _remove_if_free(own)

    try:
        _refuse_beside_others(own)
    except BaseException:
        give_back()
        raise
    return give_back


def _refuse_beside_others(own: Path) -> None:
    deadline = effects.monotonic() + _WITHIN
    others = [path for path in own.parent.iterdir() if path != own and path.is_file()]
    while others := [path for path in others if not _remove_if_free(path)]:
        if effects.monotonic() > deadline:
            raise DirectoryInUse(
                f"{own.parents[2]} on this host is being written by another live job, run {others[0].name}, on other "
                "hosts; stop it, or save to a directory of your own"
            )
        effects.sleep(_PAUSE)


def _remove_if_free(path: Path) -> bool:
    """Remove the lock file of a run that no process on this host has any more; return whether it is gone."""
    try:
        with locked(path, wait=False), suppress(FileNotFoundError):
            path.unlink()
    except BlockingIOError:
        return False
    return True
