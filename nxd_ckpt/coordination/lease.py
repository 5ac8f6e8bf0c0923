"""The lease: at most one live job writes to a checkpoint directory.

The holder is alive while its heartbeat changes. Clocks are never compared: a job on another host is judged by whether
the heartbeat *changes* while one watches, and one on this host by whether its process still runs.

The heartbeat is a file of its own. The lease is written once, so a holder that stood still until another job took over
cannot bring its own back when it wakes.

A Checkpointer takes the lease of the directory of its tags with the first save, and only for tags. A plug-in also
writes, renames and removes other files, and before that, and so does a conversion: they have an `OutputLease`.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.coordination.at_exit import settle_unheld
from nxd_ckpt.coordination.control_files import HEARTBEAT, LEASE, PLACE, set_aside
from nxd_ckpt.core import document
from nxd_ckpt.core.limits import NOTE, checked_text, integers
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import DirectoryInUse, MalformedFile, StorageError
from nxd_ckpt.storage.base import Storage, here


@dataclass(frozen=True)
class Lease:
    """The identity of the job that writes here.

    ``host`` identifies a process namespace, not just a machine; ``born`` tells reused pids apart. ``place`` is the mark
    of the directory where the lease was taken, see `place_of`. It is not part of the file.
    """

    run_id: str
    host: str
    pid: int
    born: str
    known: bool = True
    """False for a damaged lease: its holder is unknown, and does not beat."""
    place: bytes | None = field(default=None, compare=False)
    taken_in: Storage | None = field(default=None, compare=False)
    """The directory by its path without links; None if a path cannot come to lead elsewhere.

    It is not part of the file.
    """

    @staticmethod
    def of_this_process(run_id: str) -> Lease:
        return Lease(run_id, effects.processes(), effects.pid(), effects.born(effects.pid()) or "")

    def is_of_process_of(self, other: Lease) -> bool:
        return (self.host, self.pid, self.born) == (other.host, other.pid, other.born)

    def holder_runs_here(self) -> bool | None:
        """Return whether the holder runs; None if it is not on this host, or this system (without /proc) cannot tell.
        """
        if self.host != effects.processes() or not self.born:
            return None
        born = effects.born(self.pid)
        return born is not None and born == self.born

    def describe(self) -> str:
        return f"run {self.run_id} (pid {self.pid} on {self.host.partition('/')[0]})"


def acquire(
    storage: Storage,
    run_id: str,
    patience: float,
    sign: Callable[[], None] = lambda: None,
    dead: Lease | None = None,
) -> Lease:
    """Take the lease, also from a dead holder.

    Args:
        patience: seconds without a heartbeat after which a holder on another host counts as dead; a live one beats
            several times in it.
        sign: called again and again during that wait.
        dead: a holder that was watched for so long already, by `job_lives`.

    Raises:
        DirectoryInUse: another live job has it.
    """
    mine = Lease.of_this_process(run_id)
    try:
        taken = _acquired(storage, mine, patience, sign, dead)
        return replace(taken, place=place_of(storage), taken_in=storage.without_links())
    except DirectoryInUse:
        raise
    except BaseException:  # an interrupt too: else nobody would release a lease that was taken
        with suppress(OSError):
            release(storage, mine)
            storage.remove_if(HEARTBEAT, lambda: storage.read(HEARTBEAT) == _encode(mine, beat=0))
        raise


def _acquired(
    storage: Storage, mine: Lease, patience: float, sign: Callable[[], None], dead: Lease | None
) -> Lease:
    mark_place(storage)
    # Before the lease: NFS misses a file for up to a minute if it did not exist at the first look.
    has_beaten = storage.link_new(HEARTBEAT, _encode(mine, beat=0))
    while not storage.link_new(LEASE, _encode(mine)):
        record = _read(storage)
        if record is None:
            continue  # released in between
        data, holder = record
        if holder.is_of_process_of(mine):
            if holder.run_id == mine.run_id:
                return mine
            if settle_unheld(sign):
                continue
            raise DirectoryInUse(
                f"{storage.url}: this process already saves here as {holder.describe()}; use one Checkpointer for "
                "one directory, or close the other first: nxd_ckpt.close_checkpointers() closes all of this process"
            )
        if holder != dead and _lives(storage, holder, patience, sign):
            raise DirectoryInUse(
                f"{storage.url} is being written by another live job, {holder.describe()}; stop it, or save to a "
                f"directory of your own (if you are sure that it is gone, remove {storage.url}/{LEASE})"
            )
        if data is None:  # a live holder would have written it again
            set_aside(storage, LEASE, "it cannot be read, and nobody renews it")
        elif storage.exchange(LEASE, data, _encode(mine)):
            if not holder.known:
                logger.warning("%s/%s was damaged, and nobody renewed it: replaced", storage.url, LEASE)
            break
    with suppress(OSError):
        if not has_beaten:
            _beat(storage, mine, 0)  # instead of the last one of a dead job; the next one comes soon
    storage.sync_dir(os.path.dirname(LEASE))
    return mine


def read(storage: Storage) -> Lease | None:
    """Return the lease in force, or None; a damaged one counts as one whose holder is unknown and does not beat."""
    record = _read(storage)
    return None if record is None else record.lease


def release(storage: Storage, lease: Lease) -> None:
    """Give the lease back, if it is still ours. A damaged one is repaired first: it would keep the next job waiting."""
    storage = directory_of(storage, lease)
    if _repaired(storage, lease) == lease:
        with suppress(OSError):
            storage.remove(HEARTBEAT)  # before the lease: after that it may be the next holder's
        storage.remove_if(LEASE, lambda: read(storage) == lease)


def directory_of(storage: Storage, mine: Lease) -> Storage:
    """Return the directory in which the lease was taken, also if a link in its path leads elsewhere by now."""
    if mine.taken_in is None or place_of(storage) == mine.place:
        return storage
    return mine.taken_in if place_of(mine.taken_in) == mine.place else storage


def require(storage: Storage, mine: Lease, *, strictly: bool = False) -> None:
    """Raise DirectoryInUse if another job took the lease over while this one gave no sign of life.

    That job may have given it back since. On a file system that shows, because the staging directory was removed.
    Nothing would show it where tags are written in place, nor, with ``strictly``, for a copy, which is collected
    elsewhere: there a lease that is gone counts as lost. A damaged lease counts as gone where that does no harm, until
    the next heartbeat writes it again (not if the path leads to another file system). Where a lease is needed it is
    written again here, if the last heartbeat is this job's: a job that takes over leaves one.
    """
    is_needed = strictly or not storage.renames
    holder = _repaired(storage, mine) if is_needed else read(storage)
    holder = holder if holder is not None and holder.known else None
    if holder is None:
        require_place(storage, mine.run_id, mine.place)
    if holder is None and is_needed:
        raise DirectoryInUse(
            f"{storage.url}/{LEASE} is gone: another job took over from {mine.describe()}, which gave no sign of life "
            "for too long, and has ended since, or somebody removed it. This job must not save there any more; "
            "restart it"
        )
    if holder is not None and holder != mine:
        if holder.is_of_process_of(mine):
            raise DirectoryInUse(
                f"{storage.url} leads to a directory that this process saves to as another one, {holder.describe()}: a "
                "link to it, or a mount of it, came in its place. Nothing is saved there until the path leads back"
            )
        raise DirectoryInUse(
            f"{storage.url} was taken over by {holder.describe()}, because {mine.describe()} gave no sign of life for "
            "too long; it must not publish there any more. Stop one of the two jobs"
        )


def _repaired(storage: Storage, mine: Lease) -> Lease | None:
    """Return the lease in force; a damaged one is written again, if the last heartbeat is this job's."""
    record = _read(storage)
    if record is None or record.lease.known or last_beat(storage, mine) is None:
        return None if record is None else record.lease
    with suppress(FileNotFoundError):
        _write_anew(storage, mine, record)
    return read(storage)


