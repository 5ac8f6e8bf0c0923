"""A directory of another library's files that appears as a whole: with tags in it, and digests of all other files.

The order is derived from *visible means complete*: the library's files are written out of sight, to a directory of this
attempt alone. While tags are saved, they are sealed: synced, and their digests taken. Then the tags join them, the
digests are written, with those of the tags' manifests, which identify each tag's save, and one rename makes the
directory visible. The directory that it replaces stays until then. The training thread neither reads nor syncs the
files.

Everything is made, moved or removed under a lease, which rank 0 has from the beginning to the end. Only the library's
files are sealed: a file that vanished, appeared or changed meanwhile is refused.
"""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.coordination.at_exit import close_at_exit, forget
from nxd_ckpt.coordination.output_lease import HeldLeases, OutputLease
from nxd_ckpt.coordination.replacement import Replacement, not_undone
from nxd_ckpt.core.manifest import CRC_BLOCK, dump_manifest
from nxd_ckpt.core.names import DONE, HIDDEN, MANIFEST
from nxd_ckpt.core.tags import next_order_time
from nxd_ckpt.errors import (
    CheckpointError,
    InvalidArgument,
    OutcomeUnknown,
    PartNotFound,
    SaveFailed,
    UnsupportedState,
    as_checkpoint_errors,
)
from nxd_ckpt.integrations.written_files import WrittenFiles, raise_unless_absent
from nxd_ckpt.save.background import Helpers
from nxd_ckpt.save.pending import PendingSave
from nxd_ckpt.storage.base import DirEntry
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import is_mount_point
from nxd_ckpt.storage.transfer import StoredFile, link_or_copy, sync
from nxd_ckpt.storage.urls import StrPath, is_url, local_path
from nxd_ckpt.tag.directory import find_tag
from nxd_ckpt.tag.identity import Identity
from nxd_ckpt.tag.known_damage import note_damage
from nxd_ckpt.tag.order import manifest_of, mark_of
from nxd_ckpt.tag.seal import DIGESTS, file_digest, read_seal, seal_problems
from nxd_ckpt.tag.verify import require_all_files, sealed_loss

logger = logging.getLogger("nxd_ckpt")

_INCOMPLETE = ".incomplete"
"""Folder in the root of the published directories in which they are written."""
_ASIDE = ".replaced"
"""End of the name, there, of a replaced directory."""
_ATTEMPT = "attempt-"
"""Beginning of the name, there, of one attempt's folder."""
_NEWS = 5.0
"""Seconds after which rank 0 gives another sign that it is at work."""

_leases = HeldLeases()
"""Leases of the directories that this process writes to; their users are the attempts that are being sealed."""


