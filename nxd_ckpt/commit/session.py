"""A job's claim on one checkpoint directory, agreed by all its ranks before the first byte is written."""

from __future__ import annotations

import errno
import math
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from nxd_ckpt import effects
from nxd_ckpt.coordination import journal, lease
from nxd_ckpt.coordination.agreement import Agreement, SingleProcessAgreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.control_files import (
    CLAIMS,
    HEARTBEAT,
    JOURNAL,
    LEASE,
    PLACE,
    PROBES,
    RUNS,
    STAGING,
    TRASH,
    VOTES,
    make_places,
    rank_file,
    spare_file,
    spared_file,
    verdict_dir,
    verdict_file,
    votes_dir,
)
from nxd_ckpt.coordination.lease import Heartbeat, Lease
from nxd_ckpt.coordination.peers import News, new_channel
from nxd_ckpt.coordination.waiting import Backoff
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointError,
    DirectoryNotShared,
    InvalidArgument,
    MalformedFile,
    PeerTimeout,
    StorageError,
)
from nxd_ckpt.storage.base import DirEntry, PerHost, Storage, can_rename
from nxd_ckpt.storage.system import HAS_LOCKS, default_work_dir, flags, locked, try_lock, unlock
from nxd_ckpt.tag.directory import tag_around
from nxd_ckpt.tag.range_reader import in_parallel

_POLL = 0.02


@contextmanager
def writing_slot(run_id: str, num_workers: int | None, timeout: float) -> Iterator[Callable[[], None]]:
    """Hold one of this host's ``num_workers`` slots of the run ``run_id`` to write; None means no limit.

    Slots are file locks in the host's temporary directory. The kernel frees a lock when its holder dies; one that is
    alive but stuck is waited for. Yields a function that the holder calls now and then while it makes progress.

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
            last_times = times
            since = now
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


_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_IN_PLACE = ".in_place"
"""End of the name of rank 0's probe if tags are written in place (see commit.publication), so that all ranks know."""

_SEEN_WITHIN = 30.0
"""Seconds that a shared file system may take to show a new file to another host (NFS attribute caches: up to 30)."""

_SPARE = 4096
"""Bytes: more than a vote or verdict with an error needs, and a page of a file system."""