def mark_place(storage: Storage) -> None:
    """Give a directory that may be unmounted a mark, if it has none; of several hosts' directories this host's."""
    if storage.may_be_unmounted:
        here(storage).link_new(PLACE, uuid.uuid4().hex.encode())


def place_of(storage: Storage) -> bytes | None:
    """Return the mark that tells a mounted directory from any that is mounted in its place later.

    None if there is none, or none that can be read.
    """
    if not storage.may_be_unmounted:
        return None
    try:
        return here(storage).read(PLACE, NOTE)
    except (FileNotFoundError, MalformedFile):
        return None


def require_place(storage: Storage, run_id: str, place: bytes | None) -> None:
    """Raise StorageError unless the path still leads to the directory with this mark, or with this run's lease."""
    if place is None or place_of(storage) == place:
        return
    holder = read(here(storage))
    if holder is None or holder.run_id != run_id:
        raise StorageError(
            f"{storage.url} is not the directory that this job began with: its mark {PLACE} and its lease are not "
            "there. It was unmounted, or something else is mounted or linked in its place, or both files were "
            "removed, as at the end of a job that took over while this one stood still. Nothing is saved there until "
            "it is back; to use the present directory, restart the job, or call nxd_ckpt.close_checkpointers() on all "
            "ranks"
        )


def job_lives(storage: Storage, patience: float) -> bool:
    """Return whether a live job has the lease; used before rolling a journal forward or back from outside."""
    holder = read(storage)
    return holder is not None and _lives(storage, holder, patience)


def last_beat(storage: Storage, holder: Lease) -> int | None:
    """Return the number of the holder's last heartbeat; None if there is none, or another job's came after it."""
    try:
        data = storage.read(HEARTBEAT, NOTE)
        [beat] = integers([document.small(data, HEARTBEAT)["beat"]])
    except (FileNotFoundError, MalformedFile, KeyError, ValueError):
        return None
    return beat if holder.known and _decode(data) == holder else None


