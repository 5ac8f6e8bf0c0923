"""A job's claim on one checkpoint directory, agreed by all its ranks before the first byte is written."""

from __future__ import annotations

import errno
import logging
import math
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from nxd_ckpt import effects
from nxd_ckpt.commit.host_semaphore import forget_slots
from nxd_ckpt.coordination import intents, journal, lease
from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.backoff import Backoff
from nxd_ckpt.coordination.control_files import make_places
from nxd_ckpt.coordination.lease import Heartbeat, Lease
from nxd_ckpt.coordination.paths import (
    PLACE,
    PROBES,
    RUNS,
    STAGING,
    TRASH,
    VOTES,
    spare_file,
    spared_file,
    verdict_file,
)
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.errors import DirectoryNotShared, InvalidArgument, MalformedFile, StorageError
from nxd_ckpt.storage.base import DirEntry, PerHost, Reserving, Storage, is_mounted
from nxd_ckpt.tag.directory import tag_around

logger = logging.getLogger("nxd_ckpt")

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_IN_PLACE = ".in_place"
"""Ends the name of rank 0's probe if tags are written in place (see commit.publication), so that all ranks
know."""

_SEEN_WITHIN = 30.0
"""Seconds that a shared file system may take to show a new file to another host (NFS attribute caches: up to 30)."""

