"""Publications: where an attempt's files are written, and the steps that make them a visible tag.

Where directories can be renamed, an attempt is *staged*: written out of sight, and renamed when it is complete.
Elsewhere (object stores, and some ways to mount them) it is written *in place*: the tag is visible once ``done``
exists, which is created last and removed first.

A publication that ``resumes`` a copy keeps the files of an interrupted copy. It collects them in a folder named after
the tag, which no new job sweeps, or in place without an intent.

A publication is plain data, so that processes that only write files (a conversion's workers) can have it too.
"""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Protocol

from nxd_ckpt import effects
from nxd_ckpt.commit.session import Session
from nxd_ckpt.commit.voting import AttemptVotes
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import COPIES, staging_dir, trash_file
from nxd_ckpt.coordination.guests import remove_all_but_guests
from nxd_ckpt.coordination.journal import not_undone
from nxd_ckpt.core.names import DONE, MARKER
from nxd_ckpt.errors import CheckpointError, DirectoryInUse, MalformedFile, OutcomeUnknown, SaveFailed
from nxd_ckpt.storage.base import DirEntry, Storage, Writer
from nxd_ckpt.tag.directory import clash
from nxd_ckpt.tag.identity import FOREIGN_MARK, manifest_of, mark_of
from nxd_ckpt.tag.range_reader import answers_of

_FEW = 8
"""Number of files of one directory up to which each is asked for by name, instead of listing the directory."""


NOTHING: Mapping[str, bytes] = MappingProxyType({})


class Publication(Protocol):
    """One attempt's way to its tag.

    ``overwrite``: True if a complete tag may be replaced; None if it may where the old tag stays until the new one is
    complete.
    """

    in_place: ClassVar[bool]
    """True if no rank may write before rank 0 has begun: until then the files there may be another attempt's."""

    @property
    def attempt(self) -> str: ...

    @property
    def tag(self) -> str: ...

    @property
    def folder(self) -> str:
        """The folder of the attempt's files."""

    def begin(self, session: Session) -> None:
        """Make room, on rank 0 before anything is written. Raises SaveFailed if the tag must not be saved."""

    def put(self, storage: Storage, files: Mapping[str, bytes]) -> None:
        """Write small files into the folder, with durable names; never over another job's."""

    def must_hold(self, storage: Storage, files: Collection[str]) -> None:
        """Raise DirectoryInUse unless these names, which were written into the folder, are there.

        A job that takes over a directory moves a staged folder away as a whole. Writing after that creates the folder
        again, with only the later files in it.
        """

    def publish(
        self, session: Session, order_time: float, files: Collection[str], last: Mapping[str, bytes] = NOTHING
    ) -> None:
        """Make the durable tag visible, durably, once the small files ``last`` complete it. Rank 0 only.

        ``files`` are names of files in the folder; of every rank at least the one that it wrote last.

        Raises, with only the earlier tags visible:
            SaveFailed, OSError: it cannot be done.
            DirectoryInUse: another job took the directory over, and may have removed some of it.
        Raises, where the tag may be visible:
            OutcomeUnknown: the storage does not say.
        """

    def retire(
        self, session: Session, tag: str, is_kept: Callable[[str], bool] = lambda key: False, order_time: float = 0.0
    ) -> bool:
        """Make another tag invisible at once; journal.discard_trash deletes it. True if it was removed.

        ``is_kept`` gets the key where the tag lies by then. It is called after others can see that the tag is going, so
        that a job that objects until then, and still sees the tag, is heard. If this process ends before that, the next
        one sees by ``order_time``, that of the save which is to go, whether it is another.
        """