class SealedDirectory:
    """One directory, ``name`` in ``root``, from its writing to its publication.

    Rank 0 calls `begin` and `retire`. ``durable=False`` syncs nothing. ``incomplete`` is the name of the folder in
    ``root`` in which directories are written.
    """

    def __init__(self, root: str, name: str, durable: bool = True, incomplete: str = _INCOMPLETE) -> None:
        self._storage = LocalStorage(os.path.abspath(root), durable)
        self._name, self._folder, self._incomplete = name, os.path.dirname(name), incomplete
        self._attempt = ""
        self._saves: list[PendingSave] = []
        self._lease: OutputLease | None = None
        self._written = WrittenFiles("")
        self._replaced = WrittenFiles("")
        """The files under its name when the attempt begins."""
        self._published: Future[None] | None = None
        """On rank 0, the publication: done once the directory is visible, or failed."""
        self.path = os.path.join(self._storage.url, name)
        self.staged = ""
        """The directory to which the library writes its files, once it has begun."""
        self.tags = os.path.join(self._storage.url, incomplete, "tags")
        """The directory that tags are saved to, before they become part of this one."""
        self._output = LocalStorage(os.path.join(self._storage.url, incomplete), durable=False)
        # A lease belongs to living processes: it need not survive a power cut.
        self._claimed = LocalStorage(os.path.join(self.tags, HIDDEN, "output"), durable=False)

    def refuse_a_file(self) -> None:
        """Raise InvalidArgument if a file has its name. Any rank may call this."""
        if os.path.isfile(self.path):
            raise InvalidArgument(f"{self.path} is a file, expected a checkpoint or nothing; choose another name")

    def refuse_to_replace(self, patterns: Sequence[str]) -> None:
        """Raise InvalidArgument if a file has its name, or a directory that is no checkpoint.

        Such a directory has files that are neither sealed nor named like ``patterns``. Any rank may call this; nothing
        is changed.
        """
        self.refuse_a_file()
        # Its statistics may be in a hidden directory.
        names, sealed = [entry.name for entry in self._storage.list(self._name)], {DIGESTS, HIDDEN}
        with suppress(CheckpointError):  # another program's, or damaged: then the patterns decide
            sealed |= {name.partition("/")[0] for name in read_seal(LocalStorage(self.path))}
        others = [name for name in names if name not in sealed and not is_sealed(self.path, name)]
        foreign = [name for name in others if not any(fnmatchcase(name, pattern) for pattern in patterns)]
        if foreign:
            raise InvalidArgument(
                f"{self.path} has {', '.join(foreign[:5])}, which no checkpoint has; the save would replace all of it: "
                "save to a directory of its own"
            )

    def begin_together(self, agreement: Agreement) -> None:
        """Call `begin` on rank 0; then each rank may write to `staged`."""
        self._enter(decided_by_rank0(agreement, self.begin))

    def begin(self) -> str:
        """Finish a killed run's replacement, remove its other files, make room, and return the attempt's name.

        Raises DirectoryInUse, before anything is touched, if another live job saves there.
        """
        self._lease = _leases.take(self._claimed, LocalStorage(self.tags), shown=os.path.dirname(self.path))
        for folder in dict.fromkeys(("", self._folder)):  # often one: what leads to it is synced once
            self._storage.make_dir(folder)
        self._storage.sync_dir("")  # the library may have made the folder
        self._clear()
        self._replaced = WrittenFiles(self.path)
        self._replaced.record()
        self._enter(f"{_ATTEMPT}{uuid.uuid4().hex[:12]}")
        # Its name here need not be durable: it is not visible yet. Before it is, it will have been synced, and its new
        # name after the rename.
        for folder in ("tags", f"{self._attempt}/{os.path.basename(self._name)}"):
            self._output.make_dir(folder)
        return self._attempt

    def _enter(self, attempt: str) -> None:
        if attempt != self._attempt:
            self._attempt = attempt
            self.staged = os.path.join(self._output.url, attempt, os.path.basename(self._name))
            self._written = WrittenFiles(self.staged)

    def _clear(self) -> None:
        """Remove, under the lease, the files of dead jobs, and of this job's failed attempts."""
        used = {"tags", *_leases.users(self._claimed)}
        leftover = [entry.name for entry in self._output.list() if entry.name not in used]
        for name in leftover:
            # Names may be free: not all file systems exchange two at once. Older versions had no attempts.
            inside = self._output.list(name) if name.startswith(_ATTEMPT) else ()
            for staged in (name, *(f"{name}/{entry.name}" for entry in inside)):
                if staged.endswith(_ASIDE):
                    self._require_lease()
                    self._replacement(staged.removesuffix(_ASIDE)).settle()
        if leftover:
            # What was settled must last. And one may have been visible for a moment: its name must be gone for good
            # before its files are.
            self._storage.sync_dir(self._folder)
        for name in leftover:
            self._require_lease()
            self._output.remove(name)

    def _require_lease(self) -> None:
        if self._lease is not None:
            self._lease.require()

    def record(self, other_ranks: str = "", required: Iterable[str] = ()) -> None:
        """Record, on rank 0, that its files are complete.

        Args:
            other_ranks: glob pattern of other ranks' files, which may be incomplete.
            required: names of files that the library has written; the others are those that exist.
        """
        self._written.record(other_ranks, required)

    def complete(self, agreement: Agreement, own: str = "", *, shared: bool = False) -> None:
        """Agree, on all ranks, that the files of every rank are complete.

        Args:
            own: the name of the file that this rank writes alone.
            shared: several ranks also write the same files.
        """
        words = agreement.gather({own: self._written.digest_of(own)} if own and agreement.rank else {})
        if agreement.rank == 0 and agreement.world_size > 1:
            for word in (words or [])[1:]:
                self._written.require(word)
            if shared:
                self._written.forget_content()
            self._written.record()  # a trainer that extends another may write more on other ranks
        agreement.broadcast(None)

    @contextmanager
    def publishing(self, is_rank_0: bool) -> Iterator[list[PendingSave]]:
        """Publish the directory after the block, in which tags are saved and added to the yielded list.

        All other files are complete before it.
        """
        if not is_rank_0:
            with suppress(OutcomeUnknown):  # rank 0 knows the outcome, and raises it in `wait`
                yield self._saves
            return
        if self._written.is_empty:
            self._written.record()
        _leases.users(self._claimed).add(self._attempt)
        threads = Helpers(1, "nxd_ckpt-seal")
        try:
            sealed = threads.submit(self._seal)
            yield self._saves
            self._published = threads.submit(self._publish, sealed)
            close_at_exit(self)
        except BaseException:
            self._give_back()
            raise
        finally:
            threads.shutdown(wait=False)

    @as_checkpoint_errors()
    def wait(self, agreement: Agreement, retire: Callable[[], None] = lambda: None) -> None:
        """Wait until it is visible; all ranks call this, and rank 0 tells the others.

        Rank 0 then calls ``retire``, still under the lease. Raises the failure on all ranks; then only earlier files
        are visible.
        """
        for save in self._saves:
            save.wait_decided(0)  # hurries it, on this rank too
        try:
            while not decided_by_rank0(agreement, partial(self._is_visible, retire)):
                pass
        finally:
            for save in self._saves:
                # Not raised: a rank that cannot read the verdict looks for the tag, which rank 0 may have moved since.
                save.exception()

    def close(self, retire: Callable[[], None] = lambda: None) -> None:
        """Wait until it is visible, after its tags are decided. Raises OSError, SaveFailed, DirectoryInUse."""
        forget(self)
        try:
            if self._published is not None:
                self._published.result()
                self._tidy(retire)
        finally:
            self._give_back()

    release = close

    def _tidy(self, retire: Callable[[], None]) -> None:
        """Remove older files. The directory is visible, so a failure does not fail the save."""
        try:
            retire()
            self._output.remove(self._attempt)
        except OSError as error:
            logger.warning(
                "%s was saved, but not everything older could be removed; the next save there tries again: %s",
                self.path,
                error,
            )

    def _give_back(self) -> None:
        _leases.users(self._claimed).discard(self._attempt)
        if self._lease is not None:
            _leases.release_unused(self._claimed)

    def _is_visible(self, retire: Callable[[], None]) -> bool:
        """Wait up to `_NEWS` seconds for each save; True if all became visible. Raises the first failure."""
        for save in self._saves:
            if not save.wait_decided(_NEWS):
                return False
            save.wait()
        if self._published is not None and not wait([self._published], _NEWS).done:
            return False
        self.close(retire)
        return True

    def end_run(self) -> None:
        """Remove, on rank 0, the folder of incomplete directories, if it lies beside the run's and is not needed."""
        if self._incomplete == _INCOMPLETE:
            return
        _leases.take(self._claimed, LocalStorage(self.tags), shown=os.path.dirname(self.path))
        if {entry.name for folder in ("", "tags") for entry in self._output.list(folder)} <= {"tags", HIDDEN}:
            self._storage.remove(self._incomplete)
        _leases.release_unused(self._claimed)

    def abandon(self) -> None:
        """Close when the process ends by an exception, if the tags are saved. Never raises."""
        if all(save.done() for save in self._saves):
            with suppress(Exception):  # it was logged
                self.close()

    def retire(self, pattern: str, tag: str, limit: int | None, stay: Sequence[str] = ()) -> None:
        """Remove the oldest directories beside it, down to ``limit`` (None or 0: remove none).

        They are those that `oldest_first` returns. This directory and those named in ``stay`` are kept. One that has
        lost files does not count: it stays, and so does an older one in its place. Each disappears at once. Raises
        DirectoryInUse if another job took over.
        """
        folder, own = self._folder, os.path.basename(self._name)
        names = oldest_first(os.path.join(self._storage.url, folder), pattern, tag)
        kept = {own, *stay} & {*names}
        surplus = [name for name in names if name not in kept] if limit else []
        room = max((limit or 0) - len(kept), 0)
        while surplus and room > 0:
            why = sealed_loss(LocalStorage(os.path.join(self._storage.url, folder, surplus.pop())))
            room -= why is None
            if why is not None:
                logger.warning("%s. It does not count, and an older checkpoint is kept in its place", why)
        for name in surplus:
            self._require_lease()
            self._storage.rename(os.path.join(folder, name), f"{self._incomplete}/{self._attempt}/{name}")
        if surplus:
            self._storage.sync_dir(folder)  # else a power cut could bring a name back without its files
        for name in surplus:
            self._output.remove(f"{self._attempt}/{name}")

    def _seal(self) -> dict[str, list[int]]:
        """Sync the library's files; return their digests. Raises SaveFailed if the files have changed."""
        digests = self._written.seal()
        for folder, _, names in os.walk(self.staged, onerror=raise_unless_absent):
            for name in sorted(names):
                sync(self._storage, os.path.relpath(os.path.join(folder, name), self._storage.url))
            self._storage.sync_dir(os.path.relpath(folder, self._storage.url))
        return digests

    def _publish(self, sealed: Future[dict[str, list[int]]]) -> None:
        """Make the directory visible, if all tags are complete."""
        wait(self._saves)  # does not hurry them: nobody waits for this thread
        if any(save.error is not None for save in self._saves):
            return
        try:
            self._make_visible(sealed.result())
        except BaseException as error:
            logger.error("%s was not saved: %s: %s", self.path, type(error).__name__, error)
            raise

    def _make_visible(self, digests: dict[str, list[int]]) -> None:
        storage, output = self._storage, LocalStorage(self._output.url, self._storage.durable)
        staged, memory = f"{self._attempt}/{os.path.basename(self._name)}", memoryview(bytearray(CRC_BLOCK))
        replacement = self._replacement(staged)
        self._require_lease()
        self._written.require_unchanged()
        for save in self._saves:
            output.rename(f"tags/{save.tag}", f"{staged}/{save.tag}")
            require_all_files(LocalStorage(self.staged), save.tag)
            self._date_last(output, f"{staged}/{save.tag}")
            manifest = f"{save.tag}/{MANIFEST}"
            digests[manifest] = file_digest(output, f"{staged}/{manifest}", memory)
        output.write(f"{staged}/{DIGESTS}", json.dumps(digests, indent=1).encode())
        output.sync_dir(staged)
        storage.make_dir(self._folder)
        linked = self._link_added()
        self._require_lease()
        try:
            replacement.make()
            storage.sync_dir(self._folder)
        except OSError as error:
            try:
                replacement.restore(replacement.happened(error))
                storage.sync_dir(self._folder)
            except OSError:
                raise not_undone(error, self.path) from error
            raise
        try:
            linked += self._keep_late(replacement.aside, linked)
        except OSError as error:  # the save has succeeded
            logger.warning("%s: a file that was written there as it was replaced is lost: %s", self.path, error)
        if linked:
            logger.warning(
                "%s: %s was written there before the checkpoint was visible. It is kept beside the checkpoint's files, "
                "but is not one of them: a resume refuses it, unless files_added_later names it",
                self.path,
                ", ".join(linked[:5]) + (f" and {len(linked) - 5} more files" if len(linked) > 5 else ""),
            )
        with suppress(OSError):  # it goes with all that is left of this attempt
            storage.remove(replacement.aside)

    def _date_last(self, output: LocalStorage, key: str) -> None:
        """Date the tag ``key`` after those in the directories beside it: the clock may have been put back."""
        beside = [entry.name for entry in self._storage.list(self._folder) if entry.is_dir]
        times = _times(os.path.join(self._storage.url, self._folder), beside, os.path.basename(key))
        manifest, newest = manifest_of(output, key), max(times.values(), default=0.0)
        if manifest.order_time <= newest:
            order_time = next_order_time(newest, newest)
            output.write(f"{key}/{MANIFEST}", dump_manifest(replace(manifest, order_time=order_time)))
            output.write(f"{key}/{DONE}", mark_of(order_time, manifest.attempt))
            output.set_time(f"{key}/{DONE}", order_time)

    def _link_added(self) -> list[str]:
        """Link files that callbacks wrote to the visible place into the directory that will replace it; return them.

        So they are in the visible directory at every instant, whenever the process is killed. Raises SaveFailed if the
        checkpoint has a file of that name as well.
        """
        added = self._replaced.added(self.path)
        for name in added:
            source, target = os.path.join(self.path, name), os.path.join(self.staged, name)
            if os.path.lexists(target):
                raise SaveFailed(
                    f"{source} was written there while the checkpoint was being saved, which "
                    "has a file of that name. It was left alone, and the checkpoint was not made visible. A callback "
                    "must use other names for its files"
                )
            self._link(os.path.join(self._name, name), os.path.relpath(target, self._storage.url))
        return added

    def _link(self, source: str, target: str) -> None:
        storage = self._storage
        storage.make_dir(os.path.dirname(target))
        with suppress(FileNotFoundError, PartNotFound):  # the callback has removed it
            try:
                os.link(storage.path(source), storage.path(target))
            except OSError:  # a file system without hard links
                link_or_copy(StoredFile(storage, source), StoredFile(storage, target), None, lambda nbytes: None)
            sync(storage, target)
        storage.sync_dir(os.path.dirname(target))

    def _keep_late(self, aside: str, linked: Sequence[str]) -> list[str]:
        """Move files that callbacks wrote after the others were ``linked`` into the directory; return their names."""
        added = self._replaced.added(os.path.join(self._storage.url, aside))
        late = [name for name in added if name not in linked]
        for name in late:
            kept = os.path.join(self._name, name)
            if os.path.lexists(os.path.join(self._storage.url, kept)):
                kept = f"{kept}.{self._attempt}"
            self._storage.make_dir(os.path.dirname(kept))
            self._storage.rename(os.path.join(aside, name), kept)
            self._storage.sync_dir(os.path.dirname(kept))
        return late

    def _replacement(self, staged: str) -> Replacement:
        """Return the replacement by ``staged``, a key below the folder of incomplete directories, under its name."""
        finished, target = f"{self._incomplete}/{staged}", os.path.join(self._folder, os.path.basename(staged))
        return Replacement(self._storage, finished, target, f"{finished}{_ASIDE}")


