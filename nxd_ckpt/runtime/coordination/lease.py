"""The lease: at most one live job writes to a checkpoint directory.

The holder is alive while its heartbeat changes. Clocks are never compared: a job on another host is judged by whether
the heartbeat *changes* while one watches, and one on this host by whether its process still runs.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from nxd_ckpt import host
from nxd_ckpt.core import document
from nxd_ckpt.core.entries import integers
from nxd_ckpt.core.keys import checked_text
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.errors import DirectoryInUse, MalformedFile, StorageError
from nxd_ckpt.runtime.coordination.control_files import set_aside
from nxd_ckpt.runtime.paths import LEASE
from nxd_ckpt.storage.base import Storage, file_system_of

logger = logging.getLogger("nxd_ckpt")

_EXCHANGE_TAKES = 1.0
"""Seconds for which a mounted store may show no lease while the heartbeat replaces it."""


@dataclass(frozen=True)
class Lease:
    """Who writes here. ``host`` identifies a process namespace, not just a machine; ``born`` tells reused pids apart.

    ``file_system`` is where it was taken, as this process sees it. It is not part of the file.
    """

    run_id: str
    host: str
    pid: int
    born: str
    beat: int = 0
    known: bool = True
    """False for a damaged lease: its holder is not known, and it does not beat."""
    file_system: int | None = field(default=None, compare=False)

    @staticmethod
    def of_this_process(run_id: str, file_system: int | None = None) -> Lease:
        born = host.born(host.pid()) or ""
        return Lease(run_id, host.processes(), host.pid(), born, file_system=file_system)

    def is_of_process_of(self, other: Lease) -> bool:
        return (self.host, self.pid, self.born) == (other.host, other.pid, other.born)

    def holder_runs_here(self) -> bool | None:
        """Whether the holder still runs; None if it is not of this host, or this system (without /proc) cannot tell."""
        if self.host != host.processes() or not self.born:
            return None
        born = host.born(self.pid)
        return born is not None and born == self.born

    def describe(self) -> str:
        return f"run {self.run_id} (pid {self.pid} on {self.host.partition('/')[0]})"


def acquire(storage: Storage, run_id: str, patience: float, sign: Callable[[], None] = lambda: None) -> Lease:
    """Take the lease, also from a dead holder.

    Args:
        patience: seconds without a heartbeat after which a holder on another host counts as dead; a live one beats
            several times in it.
        sign: called again and again while it waits for that.

    Raises:
        DirectoryInUse: another live job holds it.
    """
    mine = Lease.of_this_process(run_id, file_system_of(storage))
    try:
        return _acquired(storage, mine, patience, sign)
    except DirectoryInUse:
        raise
    except BaseException:  # an interrupt too: otherwise nobody would give back what may have been taken
        with suppress(OSError):
            release(storage, mine)
        raise


def _acquired(storage: Storage, mine: Lease, patience: float, sign: Callable[[], None]) -> Lease:
    while not storage.link_new(LEASE, _encode(mine)):
        found = _found(storage)
        if found is None:
            continue  # released in between
        data, holder = found
        if holder.is_of_process_of(mine):
            if holder.run_id == mine.run_id:
                return mine
            raise DirectoryInUse(
                f"{storage.url}: this process already saves here as {holder.describe()}; use one Checkpointer for "
                "one directory, or close the other first"
            )
        if _lives(storage, holder, patience, sign):
            raise DirectoryInUse(
                f"{storage.url} is being written by another live job, {holder.describe()}; stop it, or save to a "
                f"directory of your own (if you are sure that it is gone, remove {storage.url}/{LEASE})"
            )
        if data is None:  # a live holder would have written it anew
            set_aside(storage, LEASE, "it cannot be read, and nobody renews it")
        elif storage.exchange(LEASE, data, _encode(mine)):
            if not holder.known:
                logger.warning("%s/%s was damaged, and nobody renewed it: replaced", storage.url, LEASE)
            break
    storage.sync_dir(os.path.dirname(LEASE))
    return mine


def read(storage: Storage) -> Lease | None:
    """The lease in force, or None; a damaged one counts as one whose holder is unknown and does not beat."""
    found = _found(storage)
    return None if found is None else found[1]


def release(storage: Storage, lease: Lease) -> None:
    """Give the lease back, if it is still ours."""
    holder = read(storage)
    if holder is not None and replace(holder, beat=lease.beat) == lease:
        storage.remove(LEASE)


def require(storage: Storage, mine: Lease) -> None:
    """Raise DirectoryInUse if another job took the lease over while this one gave no sign of life.

    That job may have given it back since. On a file system that shows, because the staging directory was removed. Where
    tags are written in place nothing would show it, so a lease that is gone counts as lost. A damaged lease counts as
    gone until the next heartbeat writes it again, which it does not where the path leads to another file system.
    """
    holder = _looked_twice(_known, storage)
    if holder is None and not storage.renames:
        raise DirectoryInUse(
            f"{storage.url}/{LEASE} is gone: another job took over from {mine.describe()}, which gave no sign of life "
            "for too long, and has ended since, or somebody removed it. This job must not save there any more; start "
            "it anew"
        )
    if holder is not None and holder.run_id != mine.run_id:
        if holder.is_of_process_of(mine):
            raise DirectoryInUse(
                f"{storage.url} leads to a directory that this process saves to as another one, {holder.describe()}: a "
                "link to it, or a mount of it, came in its place. Nothing is saved there until it leads to where it did"
            )
        raise DirectoryInUse(
            f"{storage.url} was taken over by {holder.describe()}, because {mine.describe()} gave no sign of life for "
            "too long; it must not publish there any more. Stop one of the two jobs"
        )
    if holder is None and _is_elsewhere(storage, mine):
        raise StorageError(
            f"{storage.url} is on another file system than when this job took it, and its lease is not there: it was "
            "unmounted, or something else is mounted in its place. Nothing is saved there until it is back; to use "
            "what is there now, start the job anew"
        )


def job_lives(storage: Storage, patience: float) -> bool:
    """Whether a live job holds the lease; used before rolling a journal forward or back from outside."""
    holder = read(storage)
    return holder is not None and _lives(storage, holder, patience)


class Heartbeat:
    """Renews the lease from a daemon thread, so that it stops with the process and not before."""

    def __init__(self, storage: Storage, lease: Lease, interval: float) -> None:
        self._storage, self._lease, self._interval = storage, lease, interval
        self._stop = host.Event()
        self._thread = host.Thread(target=self._run, name="nxd_ckpt-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._lease = replace(self._lease, beat=self._lease.beat + 1)
            try:
                self._beat()
            except (OSError, MalformedFile):
                continue  # a full or absent disk shows in the save itself; the next beat may succeed

    def _beat(self) -> None:
        found, renewed = _found(self._storage), _encode(self._lease)
        data, holder = (None, None) if found is None else found
        if holder is not None and holder.known and holder.run_id != self._lease.run_id:
            return  # it was taken over: the next save says so
        if data is None:
            if holder is not None:
                set_aside(self._storage, LEASE, "it cannot be read; its holder writes it anew")
            # On a store it was lost, see require; and what a path leads to after it was unmounted is not ours to take.
            if self._storage.renames and not _is_elsewhere(self._storage, self._lease):
                self._storage.link_new(LEASE, renewed)
        elif self._storage.renames:
            self._storage.write(LEASE, renewed)  # there an exchange leaves a moment without a lease
        else:
            self._storage.exchange(LEASE, data, renewed)  # a take-over since it was read is not undone


def _lives(storage: Storage, holder: Lease, patience: float, sign: Callable[[], None] = lambda: None) -> bool:
    runs = holder.holder_runs_here()
    if runs is not None:
        return runs
    deadline = host.monotonic() + patience
    while host.monotonic() < deadline:
        host.sleep(min(patience / 20, 1.0))
        sign()
        found = _looked_twice(read, storage)
        if found != holder:
            return found is not None  # else it was given back
    return False


def _is_elsewhere(storage: Storage, mine: Lease) -> bool:
    found = file_system_of(storage)
    return None not in (found, mine.file_system) and found != mine.file_system


def _looked_twice(look: Callable[[Storage], Lease | None], storage: Storage) -> Lease | None:
    """What ``look`` finds, for longer than a heartbeat may take where names are not replaced at once."""
    found = look(storage)
    if found is None and not storage.renames:
        host.sleep(_EXCHANGE_TAKES)
        found = look(storage)
    return found


def _known(storage: Storage) -> Lease | None:
    holder = read(storage)
    return holder if holder is not None and holder.known else None


def _found(storage: Storage) -> tuple[bytes | None, Lease] | None:
    """The file's bytes, None where it cannot be read, and what they say."""
    try:
        data = storage.read(LEASE, NOTE)
    except FileNotFoundError:
        return None
    except MalformedFile:
        return None, _decode(b"")
    return data, _decode(data)


def _encode(lease: Lease) -> bytes:
    fields = {name: value for name, value in vars(lease).items() if name not in ("known", "file_system")}
    return json.dumps(fields).encode()


def _decode(data: bytes) -> Lease:
    try:
        fields = document.small(data, LEASE)
        run_id, host, born = (checked_text(fields[name]) for name in ("run_id", "host", "born"))
        pid, beat = integers([fields["pid"], fields["beat"]])
        return Lease(run_id, host, pid, born, beat)
    except (MalformedFile, KeyError, ValueError):
        return Lease("unknown", "unknown", 0, "", hash(data), known=False)
