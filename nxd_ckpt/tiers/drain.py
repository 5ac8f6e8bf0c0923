"""Drains: background copiers, on rank 0, of visible tags from a job's first tier to the others.

Each lower tier has its own drain, which reads the first tier: if one is slow, full or away, the others continue. A
drain copies one tag at a time, as `nxd_ckpt.convert.copy_checkpoint` does: it is verified on the way, an interrupted
copy is continued, and the tag appears at once. At most one more tag waits, the newest. Nothing is remembered between
two launches: the next one takes the newest tag of the first tier, and copies it to every tier without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.commit.commit import retain
from nxd_ckpt.commit.publication import Publication, copy_publication, is_visible
from nxd_ckpt.commit.session import Session, open_session_alone
from nxd_ckpt.commit.tier import Tier
from nxd_ckpt.conversion.cp import copy_files
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import COPIES
from nxd_ckpt.core.units import size
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, CorruptCheckpoint, in_words, to_wire
from nxd_ckpt.output.cp_files import CopyMeans, HostCopies, files_to_copy
from nxd_ckpt.saving.pending import Helpers, Worker
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.hosts.hosts_storage import HostsStorage
from nxd_ckpt.storage.transfer import CopyPace
from nxd_ckpt.tag.choosing import open_complete_tag
from nxd_ckpt.tag.directory import list_tags
from nxd_ckpt.tag.identity import note_damage
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.union import choose_nearest

_COPIERS = 4
"""Files that a host copies at once: many are small, and stores answer slowly."""
_ASKING = 64
"""Maximum number of files that all hosts copy at once."""
_TRIES = 3
_PAUSE = 1.0
"""Seconds before a copy is tried again after an error of the storage; doubled each time."""


class PendingCopy(NamedTuple):
    """A tag that is to be copied: its bytes, and whether it may replace one.

    ``since`` is the time at which it became visible (seconds, as effects.monotonic()).
    """

    tag: str
    nbytes: int
    overwrite: bool | None
    since: float


class Drain:
    """The copier of tags from ``source``, the first tier, to one other tier, whose lease it has."""

    def __init__(self, tier: Tier, number: int, source: Storage, target: Storage, timeout: float) -> None:
        self.tier = tier
        self._number = number
        self.newest: float = 0.0
        self._source = source
        self._target = target
        self._timeout = timeout
        self._changed = effects.Condition()
        self._stopping = effects.Event()
        self._waiting: PendingCopy | None = None
        self._running: PendingCopy | None = None
        self._error: Exception | None = None
        self._session: Session | None = None
        self._pace = CopyPace(None)
        self._saves = 0
        # All threads start here: an exiting interpreter, which may have a tag to copy, starts none.
        self._worker = Worker("nxd_ckpt-drain")
        hosts = len(source.hosts.directories) if isinstance(source, HostsStorage) else 1
        self._copiers = Helpers(min(_COPIERS * hosts, _ASKING), "nxd_ckpt-drain-copy")
        self._readers = Helpers(_COPIERS, "nxd_ckpt-drain-read")

    def claim(self) -> Session:
        """Take the tier's lease, once. ``newest`` is then the order time of its newest tag.

        Raises DirectoryInUse, or the storage's error.
        """
        if self._session is None:
            self._session = open_session_alone(self._target, self._timeout)
            self.newest = max((info.latest_time for info in list_tags(self._target)), default=0.0)
        return self._session

    @property
    def unread(self) -> set[str]:
        """Tags that are being copied, or wait for it."""
        with self._changed:
            return {copy.tag for copy in (self._running, self._waiting) if copy is not None}

    def saved(self, copy: PendingCopy) -> None:
        """Note a new save of the first tier, and queue it unless ``every`` skips it."""
        self._saves += 1
        if (self._saves - 1) % self.tier.every == 0:
            self.hand_over(copy)

    def hand_over(self, copy: PendingCopy) -> None:
        """Queue a copy, in place of one that still waits."""
        with self._changed:
            skipped = self._waiting
            self._waiting = copy
        if skipped is not None and skipped.tag != copy.tag:
            logger.info("%s is not copied to tier %s: %s is newer", skipped.tag, self.tier.name, copy.tag)
        self._worker.submit(self._next)

    def finished(self, within: float) -> bool:
        """Wait at most so many seconds; True if nothing is left to copy. Raises the last failure."""
        idle = self.idle(within)
        if idle and self._error is not None:
            raise self._error
        return idle

    def idle(self, within: float | None) -> bool:
        """Wait at most so many seconds; True if nothing is being copied, nor waits for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running is None and self._waiting is None, within)

    def announce(self) -> None:
        """Log the tags that are waited for."""
        if self.unread:
            logger.info("waiting until tier %s has %s", self.tier.name, " and ".join(sorted(self.unread)))

    def close(self, grace: float | None) -> None:
        """Release the tier, once everything is copied.

        With a ``grace`` copying stops, and the next launch continues; if that takes longer than so many seconds, the
        lease is kept until the process ends.
        """
        if grace is not None:
            self._stopping.set()
            self._pace.stop.set()
        else:
            self.announce()
        if not self.idle(grace):
            return
        self._worker.stop()
        self._copiers.shutdown()
        self._readers.shutdown()
        if self._session is not None:
            self._session.close()

    def _next(self) -> None:
        with self._changed:
            self._running = self._waiting
            self._waiting = None
            copy = self._running
        if copy is None:
            return
        error: Exception | None = CheckpointError(f"{copy.tag} was not copied to tier {self.tier.name}")
        try:
            error = self._try(copy)
        finally:
            with self._changed:
                self._running = None
                self._error = error
                self._changed.notify_all()

    def _try(self, copy: PendingCopy) -> Exception | None:
        """Copy, with retries for errors that may pass; return the last error, which was logged, or None."""
        for tried in range(1, _TRIES + 1):
            self._pace = CopyPace(self.tier.rate)
            if self._stopping.is_set():
                return None
            try:
                self._copy(copy)
                return None
            except Exception as error:
                problem = error
            if not isinstance(problem, (CheckpointError, OSError)):
                logger.error("nxd_ckpt: unexpected error in a drain", exc_info=problem)
            may_pass = isinstance(problem, OSError) and not isinstance(problem, CheckpointError)
            if not may_pass or tried == _TRIES or self._waiting is not None:
                break
            self._stopping.wait(_PAUSE * 2 ** (tried - 1))
        if self._stopping.is_set():
            return None
        logger.warning(
            "nxd_ckpt: %s was not copied to tier %s; training continues, and the next save for that tier is copied: "
            "%s",
            copy.tag,
            self.tier.name,
            in_words(to_wire(problem)),
        )
        return problem

    def _copy(self, copy: PendingCopy) -> None:
        started = effects.monotonic()
        session = self.claim()
        session.require()  # the tier's content counts only while it is still this tier
        opened = open_complete_tag(self._source, copy.tag)
        with opened.guarded():
            files = files_to_copy(opened)
        saved = None if opened.manifest is None else opened.manifest.attempt
        session.counter += 1
        publication = copy_publication(session, copy.tag, copy.overwrite, saved, session.counter)
        is_there = _has(session.storage, opened)
        if not is_there:
            means = CopyMeans(self._copiers, self._pace, self._readers)
            source = self._source
            hosts = None
            if isinstance(source, HostsStorage):  # each host copies its own files
                hosts = HostCopies(source, copy.tag, files, self._number, _COPIERS)
            try:
                with opened.guarded(verified=True), _noted(session, copy.tag):
                    copy_files(opened, files, publication, session, means, hosts)
            except CorruptCheckpoint as error:
                if hosts is None:  # else it may be that of one copy of several
                    note_damage(self._source, opened.identity, str(error))
                raise
        self._retain(session, publication)
        if not is_there:
            self._report(copy, sum(file.nbytes for file in files), started)

    def _retain(self, session: Session, publication: Publication) -> None:
        rules = self.tier.rules
        if rules is not None:
            session.require()
            retain(session, publication, rules)
            journal.discard_trash(session.storage, session.run_id, session.confirm)

    def _report(self, copy: PendingCopy, nbytes: int, started: float) -> None:
        now = effects.monotonic()
        waiting = self._waiting
        logger.info(
            "copied %s to tier %s: %s in %.2f s, %.2f s after its save; %s behind",
            copy.tag,
            self.tier.name,
            size(nbytes),
            now - started,
            now - copy.since,
            size(0 if waiting is None else waiting.nbytes),
        )