@dataclass(frozen=True)
class Staged:
    """A publication on a file system: one rename makes the tag visible, and an old tag stays until then.

    Of a copy, ``saved`` is the attempt of the save; it is empty for a tag of NxD, whose ``done`` stays NxD's.
    """

    attempt: str
    tag: str
    overwrite: bool | None = None
    resumes: bool = False
    saved: str | None = None
    in_place: ClassVar[bool] = False

    @property
    def folder(self) -> str:
        return f"{COPIES}/{self.tag}" if self.resumes else staging_dir(self.attempt)

    def begin(self, session: Session) -> None:
        if self.overwrite is False:
            _refuse_existing(session.storage, self.tag)

    def put(self, storage: Storage, files: Mapping[str, bytes]) -> None:
        written: list[Writer] = []
        folders = {posixpath.dirname(f"{self.folder}/{name}") for name in files}
        try:
            for name, data in files.items():
                written.append(_create(storage, f"{self.folder}/{name}", len(data)))
                written[-1].write_at(0, data)
            # Nobody looks for these files yet, so that their names need not wait for their bytes.
            effects.side_by_side(
                *(writer.close for writer in written), *(partial(storage.sync_dir, folder) for folder in folders)
            )
        except BaseException:
            for writer in written:
                writer.abort()
            raise

    def publish(
        self, session: Session, order_time: float, files: Collection[str], last: Mapping[str, bytes] = NOTHING
    ) -> None:
        storage = session.storage
        if self.overwrite is False:
            _refuse_existing(storage, self.tag)
        _refuse_clash(storage, self.tag)
        if self.resumes:
            self._publish_copy(session, order_time, files, last)
            return
        mark = _mark(order_time, self.attempt if self.saved is None else self.saved)
        self.put(storage, {**last, MARKER: FOREIGN_MARK, DONE: mark})
        storage.set_time(f"{self.folder}/{DONE}", order_time)
        self.must_hold(storage, self._not_listed(storage, files))
        try:
            journal.publish(storage, self.attempt, self.tag, partial(visibility, storage, self.tag, self.attempt))
        except (FileNotFoundError, FileExistsError):
            # Another job took this one for dead while it stood still, and may have finished the replacement for it.
            if not is_visible(storage, self.tag, self.attempt):
                raise

    def _publish_copy(
        self, session: Session, order_time: float, files: Collection[str], last: Mapping[str, bytes]
    ) -> None:
        """Rename the collected copy to a staged attempt, and publish that.

        No new job sweeps the folder of copies, and another job may copy the same tag. So only a job that still has the
        lease after it moved the folder away has all of it for itself.
        """
        storage = session.storage
        staged = replace(self, resumes=False)
        session.require(strictly=True)
        storage.rename(self.folder, staged.folder)
        try:
            session.require(strictly=True)
            staged.publish(session, order_time, files, last)
        except BaseException:
            with suppress(OSError):  # else the next copy starts from nothing
                if not journal.is_open(storage):  # else it is the old tag, or needed to finish the replacement
                    storage.rename(staged.folder, self.folder)
            raise

    def must_hold(self, storage: Storage, files: Collection[str]) -> None:
        folders = Counter(map(posixpath.dirname, files))
        few = [name for name in files if folders[posixpath.dirname(name)] <= _FEW]
        many = [name for name in files if folders[posixpath.dirname(name)] > _FEW]
        for name in [*few, *self._not_listed(storage, many)]:
            key = f"{self.folder}/{name}"
            if not storage.is_file(key):
                raise DirectoryInUse(
                    f"{storage.url}/{key} was written, and is gone: another job took the directory over, because this "
                    "one gave no sign of life for too long, or somebody removed the file. Stop one of the two jobs"
                )

    def _not_listed(self, storage: Storage, files: Collection[str]) -> list[str]:
        """Return the ``files`` that no listing shows.

        A network file system may show an old listing, so these have to be asked for by name.
        """
        listed = {
            posixpath.join(folder, entry.name)
            for folder in {posixpath.dirname(name) for name in files}
            for entry in storage.list(f"{self.folder}/{folder}".rstrip("/"))
        }
        return [name for name in files if name not in listed]

    def retire(
        self, session: Session, tag: str, is_kept: Callable[[str], bool] = lambda key: False, order_time: float = 0.0
    ) -> bool:
        return journal.remove_tag(session.storage, tag, self.attempt, is_kept, order_time)