_LONG_AGO = 600.0
"""Seconds after which no process is still about to give a file its name."""

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
    """The mark of the directory with the votes, where each host has a disk of its own."""
    counter: int = 0
    """The number of the last attempt."""
    lost_votes: dict[str, Vote] = field(default_factory=dict)
    """This rank's votes that could not be cast yet, by attempt; until they are, others must assume that it is writing.

    """
    is_gone: Callable[[int], bool] = lambda rank: False
    """Return whether that rank's process is known to have ended."""
    news: News = field(default_factory=News)
    """Words of the ranks to each other, of their votes and verdicts in a store."""
    sign: Callable[[], None] = lambda: None
    """Show the ranks that wait for rank 0 that it makes progress; do nothing if none does."""
    last_failed: bool = False
    """True if the last attempt ended with a verdict of rank 0 that it failed: the next one waits for its space."""
    missed: set[str] = field(default_factory=set)
    """Tags that rank 0 was saving while this rank saved others, since the last save that succeeded."""
    tried: set[str] = field(default_factory=set)
    """Tags that this rank was saving, since the last save that succeeded."""
    last_saved: str | None = None
    """The tag of the last save of this run that became visible."""
    resumed_from: str | None = None
    """The tag that this run has loaded since then: the next save follows it, whatever newer ones there are."""
    surplus: deque[str] = field(default_factory=deque)
    """Tags to remove behind the saves in flight, see `commit.retention.remove_surplus`."""
    warned_of_steps: bool = False
    """True if it was said that a save has an earlier step than the latest tag."""
    warned_of_content: bool = False
    """True if it was said that ranks pass other user content than rank 0."""
    _spares: list[str] = field(default_factory=list)
    _give_host_back: Callable[[], None] = lambda: None
    """Release the claim on this host's directory, where each has a disk of its own."""
    leaves_at: float = math.inf
    """Time at which this rank, after an exception, stops waiting for the others (seconds, as effects.monotonic())."""

    def attempt(self, counter: int) -> str:
        return f"{self.run_id}-{counter}"

    def counter_of(self, attempt: str) -> int | None:
        """Return the number of an attempt of this run; None for another's."""
        run_id, _, number = attempt.rpartition("-")
        return int(number) if run_id == self.run_id and number.isdigit() else None

    @property
    def probe(self) -> str:
        """The name of the file that rank 0 leaves for the others to find."""
        return self.run_id if self.storage.renames else self.run_id + _IN_PLACE

    @property
    def is_alone(self) -> bool:
        """True if there is no other rank: then votes and verdicts stay in memory, as nobody else reads them."""
        return self.topology.world_size == 1

    def keep_spares(self) -> None:
        """Reserve disk space for a vote, and on rank 0 for a verdict, as far as there is any.

        Rank 0 also makes the directories in which the votes and the verdict of the next attempt will be.
        """
        if self.is_alone:
            return
        rank = self.topology.rank
        if rank == 0 and self.storage.may_be_unmounted:
            with suppress(OSError):
                self.storage.without_syncs().make_dir(verdict_dir(self.attempt(self.counter + 1)))
        for number in range(1 if rank else 2) if self.storage.may_be_unmounted else ():
            key = spare_file(self.run_id, rank, number)
            if key not in self._spares:
                with suppress(OSError):
                    self.storage.write(key, bytes(_SPARE))
                    self._spares.append(key)

    def write_in_spare(self, key: str, data: bytes) -> bool:
        """Write a small file into reserved space, even on a full disk; False if no space is left in reserve."""
        if not self._spares:
            return False
        spare = self._spares.pop()
        try:
            if len(data) <= _SPARE:
                self.storage.write_reserved(spare, key, data)
                return True
        except OSError:  # a file system that overwrites nothing in place
            pass
        with suppress(OSError):
            self.storage.remove(spare)
        return False

    def give_spares(self) -> None:
        """Release the reserved space."""
        if self.topology.rank == 0 and self.run_id and not self.is_alone:
            with suppress(OSError):
                self.storage.remove(votes_dir(self.attempt(self.counter + 1)))
        while self._spares:
            with suppress(OSError):
                self.storage.remove(self._spares.pop())

    def _leave(self) -> None:
        """Remove the job's own directory if this is the last rank to leave, and nobody needs what is in it.

        Others need this rank's vote no more, as it has the verdict. Only empty directories are removed: what another
        job writes there at the same time stays, and it makes directories again that it misses.
        """
        storage = self.storage
        votes = votes_dir(self.attempt(self.counter))
        with suppress(OSError):
            storage.remove(rank_file(self.attempt(self.counter), self.topology.rank, "vote"))
            if not storage.is_file(LEASE) and not any(".vote" in entry.name for entry in storage.list(votes)):
                storage.remove(votes)
        with suppress(OSError, MalformedFile):
            folders = [f"{HIDDEN}/{entry.name}" for entry in storage.list(HIDDEN) if entry.is_dir]
            for folder in [*folders, HIDDEN]:
                with suppress(OSError):
                    storage.drop_empty(folder)

    @property
    def votes_here(self) -> bool:
        """True if votes are in this host's directory, not in another host's."""
        return not isinstance(self.storage, PerHost) or self.storage.is_home

    def require_votes(self) -> None:
        """Raise StorageError if votes are on another host, and its directory has lost its mark."""
        if not self.votes_here and self.storage.read(PLACE, NOTE) != self.home_place:
            raise StorageError(
                f"{self.storage.url}: the directory on the host of rank 0 is not the one that this job began with: its "
                f"mark {PLACE} is not there. It was unmounted, or something else is mounted or linked in its place"
            )

    def require(self, *, strictly: bool = False) -> None:
        """Raise DirectoryInUse if this is rank 0 and another job took the directory over meanwhile.

        With ``strictly`` also if that job has ended since; see lease.require.
        """
        if self.lease is not None:
            lease.require(self.storage, self.lease, strictly=strictly)

    def confirm(self) -> bool:
        """Return True, or raise DirectoryInUse if another job took the directory over."""
        self.require()
        return True

    def claim_host(self, storage: PerHost) -> None:
        """Claim the directory on this host until `close`.

        Raises DirectoryInUse if a live job writes there whose rank 0, and lease, is on a host that this job does not
        have.
        """
        self._give_host_back = storage.claim(CLAIMS, self.run_id)

    def mark_host(self) -> None:
        """Mark the directory on this host, and note the mark of rank 0's, which rank 0 has made by now."""
        lease.mark_place(self.storage)
        self.home_place = self.storage.read(PLACE, NOTE)

    def is_leaving(self) -> bool:
        return effects.monotonic() >= self.leaves_at

    def close(self, *, clean: bool = False) -> None:
        """Release the directory, after the last save was decided; if it is ``clean``, leave nothing that is not needed.
        """
        # In a store a directory is there while a key lies in it: there is nothing to remove.
        clean = clean and self.storage.renames and not self.last_failed and not isinstance(self.storage, PerHost)
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.lease is not None:
            with suppress(OSError):
                self.storage = lease.directory_of(self.storage, self.lease)
            with suppress(OSError):  # another host may be away: that must not keep the lease
                self.storage.remove(f"{PROBES}/{self.probe}")
            if clean:
                with suppress(OSError):  # while this job has the lease: the next one marks the directory again
                    self.storage.remove(PLACE)
            with suppress(OSError):
                lease.release(self.storage, self.lease)
        self.give_spares()
        if clean:
            self._leave()
        with suppress(OSError):
            self._give_host_back()
        self.news.close()
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
            session.is_gone = agreement.is_gone
            session.sign = agreement.sign
            _open_with_group(session, agreement, run_id)
        session.place = lease.place_of(storage)
    except BaseException as error:
        session.close()  # the others must not find a directory that nobody holds
        is_every_ranks = isinstance(error, Exception) and not isinstance(error, PeerTimeout)
        if agreement is not None and isinstance(storage, PerHost) and is_every_ranks:
            # A lease that was taken over may lie on a host whose rank stops serving it as soon as this raises.
            with suppress(CheckpointError):
                agreement.broadcast(None)
        raise
    return session