def place_in(run: str, name: str) -> list[str]:
    """Return root, name and folder of incomplete ones of the `SealedDirectory` that is ``run``/``name``.

    While ``run`` is empty it is written beside it, in ``.RUN.incomplete``, and so it is as long as that is there: a
    kill in the first save leaves ``run`` empty. Many scripts refuse one that has other entries than checkpoints.
    """
    parent, base = os.path.split(os.path.abspath(run))
    beside = f".{base}.incomplete"
    if os.path.isdir(os.path.join(parent, beside)) or _may_be_written_beside(run, parent):
        return [parent, f"{base}/{name}", beside]
    return [run, name, _INCOMPLETE]


def _may_be_written_beside(run: str, parent: str) -> bool:
    if os.path.islink(run) or is_mount_point(run) or LocalStorage(run).list():
        return False
    return os.access(parent, os.W_OK | os.X_OK)


def oldest_first(folder: str, pattern: str, tag: str) -> list[str]:
    """Return the names of directories in ``folder`` that match ``pattern`` as a whole, oldest save first.

    The first group of the pattern is their number. Directories without the complete ``tag``, which another program
    wrote, keep the place that it gives them. The others are in the order of their saves: a run that went on from an
    earlier one has newer ones of lower numbers.
    """
    names = [entry.name for _, entry in sorted(_numbers(folder, pattern)) if entry.is_dir]
    times = _times(folder, names, tag)
    by_time = iter(sorted(times, key=times.__getitem__))
    return [next(by_time) if name in times else name for name in names]