_CANNOT_RENAME = {errno.EPERM, errno.EXDEV, errno.EINVAL, errno.EMFILE, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of mounted object stores when a directory is renamed. (EMFILE: gcsfuse, if files are in it.)"""

_SPARE = 4096
"""Bytes: more than a vote or a verdict that tells of an error, and a page of a file system."""

_PATIENCE = 6
"""Heartbeats that may be missing before a holder on another host counts as dead."""


@dataclass
class Session:
    """One run of a job in one directory. Only rank 0 holds the lease and its heartbeat."""

    storage: Storage
    topology: Topology
    run_id: str
    timeout: float
    lease: Lease | None = None
    heartbeat: Heartbeat | None = None
    place: bytes | None = None
    """The mark of the directory, see lease.place_of."""
    home_place: bytes | None = None
    """Where hosts have a disk of their own, the mark of that which has the votes."""
    counter: int = 0
    """The number of the last attempt."""
    lost_votes: dict[str, Vote] = field(default_factory=dict)
    """This rank's votes that could not be cast yet, by attempt. Until then, the others must assume that it is
    writing."""
    is_gone: Callable[[int], bool] = lambda rank: False
    """Whether that rank's process is known to have ended."""
    last_saved: str | None = None
    """The tag of the last save of this run that became visible."""
    _spares: list[str] = field(default_factory=list)
    leaves_at: float = math.inf
    """When this rank, after an exception, stops waiting for the others (seconds, as effects.monotonic())."""

    def attempt(self, counter: int) -> str:
        return f"{self.run_id}-{counter}"

    @property
    def probe(self) -> str:
        """The name of the file that rank 0 leaves for the others to find."""
        return self.run_id if self.storage.renames else self.run_id + _IN_PLACE

    def keep_spares(self) -> None:
        """Keep room for a vote, and on rank 0 for a verdict, as far as there is any: see :meth:`write_in_spare`."""
        rank = self.topology.rank
        for number in range(1 if rank else 2) if is_mounted(self.storage) else ():
            key = spare_file(self.run_id, rank, number)
            if key not in self._spares:
                with suppress(OSError):
                    self.storage.write(key, bytes(_SPARE))
                    self._spares.append(key)

    def write_in_spare(self, key: str, data: bytes) -> bool:
        """Write a small file, though the disk is full, in the space that was kept; False if there is none of it."""
        if not self._spares:
            return False
        spare = self._spares.pop()
        try:
            if len(data) <= _SPARE and isinstance(self.storage, Reserving):
                self.storage.write_reserved(spare, key, data)
                return True
        except OSError:  # a file system that overwrites nothing in place
            pass
        with suppress(OSError):
            self.storage.remove(spare)
        return False

    def give_spares(self) -> None:
        """Give back what is kept."""
        while self._spares:
            with suppress(OSError):
                self.storage.remove(self._spares.pop())

    @property
    def votes_here(self) -> bool:
        """True where votes are in the directory of this host, and not on another one."""
        return not isinstance(self.storage, PerHost) or self.storage.is_home

    def require_votes(self) -> None:
        """Raise StorageError where votes are on another host, of whose directory the mark is gone."""
        if not self.votes_here and self.storage.read(PLACE, NOTE) != self.home_place:
            raise StorageError(
                f"{self.storage.url}: the directory on the host of rank 0 is not the one that this job took: its mark "
                f"{PLACE} is not there. It was unmounted, or something else is mounted or linked in its place"
            )

    def require(self, *, strictly: bool = False) -> None:
        """Raise DirectoryInUse where this is rank 0, and another job took the directory over meanwhile; ``strictly``
        also where that one has ended, see lease.require."""
        if self.lease is not None:
            lease.require(self.storage, self.lease, strictly=strictly)

    def confirm(self) -> bool:
        """As :meth:`require`: True, or it raises."""
        self.require()
        return True

    def is_leaving(self) -> bool:
        return effects.monotonic() >= self.leaves_at

    def close(self) -> None:
        """Give the directory back. Called after the last save was decided."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.lease is not None:
            with suppress(OSError):
                self.storage = lease.directory_of(self.storage, self.lease)
                self.storage.remove(f"{PROBES}/{self.probe}")
                lease.release(self.storage, self.lease)
        self.give_spares()
        forget_slots(self.run_id)


def open_session(
    storage: Storage, topology: Topology, agreement: Agreement | None, run_id: str | None, timeout: float
) -> Session:
    """Claim the directory for this job.

    Raises, on every rank:
        DirectoryInUse: another live job writes there.
        DirectoryNotShared: a rank does not see what rank 0 wrote there.
        InvalidArgument: it lies inside a tag; several ranks without a process group and without ``run_id``, or one that
            was used before.
    """
    if run_id is not None and not _RUN_ID.fullmatch(run_id):
        raise InvalidArgument(f"run_id {run_id!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    session = Session(storage, topology, "", timeout)
    try:
        if agreement is None:
            _open_without_group(session, run_id)
        else:
            _open_with_group(session, agreement, run_id)
            session.is_gone = agreement.is_gone
        session.place = lease.place_of(storage)
    except BaseException:
        session.close()  # the others must not find a directory that nobody holds
        raise
    return session


def _open_with_group(session: Session, agreement: Agreement, run_id: str | None) -> None:
    def claim() -> str:
        _refuse_inside_tag(session.storage)
        _claim(session, run_id or uuid.uuid4().hex[:12], first=True, sign=agreement.sign)
        return session.run_id

    session.run_id = decided_by_rank0(agreement, claim)
    # Shorter than the others' timeout, so that the rank which looks in vain reports it to them.
    within = min(_SEEN_WITHIN, session.timeout / 2)
    on_all(agreement, lambda: _see_probe(session, within))
    storage = session.storage
    if isinstance(storage, PerHost):
        on_all(agreement, lambda: _mark(session))
        storage.expect(PLACE, lease.place_of(storage))


def _mark(session: Session) -> None:
    """Mark the directory on this host, and note the mark of that of rank 0, which has marked its own by now."""
    lease.mark_place(session.storage)
    session.home_place = session.storage.read(PLACE, NOTE)


def _open_without_group(session: Session, run_id: str | None) -> None:
    if run_id is None:
        raise InvalidArgument(
            f"saving from {session.topology.world_size} ranks needs torch.distributed to be initialised with that "
            "many ranks, or run_id=: a string that is the same on all ranks and new for every launch of the job"
        )
    session.run_id = run_id
    if session.topology.rank == 0:
        _refuse_inside_tag(session.storage)
        make_places(session.storage)
        if not session.storage.link_new(f"{RUNS}/{run_id}", b"1"):
            raise InvalidArgument(
                f"run_id {run_id!r} was used in {session.storage.url} before; give every launch a new one (with the "
                "scheduler's restart count in it), else votes of the earlier one could be taken for this one's"
            )
        _claim(session, run_id, first=False)
    else:
        _must_be_writable(session)
        _must_see(session, RUNS, [run_id], session.timeout)  # rank 0 may come as late as any rank
        _must_be_live(session)
        _see_probe(session, session.timeout)


def _refuse_inside_tag(storage: Storage) -> None:
    around = tag_around(storage)
    if around is not None:
        raise InvalidArgument(
            f"{storage.url} is, or lies inside, the checkpoint {around}, so that copying or removing that would "
            "include what is saved here; pass the directory that holds the tags, or another one"
        )


def _claim(session: Session, run_id: str, *, first: bool, sign: Callable[[], None] = lambda: None) -> None:
    """Rank 0: take the lease, repair what a dead job left, and leave a file for the other ranks to find.

    ``first`` says that no other rank can have begun yet. To find out that a holder is dead, and to remove what it left,
    may take long: ``sign`` shows those who wait that it goes on.
    """
    storage = session.storage
    session.run_id = run_id
    make_places(storage)
    interval = _beat_interval(session)
    session.lease = lease.acquire(storage, run_id, patience=_PATIENCE * interval, sign=sign)
    session.heartbeat = Heartbeat(storage, session.lease, interval)
    journal.recover(storage)
    _sweep(session, first=first, sign=sign)
    if storage.renames and not _can_rename(storage, run_id):
        logger.info("%s cannot rename directories: tags are written in place, as on an object store", storage.url)
        storage.renames = False
    storage.write(f"{PROBES}/{session.probe}", b"1")


def _can_rename(storage: Storage, run_id: str) -> bool:
    """Try it, on a directory with a file: that is what some mounts of object stores refuse."""
    source, target = f"{PROBES}/{run_id}.source", f"{PROBES}/{run_id}.target"
    storage.write(f"{source}/file", b"1")
    try:
        storage.rename(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_RENAME:
            raise
        return False
    finally:
        with suppress(OSError):  # else the next job sweeps it
            storage.remove(source)
            storage.remove(target)
    return True


def _see_probe(session: Session, within: float) -> None:
    """All ranks: find what rank 0 left, which shows that the directory is shared, and how tags are written."""
    found = _must_see(session, PROBES, [session.run_id, session.run_id + _IN_PLACE], within)
    if found != session.run_id:
        session.storage.renames = False


def _must_be_writable(session: Session) -> None:
    """Raise the storage's error if this rank may not write, without waiting for rank 0."""
    key = f"{PROBES}/{session.run_id}-rank_{session.topology.rank}"
    try:
        session.storage.write(key, b"1")
        session.storage.remove(key)
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise


def _must_be_live(session: Session) -> None:
    """Raise unless rank 0 of this very run holds the directory: the mark that was found may be of an earlier launch."""
    # Rank 0 may come late, and then has to find out whether an earlier holder is dead.
    deadline = effects.monotonic() + session.timeout + _PATIENCE * _beat_interval(session)
    beats, backoff = set[int | None](), Backoff(session.storage)
    while effects.monotonic() < deadline:
        holder = backoff.timed(lambda: lease.read(session.storage))
        if holder is not None and holder.run_id == session.run_id:
            runs = holder.holder_runs_here()
            if runs is None:  # on another host: its heartbeat has to change
                beats.add(lease.last_beat(session.storage, holder))
            if runs or len(beats - {None}) > 1:
                return
        backoff.pause()
    raise InvalidArgument(
        f"run_id {session.run_id!r}: no live rank 0 holds {session.storage.url} under it. Either rank 0 is gone, or it "
        "was refused because the run_id was used before; give every launch a new one"
    )


def _beat_interval(session: Session) -> float:
    """Seconds. Whoever finds a dead holder on another host must know before its own other ranks lose patience."""
    return min(10.0, session.timeout / (2 * _PATIENCE))


def _must_see(session: Session, folder: str, names: Sequence[str], within: float) -> str:
    """Which of ``names`` rank 0 wrote into ``folder``."""
    deadline, backoff = effects.monotonic() + within, Backoff(session.storage)
    while True:
        listed = {entry.name for entry in backoff.timed(lambda: session.storage.list(folder))}
        found = next((name for name in names if name in listed), None)
        if found is not None:
            return found
        if effects.monotonic() > deadline:
            raise DirectoryNotShared(
                f"rank {session.topology.rank} does not see {session.storage.url}/{folder}/{names[0]}, which rank 0 "
                "wrote: all ranks must save to the same directory on a file system that they share; for independent "
                "models on some of the ranks each, pass process_group="
            )
        backoff.pause()


def _sweep(session: Session, *, first: bool, sign: Callable[[], None]) -> None:
    """Remove what dead jobs left behind.

    We hold the lease, so rank 0 of every other run here has ended. What they had begun to do to tags in place is
    finished, see coordination.intents. Raises DirectoryInUse if another job took the directory over meanwhile: what is
    found may be its own then.
    """
    storage, run_id = session.storage, session.run_id
    for folder in (STAGING, VOTES, PROBES, TRASH):
        entries = storage.list(folder)
        if folder == TRASH and not _losses_are_settled(storage, entries):
            continue
        for entry in entries:
            sign()
            is_ours = entry.name.startswith(f"{run_id}-")
            if is_ours and not first:
                continue  # without a process group, another rank of this run may have been faster
            try:
                if folder == VOTES and not is_ours and _may_be_read(storage, entry.name):
                    continue
                session.require()
                if folder == TRASH:
                    journal.discard(storage, entry.name, session.confirm)
                else:
                    intents.clear(storage, f"{folder}/{entry.name}", session.confirm)
            except (OSError, MalformedFile) as error:
                logger.warning("could not remove %s/%s/%s: %s", storage.url, folder, entry.name, error)


def _losses_are_settled(storage: Storage, entries: Collection[DirEntry]) -> bool:
    try:
        journal.settle_losses(storage, entries)
    except OSError as error:
        logger.warning("could not sync %s/%s: %s: nothing in it is removed", storage.url, TRASH, error)
        return False
    return True


def _may_be_read(storage: Storage, attempt: str) -> bool:
    """Whether an attempt was decided and no job has begun since: its rank 0 ends without waiting until the others have
    read the verdict. Of the next job it is not spared again."""
    if not storage.is_file(verdict_file(attempt)) or storage.is_file(spared_file(attempt)):
        return False
    storage.write(spared_file(attempt), b"")
    return True