def open_session_alone(storage: Storage, timeout: float) -> Session:
    """Claim the directory for a command of one process, whatever job it is part of. Raises as `open_session` does."""
    return open_session(storage, Topology(), SingleProcessAgreement(), None, timeout)


def _open_with_group(session: Session, agreement: Agreement, run_id: str | None) -> None:
    storage = session.storage

    # On a file system a look costs next to nothing, and another host may not see at once what it was told of.
    connected = agreement.gather(agreement.peers is not None and not storage.renames)

    def claim() -> tuple[str, int | None]:
        _refuse_inside_tag(storage)
        _take_lease(session, run_id or uuid.uuid4().hex[:12])
        if not isinstance(storage, PerHost):
            _repair(session, first=True)
        return session.run_id, new_channel() if connected and all(connected) else None

    session.run_id, channel = decided_by_rank0(agreement, claim)
    if channel is not None:
        session.news = News(agreement.peers, channel, agreement.world_size)
    if isinstance(storage, PerHost):
        on_all(agreement, lambda: session.claim_host(storage))
        decided_by_rank0(agreement, lambda: _repair(session, first=True))
    # Shorter than the others' timeout, so that the rank which looks in vain reports it to them.
    within = min(_SEEN_WITHIN, session.timeout / 2)
    on_all(agreement, lambda: _see_probe(session, within))
    if isinstance(storage, PerHost):
        on_all(agreement, session.mark_host)
        storage.expect(PLACE, lease.place_of(storage))


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
                f"run_id {run_id!r} was used in {session.storage.url} before; give every launch a new one (for "
                "example with the scheduler's restart count), else earlier votes could be taken for this launch's"
            )
        _take_lease(session, run_id)
        _repair(session, first=False)
    else:
        _must_be_writable(session)
        _must_see(session, RUNS, [run_id], session.timeout)  # rank 0 may come as late as any rank
        _must_be_live(session)
        _see_probe(session, session.timeout)


def _refuse_inside_tag(storage: Storage) -> None:
    around = tag_around(storage)
    if around is not None:
        raise InvalidArgument(
            f"{storage.url} is, or lies inside, the checkpoint {around}, so copying or removing that would "
            "include what is saved here. Pass the directory of the tags, or another one"
        )


def _take_lease(session: Session, run_id: str) -> None:
    """Take the lease on rank 0. Finding out that a holder is dead may take long."""
    session.run_id = run_id
    make_places(session.storage)
    interval = _beat_interval(session)
    session.lease = lease.acquire(session.storage, run_id, patience=_PATIENCE * interval, sign=session.sign)
    session.heartbeat = Heartbeat(session.storage, session.lease, interval)