@dataclass(frozen=True)
class InPlace:
    """A publication in a store without renames: keys are claimed by creating them, and ``done`` is the commit.

    ``done`` has the tag's order time, because a store cannot set a file's time, and the attempt, which tells whose it
    is. A publication without an attempt copies a tag of NxD's, with NxD's ``done``: ours says that there is a manifest.
    """

    attempt: str
    tag: str
    overwrite: bool | None = None
    resumes: bool = False
    in_place: ClassVar[bool] = True

    @property
    def folder(self) -> str:
        return self.tag

    def begin(self, session: Session) -> None:
        storage = session.storage
        if self.resumes:
            session.require()
            if not self.overwrite:
                _refuse_existing(storage, self.tag)
            _refuse_clash(storage, self.tag)
            storage.remove_if(f"{self.tag}/{DONE}", session.confirm)  # the replaced tag is no checkpoint any more
            session.require()
            storage.discard_unfinished(self.tag)
            storage.make_dir(self.tag)
            storage.link_new(f"{self.tag}/{MARKER}", FOREIGN_MARK)  # tells later whose an interrupted copy is
            return
        _, entries, earlier, is_file = answers_of(
            storage,
            session.require,
            partial(storage.list, self.tag),
            partial(journal.saves_of, storage, self.tag),
            partial(storage.is_file, self.tag),
        )
        if not self.overwrite and DirEntry(DONE, False) in entries:
            raise _exists(storage, self.tag)
        if not earlier and (is_file or entries):
            _refuse_clash(storage, self.tag)
        if earlier:
            self._await_writers(session, earlier)
            session.require()  # again: that may have taken long
        journal.declare(storage, staging_dir(self.attempt), self.tag)
        if earlier or entries:
            self._empty(session)
        for attempt in earlier:
            storage.remove(staging_dir(attempt))
        session.require()
        # Not just "1": a late request to remove the previous tag's marker would remove this one.
        if not storage.link_new(f"{self.tag}/{MARKER}", f"1 {self.attempt}".encode()):
            raise self._another_job(session)

    def put(self, storage: Storage, files: Mapping[str, bytes]) -> None:
        for key, data in ((f"{self.folder}/{name}", data) for name, data in files.items()):
            # The file may come from an earlier try of the storage, whose reply was lost.
            if not storage.link_new(key, data) and storage.read(key) != data:
                raise FileExistsError(f"{storage.url}/{key} was written by somebody else meanwhile")
            storage.sync_dir(posixpath.dirname(key))

    def publish(
        self, session: Session, order_time: float, files: Collection[str], last: Mapping[str, bytes] = NOTHING
    ) -> None:
        storage = session.storage
        done = f"{self.tag}/{DONE}"
        mark = _mark(order_time, self.attempt)
        self.put(storage, last)
        storage.sync_dir(self.tag)
        session.require()
        try:
            content = mark if storage.link_new(done, mark) else storage.read(done)
        except OSError as error:
            content = self._content_after(storage, mark, error)  # the reply was lost, or somebody else's is there
        if content != mark:
            raise self._another_job(session)
        try:
            storage.sync_dir(self.tag)
        except OSError as error:
            if not self.attempt or journal.may_undo(storage, self.attempt):
                try:
                    self._withdraw(storage, mark)
                except OSError:
                    raise not_undone(error, self.tag) from error
                raise
        self._withdraw_if_swept(session, mark)

    def must_hold(self, storage: Storage, files: Collection[str]) -> None:
        """Do nothing: a job that takes over takes the lease, which publish() checks before and after ``done``."""

    def retire(
        self, session: Session, tag: str, is_kept: Callable[[str], bool] = lambda key: False, order_time: float = 0.0
    ) -> bool:
        storage = session.storage
        intent = trash_file(self.attempt, tag)
        journal.declare(storage, intent, tag)
        goes = storage.remove_if(f"{tag}/{DONE}", lambda: not is_kept(tag))
        if not goes:
            storage.remove(intent)
        return goes

    def _empty(self, session: Session) -> None:
        """Remove the tag, its ``done`` first: from then on nobody takes it for a checkpoint. Files of others stay."""
        storage = session.storage
        storage.remove_if(f"{self.tag}/{DONE}", session.confirm)
        remove_all_but_guests(storage, self.tag, session.confirm)
        session.require()  # again: listing may have taken long
        storage.discard_unfinished(self.tag)
        storage.make_dir(self.tag)

    def _await_writers(self, session: Session, attempts: list[str]) -> None:
        """Wait until no rank of this run writes to the tag for an earlier attempt, which failed elsewhere."""
        storage = session.storage
        ranks = session.topology.world_size
        if session.is_alone:
            return
        own_votes = AttemptVotes(storage, self.attempt)
        own_votes.report_progress(0, effects.monotonic_ns())
        for attempt in (attempt for attempt in attempts if session.counter_of(attempt) is not None):
            votes = AttemptVotes(storage, attempt)
            if not votes.await_votes(ranks, session.timeout, own_votes, session.is_leaving):
                raise SaveFailed(
                    f"{storage.url}/{self.tag}: an earlier save of this tag failed, and not all ranks have left it "
                    f"after {session.timeout:.0f} s without progress; save under another tag"
                )

    def _content_after(self, storage: Storage, mark: bytes, error: OSError) -> bytes:
        """Return ``done``, after an ``error`` that may mean that only the reply was lost. Raise it if there is none."""
        done = f"{self.tag}/{DONE}"
        try:
            content = storage.read(done)
            # On the disks of hosts it could be on one alone, and be lost with that: it is written to all again.
            if content != mark or not storage.may_lack_files or storage.exchange(done, mark, mark):
                return content
        except FileNotFoundError:
            if self._is_undone(storage, error):
                raise error from None
        except OSError:
            pass
        raise OutcomeUnknown(
            f"{storage.url}/{done} may or may not have been written ({type(error).__name__}: {error}): look for it"
        ) from error

    def _is_undone(self, storage: Storage, error: OSError) -> bool:
        """Return whether no rank will count the tag as saved, although its ``done`` may still come.

        A host that stands still carries out later what it has not answered, and a rank there finds the tag.
        """
        if not (self.attempt and isinstance(error, (TimeoutError, ConnectionError))):
            return True
        try:
            return journal.decides(storage, self.attempt, b"undone")
        except (OSError, MalformedFile):
            return False

    def _withdraw(self, storage: Storage, mark: bytes) -> None:
        """Remove ``done``, unless it is another job's by now."""
        done = f"{self.tag}/{DONE}"
        with suppress(FileNotFoundError):
            storage.remove_if(done, lambda: storage.read(done) == mark)

    def _withdraw_if_swept(self, session: Session, mark: bytes) -> None:
        """Remove ``done`` if another job took the directory over before ``done`` was there.

        Such a job removed the files that ``done`` would have completed.
        """
        try:
            session.require()
        except OSError:
            return  # a lease that cannot be read says nothing against a tag that is complete
        except DirectoryInUse:
            if not _is_of(session.storage, self.tag, self.attempt):
                self._withdraw(session.storage, mark)
                raise

    def _another_job(self, session: Session) -> SaveFailed:
        return SaveFailed(
            f"{session.storage.url}/{self.tag} is being written by another job at the same time; its files are left "
            "alone. Stop one of the two jobs"
        )