def next_number(folder: str, pattern: str) -> int:
    """Return the number after those of all names in ``folder`` that match ``pattern``."""
    return 1 + max((number for number, _ in _numbers(folder, pattern)), default=-1)


def _numbers(folder: str, pattern: str) -> Iterator[tuple[int, DirEntry]]:
    for entry in LocalStorage(folder).list():
        if match := re.fullmatch(pattern, entry.name):
            yield int(match[1]), entry


def _times(folder: str, names: Iterable[str], tag: str) -> dict[str, float]:
    """Return the order times of the complete tags called ``tag`` in these directories, by the directory's name."""
    found = {name: find_tag(LocalStorage(os.path.join(folder, name)), tag) for name in names}
    return {name: info.order_time for name, info in found.items() if info and info.ours and info.complete}


def directory_of(path: StrPath) -> str:
    """Return the directory that a trainer's checkpoints are written to or read from; ``~`` is expanded.

    Raises InvalidArgument for a URL of a store, for which the trainer would make a directory of that name.
    """
    with suppress(InvalidArgument):  # a URL that lost a slash
        if not is_url(path):
            return local_path(path)
    raise InvalidArgument(
        f"{os.fspath(path)!r} is a URL: this trainer's checkpoints are written to directories and read from them. Pass "
        "a directory that all ranks share, and copy complete checkpoints to the store; copy one back to resume from it"
    )


