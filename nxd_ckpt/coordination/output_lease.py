"""The lease of what is no tag: a trainer's files that a plug-in moves or removes, and a conversion's output.

A Checkpointer takes the lease of the directory of its tags with the first save, and only for tags. A plug-in also
writes, renames and removes other files, and before that.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.lease import Heartbeat, Lease
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.storage.base import Storage

logger = logging.getLogger("nxd_ckpt")

_PATIENCE = 60.0
"""Seconds for which a job of another host is watched, to see whether it lives."""
_BEAT = 10.0
"""Seconds between two heartbeats."""
_left: dict[str, str] = {}
"""Run ids of the leases that this process could not give back, by directory. It may take them again."""


class OutputLease:
    """The lease of one directory, which this process has until `release`.

    Args:
        storage: the directory with the lease; it is created.
        shown: the directory's name in messages.

    Raises:
        DirectoryInUse: another live job has it. Nothing was changed.
    """

    def __init__(self, storage: Storage, *, shown: str) -> None:
        dead = _refuse_other_job(storage, shown)
        self._storage = storage
        left = _left.pop(storage.url, "")  # only one thread gets it
        try:
            self._lease = lease.acquire(storage, left or new_run_id(), _PATIENCE, dead=dead)
        except BaseException:
            if left:
                _left[storage.url] = left
            raise
        self._heartbeat = Heartbeat(storage, self._lease, _BEAT)

    def require(self) -> None:
        """Raise DirectoryInUse if another job took over while this one stood still."""
        lease.require(self._storage, self._lease, strictly=True)

    def release(self) -> None:
        """Give the directory back. If that fails, this process may take it again, and others when it has ended."""
        self._heartbeat.stop()
        try:
            lease.release(self._storage, self._lease)
        except OSError as error:
            _left[self._storage.url] = self._lease.run_id
            logger.warning("%s: no other job can save there before this process ends: %s", self._storage.url, error)


def new_run_id() -> str:
    """Return a name that no other launch has."""
    return uuid.uuid4().hex[:12]


def is_in_use_here(storage: Storage) -> bool:
    """Return whether this process has the lease, other than as one that it could not give back."""
    holder = lease.read(storage)
    is_ours = holder is not None and holder.is_of_process_of(Lease.of_this_process(""))
    return is_ours and holder is not None and holder.run_id != _left.get(storage.url)


def _refuse_other_job(storage: Storage, shown: str) -> Lease | None:
    """Raise DirectoryInUse if another live job has the lease; return that of a dead one."""
    holder = lease.read(storage)
    if holder is None or holder.is_of_process_of(Lease.of_this_process("")):
        return None
    if other_job_lives(storage, holder, shown):
        raise DirectoryInUse(
            f"{shown} is being written by {holder.describe()}; wait for it, stop one of the two, or give each an "
            "output directory of its own"
        )
    return holder


def other_job_lives(storage: Storage, holder: Lease, shown: str) -> bool:
    """Return whether a live job has the lease. One of another host is watched for up to a minute."""
    if holder.holder_runs_here() is None:
        logger.warning("%s: waiting for %s, up to %.0f s, to see whether it lives", shown, holder.describe(), _PATIENCE)
    return lease.job_lives(storage, _PATIENCE)


@contextmanager
def leased(storage: Storage) -> Iterator[None]:
    """Keep other jobs from saving tags there within the block, by this process's lease or a new one.

    Raises:
        DirectoryInUse: another live job has the lease. Nothing was changed.
    """
    if is_in_use_here(storage):
        yield
        return
    output_lease = OutputLease(storage, shown=storage.url)
    try:
        output_lease.require()
        yield
    finally:
        output_lease.release()