def _repair(session: Session, *, first: bool) -> None:
    """Repair what a dead job left, on rank 0, and leave a file for the others; ``first``: none can have begun yet."""
    storage = session.storage
    journal.recover(storage)
    _sweep(session, first=first)
    if storage.renames and not can_rename(storage, f"{PROBES}/{session.run_id}"):
        logger.info("%s cannot rename directories: tags are written in place, as on an object store", storage.url)
        storage.renames = False
    storage.write(f"{PROBES}/{session.probe}", b"1")


def _see_probe(session: Session, within: float) -> None:
    """Find rank 0's probe: it shows that the directory is shared, and how tags are written."""
    probe = _must_see(session, PROBES, [session.run_id, session.run_id + _IN_PLACE], within)
    if probe != session.run_id:
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
    """Raise unless rank 0 of this launch has the directory: the mark may be an earlier launch's."""
    # Rank 0 may come late, and then has to find out whether an earlier holder is dead.
    deadline = effects.monotonic() + session.timeout + _PATIENCE * _beat_interval(session)
    beats: set[int | None] = set()
    backoff = Backoff(session.storage)
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
    """Seconds between heartbeats: rank 0 must detect a dead holder before its own other ranks time out."""
    return min(10.0, session.timeout / (2 * _PATIENCE))


def _must_see(session: Session, folder: str, names: Sequence[str], within: float) -> str:
    """Return the first of ``names`` that is in ``folder``, where rank 0 wrote one; wait ``within`` seconds for it."""
    deadline = effects.monotonic() + within
    backoff = Backoff(session.storage)
    while True:
        listed = {entry.name for entry in backoff.timed(lambda: session.storage.list(folder))}
        seen = next((name for name in names if name in listed), None)
        if seen is not None:
            return seen
        if effects.monotonic() > deadline:
            raise DirectoryNotShared(
                f"rank {session.topology.rank} does not see {session.storage.url}/{folder}/{names[0]}, which rank 0 "
                "wrote: all ranks must save to the same directory on a file system that they share; for independent "
                "models on some of the ranks each, pass process_group="
            )
        backoff.pause()


def _sweep(session: Session, *, first: bool) -> None:
    """Remove what dead jobs left behind.

    This job has the lease, so rank 0 of every other run here has ended. What they had begun to do to tags in place is
    finished, see coordination.journal. Raises DirectoryInUse if another job took the directory over meanwhile: the
    files may be its own then.
    """
    storage = session.storage
    run_id = session.run_id
    if storage.renames:
        _sweep_unnamed(storage)
    folders = (STAGING, VOTES, PROBES, TRASH)
    for folder, entries in zip(folders, in_parallel(storage, folders, storage.list), strict=True):
        if folder == TRASH and not _losses_are_settled(storage, entries):
            continue
        for entry in entries:
            session.sign()
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
                    journal.clear(storage, f"{folder}/{entry.name}", session.confirm)
            except (OSError, MalformedFile) as error:
                logger.warning("could not remove %s/%s/%s: %s", storage.url, folder, entry.name, error)


def _sweep_unnamed(storage: Storage) -> None:
    """Remove files that a process was killed before it gave them their names, such as those of heartbeats.

    Nobody but this job, which has the lease, writes the journal; others may be about to take the lease.
    """
    with suppress(OSError, MalformedFile):
        now = storage.time(HEARTBEAT)  # of the same file system, and new
        for entry in storage.list(HIDDEN):
            key = f"{HIDDEN}/{entry.name}"
            is_ours = key.startswith(f"{HIDDEN}/.{os.path.basename(JOURNAL)}.")
            if not entry.is_dir and entry.name.startswith(".") and (is_ours or now - storage.time(key) > _LONG_AGO):
                storage.remove(key)


def _losses_are_settled(storage: Storage, entries: Collection[DirEntry]) -> bool:
    try:
        journal.settle_losses(storage, entries)
    except OSError as error:
        logger.warning("could not sync %s/%s: %s: nothing in it is removed", storage.url, TRASH, error)
        return False
    return True


def _may_be_read(storage: Storage, attempt: str) -> bool:
    """Return whether an attempt was decided and no job has begun since.

    Its rank 0 may end before the others have read the verdict, so the first job after it leaves the verdict. The second
    does not.
    """
    if not storage.is_file(verdict_file(attempt)) or storage.is_file(spared_file(attempt)):
        return False
    storage.write(spared_file(attempt), b"")
    return True