def _create(storage: Storage, key: str, nbytes: int) -> Writer:
    """Create a file in place of what an interrupted publication left there."""
    try:
        return storage.create(key, nbytes)
    except FileExistsError:
        storage.remove(key)
    return storage.create(key, nbytes)


def publication_of(session: Session, counter: int, tag: str, overwrite: bool | None) -> Publication:
    """Return the publication of this run's attempt ``counter``, as the session's storage allows it."""
    kind = Staged if session.storage.renames else InPlace
    return kind(session.attempt(counter), tag, overwrite)


def copy_publication(
    session: Session, tag: str, overwrite: bool | None, saved: str | None, counter: int = 1
) -> Publication:
    """Return the publication of this session's copy ``counter``, of the attempt ``saved``.

    ``overwrite`` was checked before.
    """
    if session.storage.renames:
        return Staged(session.attempt(counter), tag, overwrite, resumes=True, saved=saved or "")
    return InPlace(saved or "", tag, overwrite, resumes=True)


def _mark(order_time: float, attempt: str) -> bytes:
    """Return the content of ``done``: with an ``attempt`` that of ours, else NxD's."""
    return mark_of(order_time, attempt) if attempt else FOREIGN_MARK


def is_visible(storage: Storage, tag: str, attempt: str) -> bool:
    """Return whether the tag is complete and from that attempt. False also if the storage does not say."""
    return bool(visibility(storage, tag, attempt))


def visibility(storage: Storage, tag: str, attempt: str) -> bool | None:
    """Return whether the tag is complete and from that attempt; None if the storage does not say."""
    try:
        return storage.is_file(f"{tag}/{DONE}") and _is_of(storage, tag, attempt)
    except (OSError, CheckpointError):
        return None


def _is_of(storage: Storage, tag: str, attempt: str) -> bool:
    try:
        return manifest_of(storage, tag).attempt == attempt
    except (FileNotFoundError, MalformedFile):
        return False


def _refuse_existing(storage: Storage, tag: str) -> None:
    if storage.is_file(f"{tag}/{DONE}"):
        raise _exists(storage, tag)


def _exists(storage: Storage, tag: str) -> SaveFailed:
    return SaveFailed(
        f"{storage.url}/{tag} exists: it is left as it is. Save under another tag, or pass overwrite=True"
        + ("" if storage.renames else ", which removes it before the new one is complete")
    )


def _refuse_clash(storage: Storage, tag: str) -> None:
    key = clash(storage, tag)
    if key is not None:
        raise SaveFailed(
            f"{storage.url}/{key} exists and is not a checkpoint's; it is left alone, though a save would write that "
            "name. Save under another tag, or move it away"
        )