def require_one_writer(agreement: Agreement, writes: bool) -> None:
    """Raise UnsupportedState on all ranks if one that is not rank 0 ``writes`` the files of the whole job."""

    def require() -> None:
        if writes and agreement.rank:
            raise UnsupportedState(
                "save_on_each_node=True writes a checkpoint on the disk of each node: nxd_ckpt saves one for all "
                "ranks, in a directory that all nodes share. Pass False"
            )

    on_all(agreement, require)


def is_sealed(directory: str, tag: str) -> bool:
    """Return whether the directory is one of ours, and complete."""
    return os.path.isfile(os.path.join(directory, tag, DONE))


def is_ours(directory: str, tag: str) -> bool:
    """Return whether it has that tag, even if the tag has lost files since, so that opening it raises."""
    return os.path.isdir(os.path.join(directory, tag))


@as_checkpoint_errors()
def verify_files(directory: str, tag: str, ignored: Sequence[str] = ()) -> None:
    """Compare the files beside the tag with their digests at the save.

    Args:
        ignored: glob patterns of files that may have been added since.

    Raises:
        PartLost, DigestMismatch, CorruptCheckpoint: a file is gone, has other bytes or was added, or a tag is of
            another save; the message names each.
    """
    storage = LocalStorage(directory)
    problems = list(seal_problems(storage, tag, ignored))
    note_damage(storage, Identity(storage, tag), str(problems[0]) if problems else None)
    if problems:
        raise type(problems[0])("; ".join(map(str, problems)))
