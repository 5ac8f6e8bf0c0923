"""Slots that limit how many ranks of a host write at the same time: file locks.

The kernel frees a lock when its holder dies, so a killed rank never blocks the others. A holder that is alive but stuck
is waited for until the save's timeout. The lock files lie in the host's temporary directory: slots are per host, not
per checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nxd_ckpt import effects
from nxd_ckpt.storage.system import HAS_LOCKS, flags, locked, try_lock, unlock
from nxd_ckpt.storage.work_dir import default_work_dir

_POLL = 0.02


@contextmanager
def writing_slot(run_id: str, num_workers: int | None, timeout: float) -> Iterator[Callable[[], None]]:
    """Hold one of this host's ``num_workers`` slots of the run ``run_id``; None means no limit.

    Yields a function that the holder calls now and then while it makes progress.

    Raises TimeoutError after ``timeout`` seconds in which no holder made progress and no slot changed hands.
    """
    if num_workers is None:
        yield lambda: None
        return
    fd = _take(default_work_dir(), run_id, num_workers, timeout)
    try:
        yield lambda: os.utime(fd)
    finally:
        unlock(fd)
        os.close(fd)


def _take(folder: Path, run_id: str, num_workers: int, timeout: float) -> int:
    last_times: list[int] = []
    since = effects.monotonic()
    while True:
        times = []
        for slot in range(num_workers):
            path = folder / f"{run_id}.{slot}"
            fd = os.open(path, flags("O_RDWR", "O_CREAT", "O_CLOEXEC"), 0o600)
            if try_lock(fd, path):
                os.utime(fd)
                return fd
            times.append(os.fstat(fd).st_mtime_ns)
            os.close(fd)
        now = effects.monotonic()
        if times != last_times:
            last_times, since = times, now
        elif now - since >= timeout:
            raise TimeoutError(
                f"waited for one of {num_workers} writing slots of this host: their holders made no progress for "
                f"{timeout:.0f} s (num_workers= sets the number of slots)"
            )
        effects.sleep(_POLL)


def forget_slots(run_id: str) -> None:
    """Remove the lock files of a finished run from this host, except those that another process holds."""
    for path in default_work_dir().glob("*.*") if HAS_LOCKS else ():
        if path.name.rpartition(".")[0] == run_id:
            with suppress(BlockingIOError), locked(path, wait=False):
                path.unlink()
