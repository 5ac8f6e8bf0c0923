"""A directory of another library's files that appears as a whole: with tags in it, and digests of all other files.

The order is derived from *visible means complete*: the library's files are written out of sight. While tags are saved,
they are sealed: synced, and their digests taken. When all of that is done, the tags join them, the digests are written
with those of the tags' manifests, which say which save each is of, and one rename makes the directory visible. What it
replaces stays until then. The training thread reads and syncs none of the files.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any

from nxd_ckpt.convert.transfer import sync
from nxd_ckpt.core import document
from nxd_ckpt.core.keys import checked_key
from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import (
    CheckpointError,
    DigestMismatch,
    DirectoryInUse,
    InvalidArgument,
    MalformedFile,
    OutcomeUnknown,
    PartLost,
    as_checkpoint_errors,
)
from nxd_ckpt.layout.names import DONE, HIDDEN, MANIFEST
from nxd_ckpt.runtime.at_exit import close_at_exit, forget
from nxd_ckpt.runtime.coordination import lease
from nxd_ckpt.runtime.coordination.agreement import Agreement, Alone, decided_by_rank0
from nxd_ckpt.runtime.coordination.replacement import Replacement
from nxd_ckpt.runtime.progress import Counter
from nxd_ckpt.runtime.save.background import Helpers
from nxd_ckpt.runtime.save.pending import PendingSave
from nxd_ckpt.runtime.tag.verification import crc32_of
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import locked

logger = logging.getLogger("nxd_ckpt")

DIGESTS = "digests.json"
"""Size in bytes and CRC-32 of every other file, by its path; of those of tags, their manifests know, which are here."""

_INCOMPLETE = ".incomplete"
"""Where directories are written, in the root of those that they are published to."""
_ASIDE = ".replaced"
"""Ends the name, there, of what a directory takes the place of."""

_NEWS = 5.0
"""Seconds after which rank 0 says again that it is at work."""


_LOCK = ".lock"
"""In the directory of the tags: held by who writes files beside it."""
_PATIENCE = 30.0
"""Seconds for which a job of another host is watched, to see whether it lives."""
_ELSE = "stop one of two jobs, or give each an output directory of its own"

_claims: dict[str, ExitStack] = {}
"""The locks of this process, by the directory of the tags, each held from the beginning of a save to its end."""


class SealedDirectory:
    """One directory, ``name`` in ``root``, on its way from where it is written to where it is seen.

    Rank 0 calls :meth:`begin` and :meth:`retire`. ``durable=False`` syncs nothing.
    """

    def __init__(self, root: str, name: str, durable: bool = True) -> None:
        self._storage = LocalStorage(os.path.abspath(root), durable)
        self._name, self._folder = name, os.path.dirname(name)
        self._staged = f"{_INCOMPLETE}/{os.path.basename(name)}"
        self._saves: list[PendingSave] = []
        self._published: Future[None] | None = None
        """On rank 0: when it is visible, or cannot become so."""
        self.path = os.path.join(self._storage.url, name)
        self.staged = os.path.join(self._storage.url, self._staged)
        """Where the library writes its files."""
        self.tags = os.path.join(self._storage.url, _INCOMPLETE, "tags")
        """The directory that tags are saved to, before they become part of this one."""

    def refuse_a_file(self) -> None:
        """Raise InvalidArgument where a file has its name. Any rank may call this."""
        if os.path.isfile(self.path):
            raise InvalidArgument(f"{self.path} is a file, expected a checkpoint or nothing; choose another name")

    def refuse_to_replace(self, patterns: Sequence[str]) -> None:
        """Raise InvalidArgument where a file has its name, or a directory that is no checkpoint: what it holds was
        neither sealed nor is it called as in ``patterns``. Any rank may call this; nothing is changed."""
        self.refuse_a_file()
        # Whoever looked at its statistics left them in a hidden directory.
        names, sealed = [entry.name for entry in self._storage.list(self._name)], {DIGESTS, HIDDEN}
        with suppress(CheckpointError):  # of another's, or damaged: then the patterns tell
            sealed |= {name.partition("/")[0] for name in _digests(LocalStorage(self.path))}
        others = [name for name in names if name not in sealed and not is_sealed(self.path, name)]
        foreign = [name for name in others if not any(fnmatchcase(name, pattern) for pattern in patterns)]
        if foreign:
            raise InvalidArgument(
                f"{self.path} holds {', '.join(foreign[:5])}, which no checkpoint has, and would replace all of it: "
                "save to a directory of its own"
            )

    def begin(self) -> None:
        """Finish what a killed run was about to replace, remove what else it left, and make room.

        Raises DirectoryInUse, before anything is touched, where another live job saves there.
        """
        self._claim()
        for folder in dict.fromkeys(("", self._folder)):  # often one: what leads to it is synced once
            self._storage.make_dir(folder)
        self._storage.sync_dir("")  # the library may have made the folder
        for entry in self._storage.list(_INCOMPLETE):
            if entry.name.endswith(_ASIDE):  # its name may be free: not all file systems exchange two names at once
                self._replacement(entry.name.removesuffix(_ASIDE)).settle()
                self._storage.sync_dir(self._folder)
        for entry in self._storage.list(_INCOMPLETE):
            if entry.name != "tags":
                self._storage.remove(f"{_INCOMPLETE}/{entry.name}")
        # Its name here need not be durable. What a power cut loses is not visible yet; by the time it is, it has been
        # synced itself, and its new name after the rename.
        LocalStorage(self._storage.root, durable=False).make_dir(self._staged)

    def _claim(self) -> None:
        """Exclude other jobs: by the lease of the tags, and until this job's first save has taken that, and while files
        are written, by a lock of the system's."""
        tags = LocalStorage(self.tags)
        holder = lease.read(tags)
        own = holder is not None and holder.is_of_process_of(lease.Lease.of_this_process(""))
        if holder is not None and not own and lease.job_lives(tags, _PATIENCE):
            raise DirectoryInUse(f"{self._storage.url}: {holder.describe()} saves here; {_ELSE}")
        LocalStorage(self._storage.root, durable=False).make_dir(f"{_INCOMPLETE}/tags")
        if self.tags not in _claims:
            claim = ExitStack()
            try:
                claim.enter_context(locked(tags.root / _LOCK, wait=False))
            except BlockingIOError:
                raise DirectoryInUse(f"{self._storage.url}: another job is saving here; {_ELSE}") from None
            _claims[self.tags] = claim

    @contextmanager
    def publishing(self, is_rank_0: bool) -> Iterator[list[PendingSave]]:
        """All files are there. Within, tags are saved and added to what is given; with them it becomes visible."""
        if not is_rank_0:
            with suppress(OutcomeUnknown):  # rank 0 knows it, and says so in :meth:`wait`
                yield self._saves
            return
        threads = Helpers(1, "nxd_ckpt-seal")
        try:
            sealed = threads.submit(self._seal)
            yield self._saves
            self._published = threads.submit(self._publish, sealed)
            close_at_exit(self)
        finally:
            threads.shutdown(wait=False)

    @as_checkpoint_errors()
    def wait(self, agreement: Agreement | None) -> None:
        """Until it is visible: all ranks call this, and rank 0 tells the others. None: this rank learns it alone.

        Raises, on all ranks, what failed; nothing is visible then but what was before.
        """
        agreement = agreement or Alone()
        try:
            while not decided_by_rank0(agreement, self._is_visible):
                pass
        finally:
            for save in self._saves:
                # Not raised: a rank that cannot read the verdict looks for the tag, which rank 0 may have moved since.
                save.exception()

    def close(self) -> None:
        """The tags are saved, or failed: wait until it is visible, too. Raises OSError."""
        forget(self)
        try:
            if self._published is not None:
                self._published.result()
        finally:
            _claims.pop(self.tags, ExitStack()).close()

    def _is_visible(self) -> bool:
        """Whether it is by now, or soon. Raises what failed."""
        for save in self._saves:
            if not save.wait_decided(_NEWS):
                return False
            save.wait()
        if self._published is not None and not wait([self._published], _NEWS).done:
            return False
        self.close()
        return True

    def abandon(self) -> None:
        """The process ends by an exception: as :meth:`close`, if the tags are saved. Never raises."""
        if all(save.done() for save in self._saves):
            with suppress(Exception):  # it was logged
                self.close()

    def retire(self, pattern: str, limit: int | None, stay: Sequence[str] = ()) -> None:
        """Remove the oldest of the directories beside it whose whole name ``pattern`` matches, down to ``limit`` (None
        or 0: none), but this one and those called as in ``stay``: each is out of sight at once.

        The first group of ``pattern`` is the number that tells the order.
        """
        folder, own = self._folder, os.path.basename(self._name)
        found = (re.fullmatch(pattern, entry.name) for entry in self._storage.list(folder) if entry.is_dir)
        names = [match[0] for match in sorted(filter(None, found), key=lambda match: int(match[1]))]
        kept = {own, *stay} & {*names}
        surplus = [name for name in names if name not in kept] if limit else []
        for name in surplus[: max(len(names) - max(limit or 0, len(kept)), 0)]:
            self._storage.rename(os.path.join(folder, name), f"{_INCOMPLETE}/{name}")
            self._storage.remove(f"{_INCOMPLETE}/{name}")

    def _seal(self) -> dict[str, list[int]]:
        """Sync what is there; its digests."""
        found, memory = dict[str, list[int]](), memoryview(bytearray(CRC_BLOCK))
        for folder, _, names in os.walk(self.staged):
            for path in (os.path.join(folder, name) for name in sorted(names)):
                key = os.path.relpath(path, self._storage.url)
                found[os.path.relpath(path, self.staged)] = _digest(self._storage, key, memory)
                sync(self._storage, key)
            self._storage.sync_dir(os.path.relpath(folder, self._storage.url))
        return found

    def _publish(self, sealed: Future[dict[str, list[int]]]) -> None:
        """Make it visible, if all tags are complete."""
        for save in self._saves:
            save.wait_decided()
        if any(save.error is not None for save in self._saves):
            return
        try:
            self._make_visible(sealed.result())
        except BaseException as error:
            logger.error("%s was not saved: %s: %s", self.path, type(error).__name__, error)
            raise

    def _make_visible(self, digests: dict[str, list[int]]) -> None:
        storage, replacement = self._storage, self._replacement(os.path.basename(self._name))
        memory = memoryview(bytearray(CRC_BLOCK))
        for save in self._saves:
            storage.rename(f"{_INCOMPLETE}/tags/{save.tag}", f"{self._staged}/{save.tag}")
            manifest = f"{save.tag}/{MANIFEST}"
            digests[manifest] = _digest(storage, f"{self._staged}/{manifest}", memory)
        storage.write(f"{self._staged}/{DIGESTS}", json.dumps(digests, indent=1).encode())
        storage.sync_dir(self._staged)
        storage.make_dir(self._folder)
        try:
            replacement.make()
        except OSError:
            replacement.put_back()
            raise
        storage.sync_dir(self._folder)
        storage.remove(replacement.aside)

    def _replacement(self, name: str) -> Replacement:
        """Of the directory ``name`` beside this one, or of this one."""
        staged = f"{_INCOMPLETE}/{name}"
        return Replacement(self._storage, staged, os.path.join(self._folder, name), f"{staged}{_ASIDE}")