class Heartbeat:
    """The sign that the holder lives, from a daemon thread: it stops with the process and not before.

    A lease that is taken while the interpreter exits, for a last save, has none.
    """

    def __init__(self, storage: Storage, lease: Lease, interval: float) -> None:
        self._storage = storage
        self._lease = lease
        self._interval = interval
        self._stop = effects.Event()
        self._thread = effects.Thread(target=self._run, name="nxd_ckpt-lease", daemon=True)
        self._beats = effects.has_started(self._thread)

    def stop(self) -> None:
        self._stop.set()
        if self._beats:
            self._thread.join()

    def _run(self) -> None:
        beat = 0
        while not self._stop.wait(self._interval):
            beat += 1
            try:
                if self._holds():
                    _beat(self._storage, self._lease, beat)
            except (OSError, MalformedFile):
                continue  # a full or absent disk shows in the save itself; the next beat may succeed

    def _holds(self) -> bool:
        """Return whether the lease is ours; a damaged one is written again.

        If it was taken over, the next save reports that.
        """
        storage = self._storage
        mine = self._lease
        record = _read(self._storage)
        if record is not None and record.lease.known:
            return record.lease == mine
        return _write_anew(storage, mine, record)


def _write_anew(storage: Storage, mine: Lease, record: _LeaseFile | None) -> bool:
    """Write the lost or damaged lease (``record``) again; False if it is not ours."""
    if record is not None and record.data is not None:
        return storage.exchange(LEASE, record.data, _encode(mine))
    if record is not None:
        set_aside(storage, LEASE, "it cannot be read; its holder writes it again")
    # On a store it was lost, see require; and after an unmount the path leads to a directory that is not ours.
    return storage.renames and place_of(storage) == mine.place and storage.link_new(LEASE, _encode(mine))


def _beat(storage: Storage, mine: Lease, number: int) -> None:
    data = _encode(mine, beat=number)
    try:
        if storage.renames:
            storage.write(HEARTBEAT, data)
        else:
            # On the disks of hosts, change the file that the others read: a new one may be on another disk.
            storage.exchange(HEARTBEAT, storage.read(HEARTBEAT, NOTE), data)
    except FileNotFoundError:
        storage.link_new(HEARTBEAT, data)
    except (IsADirectoryError, MalformedFile) as error:
        set_aside(storage, HEARTBEAT, error)
        storage.link_new(HEARTBEAT, data)


def _lives(storage: Storage, holder: Lease, patience: float, sign: Callable[[], None] = lambda: None) -> bool:
    runs = holder.holder_runs_here()
    if runs is not None:
        return runs
    deadline = effects.monotonic() + patience
    beat = last_beat(storage, holder)
    while effects.monotonic() < deadline:
        effects.sleep(min(patience / 20, 1.0))
        sign()
        now = read(storage)
        if now != holder:
            return now is not None  # else it was given back
        if last_beat(storage, holder) not in (None, beat):
            return True
    return False


class _LeaseFile(NamedTuple):
    """The lease's file: its bytes, None if it cannot be read, and its content."""

    data: bytes | None
    lease: Lease


def _read(storage: Storage) -> _LeaseFile | None:
    try:
        data = storage.read(LEASE, NOTE)
    except FileNotFoundError:
        return None
    except MalformedFile:
        return _LeaseFile(None, _decode(b""))
    return _LeaseFile(data, _decode(data))


def _encode(lease: Lease, **more: int) -> bytes:
    fields = {name: value for name, value in vars(lease).items() if name not in ("known", "place", "taken_in")}
    return json.dumps({**fields, **more}).encode()


def _decode(data: bytes) -> Lease:
    try:
        fields = document.small(data, LEASE)
        run_id, host, born = (checked_text(fields[name]) for name in ("run_id", "host", "born"))
        [pid] = integers([fields["pid"]])
        return Lease(run_id, host, pid, born)
    except (MalformedFile, KeyError, ValueError):
        return Lease("unknown", "unknown", 0, "", known=False)


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
            self._lease = acquire(storage, left or new_run_id(), _PATIENCE, dead=dead)
        except BaseException:
            if left:
                _left[storage.url] = left
            raise
        self._heartbeat = Heartbeat(storage, self._lease, _BEAT)

    def require(self) -> None:
        """Raise DirectoryInUse if another job took over while this one stood still."""
        require(self._storage, self._lease, strictly=True)

    def release(self) -> None:
        """Give the directory back. If that fails, this process may take it again, and others when it has ended."""
        self._heartbeat.stop()
        try:
            release(self._storage, self._lease)
        except OSError as error:
            _left[self._storage.url] = self._lease.run_id
            logger.warning("%s: no other job can save there before this process ends: %s", self._storage.url, error)


def new_run_id() -> str:
    """Return a name that no other launch has."""
    return uuid.uuid4().hex[:12]


def is_in_use_here(storage: Storage) -> bool:
    """Return whether this process has the lease, other than as one that it could not give back."""
    holder = read(storage)
    is_ours = holder is not None and holder.is_of_process_of(Lease.of_this_process(""))
    return is_ours and holder is not None and holder.run_id != _left.get(storage.url)


def _refuse_other_job(storage: Storage, shown: str) -> Lease | None:
    """Raise DirectoryInUse if another live job has the lease; return that of a dead one."""
    holder = read(storage)
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
    return job_lives(storage, _PATIENCE)


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