class Drains:
    """The drains of all lower tiers of a job."""

    def __init__(self, tiers: Sequence[Tier], storages: Sequence[Storage], timeout: float) -> None:
        """Claim every tier that can be reached. Raises DirectoryInUse, InvalidArgument; then none is claimed."""
        self._source = storages[0]
        self._drains: list[Drain] = []
        try:
            for number, (tier, storage) in enumerate(zip(tiers[1:], storages[1:], strict=True), 1):
                self._drains.append(Drain(tier, number, self._source, storage, timeout))
                _claim(self._drains[-1])
        except BaseException:
            self.close(0.0)
            raise

    @property
    def unread(self) -> set[str]:
        """Tags of the first tier that are still to be copied."""
        return set[str]().union(*(drain.unread for drain in self._drains))

    @property
    def newest(self) -> float:
        """Order time of the newest tag that was on any of the tiers when it was claimed."""
        return max(drain.newest for drain in self._drains)

    def resume(self) -> None:
        """Copy the newest complete tag of the first tier to the tiers without it.

        The last launch may have ended before.
        """
        tags = {info.tag: info for info in list_tags(self._source)}
        newest = None
        with suppress(CheckpointError):  # there is none; a warning named tags that lost files
            newest = tags.get(choose_nearest([self._source], None).tag)
        if newest is not None and newest.ours:
            for drain in self._drains:
                drain.hand_over(PendingCopy(newest.tag, 0, None, effects.monotonic()))

    def saved(self, tag: str, nbytes: int, overwrite: bool | None) -> None:
        """Queue the copies of a save that is visible on the first tier."""
        for drain in self._drains:
            drain.saved(PendingCopy(tag, nbytes, overwrite, effects.monotonic()))

    def finished(self, tier: int, within: float) -> bool:
        """Wait at most so many seconds; True if that tier has all its tags. Raises the last failure."""
        return self._drains[tier - 1].finished(within)

    def idle(self, within: float) -> bool:
        """Wait at most so many seconds; True if no tier is being copied to any more."""
        return all(drain.idle(within / len(self._drains)) for drain in self._drains)

    def announce(self) -> None:
        """Log the tags that are waited for."""
        for drain in self._drains:
            drain.announce()

    def close(self, grace: float | None) -> None:
        """Release the tiers, once everything is copied. With a ``grace`` copying stops within so many seconds."""
        for drain in self._drains:
            drain.close(grace)