def is_sealed(directory: str, tag: str) -> bool:
    """Whether it is one of ours, and complete."""
    return os.path.isfile(os.path.join(directory, tag, DONE))


def is_ours(directory: str, tag: str) -> bool:
    """Whether it holds that tag, even if that has lost files since, so that opening it raises."""
    return os.path.isdir(os.path.join(directory, tag))


@as_checkpoint_errors()
def verify_files(directory: str, tag: str) -> None:
    """Raise PartLost or DigestMismatch where the files beside the tag are not those that were sealed with it, or a tag
    is of another save."""
    storage, memory = LocalStorage(directory), memoryview(bytearray(CRC_BLOCK))
    for name, expected in _digests(storage).items():
        path = os.path.join(directory, name)
        try:
            found = _digest(storage, name, memory)
        except FileNotFoundError as error:
            raise PartLost(f"{path} was saved, and is gone: {_ELSEWHERE}") from error
        folder, _, file = name.rpartition("/")
        if found != expected and folder and file == MANIFEST and is_sealed(directory, folder):
            raise DigestMismatch(
                f"{os.path.dirname(path)} is of another save than the files beside it: its {MANIFEST} should have size "
                f"and CRC-32 {expected}, as {DIGESTS} has them, found {found}. Put the tag back that was saved with "
                "them, or resume from another checkpoint"
            )
        if found != expected:
            raise DigestMismatch(
                f"{path}: its bytes are not those that were saved, as {DIGESTS} has them: size and CRC-32 {expected}, "
                f"found {found}. Resume from another checkpoint. If it was changed on purpose, remove "
                f"{os.path.join(directory, tag)}, and with it the optimizer"
            )


_ELSEWHERE = "the checkpoint is damaged; resume from another one"


def _digests(storage: LocalStorage) -> dict[str, Any]:
    """What :data:`DIGESTS` says."""
    where = os.path.join(storage.url, DIGESTS)
    try:
        found = document.whole(storage.read(DIGESTS))
        for name in found if isinstance(found, dict) else ():
            checked_key(name)
    except FileNotFoundError as error:
        raise PartLost(f"{where} was saved, and is gone: {_ELSEWHERE}") from error
    except (ValueError, RecursionError) as error:
        raise MalformedFile(f"{where} is no list of files: {error}: {_ELSEWHERE}") from error
    if not isinstance(found, dict):
        raise MalformedFile(f"{where}: expected an object, found {type(found).__name__}: {_ELSEWHERE}")
    return found


def _digest(storage: LocalStorage, key: str, memory: memoryview) -> list[int]:
    """Size in bytes and CRC-32 of a file, which is read a ``memory`` full at a time."""
    size = storage.size(key)
    return [size, crc32_of(storage, key, 0, size, memory, Counter())]