def _claim(drain: Drain) -> None:
    """Claim a tier, if it can be reached: training does not depend on it, and it is tried again."""
    try:
        drain.claim()
    except OSError as error:
        logger.warning(
            "nxd_ckpt: tier %s cannot be reached, and is tried again after each save for it: %s",
            drain.tier.name,
            in_words(to_wire(error)),
        )


def _has(storage: Storage, opened: OpenTag) -> bool:
    """Return whether this very save, ``opened``, is visible there. Names do not tell, and attempts may repeat."""
    if opened.manifest is None:
        return False
    order_times = {info.tag: info.order_time for info in list_tags(storage) if info.complete}
    same = order_times.get(opened.tag) == opened.manifest.order_time
    return same and is_visible(storage, opened.tag, opened.manifest.attempt)


@contextmanager
def _noted(session: Session, tag: str) -> Iterator[None]:
    """Note, within the block, that ``tag`` is copied; first remove interrupted copies of other tags.

    Nobody continues those. On a file system a copy is collected under its name in COPIES. Where tags are written in
    place an intent of that name stands for it.
    """
    storage = session.storage
    for entry in storage.list(COPIES):
        if entry.name != tag:
            journal.clear(storage, f"{COPIES}/{entry.name}", session.confirm)
    note = f"{COPIES}/{tag}"
    if not storage.renames:
        journal.declare(storage, note, tag)
    yield
    if not storage.renames:
        with suppress(OSError):  # the tag is complete, so a remaining note removes nothing
            storage.remove(note)
