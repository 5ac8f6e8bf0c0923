"""Identity of a tag's save, its order time, and the damage that this process has found in it.

The name is not enough: another save may take it while a reader still reads the first.

Order time is the one number by which tags are ordered; docs/format.md lists the cases. Our tags have it in their
manifest, wherever they were copied to and whatever times their files have. ``done`` holds it too, with the attempt, and
has it as its modification time, by which NxD goes. A tag of another program has the time of its ``done``, also one that
was saved over a tag of ours: another program writes ``1`` there.

Damage is found by any load, verification or drain here, through whatever storage object, so it is kept for the whole
process, by the tag's place. Retention, which reads no tensor, does not count such tags. It belongs to one save: another
save of that name has another fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar
from uuid import uuid4

from nxd_ckpt.core import names
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.manifest import Manifest, load_manifest
from nxd_ckpt.core.names import DONE, MANIFEST
from nxd_ckpt.core.tags import LATEST, order_text
from nxd_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    MalformedFile,
    RanksDisagree,
    TagReplaced,
    UnsafePickle,
)
from nxd_ckpt.formats import crc32
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.wrapper import LayeredStorage, StorageWrapper

FOREIGN_MARK = b"1"
"""Content of NxD's markers."""
_RECORDED = re.compile(rb"([0-9]{1,13}(?:\.[0-9]{1,6})?) [^ ]+")


def mark_of(order_time: float, attempt: str) -> bytes:
    """Return the content of ``done`` of a tag of ours."""
    return f"{order_text(order_time)} {attempt}".encode()


def marker_time(storage: Storage, key: str) -> float:
    """Return the modification time of a marker in seconds; an impossible time counts as the latest possible one."""
    return min(storage.time(key), LATEST)


def recorded_order_time(storage: Storage, tag: str) -> float | None:
    """Return the order time in ``done``; None if there is none, as in tags of other programs and old ones of ours."""
    key = f"{tag}/{DONE}"
    if storage.renames and not 1 < storage.size(key) <= NOTE:
        return None
    recorded = _RECORDED.match(storage.read(key, NOTE))
    order_time = float(recorded[1]) if recorded else None
    return order_time if order_time is None or order_time <= 2 * LATEST else None


def order_time_of_ours(storage: Storage, tag: str, marked: float) -> float | None:
    """Return the order time of a complete tag with a manifest whose ``done``, of the time ``marked``, records none.

    None if another program saved over the tag. With a damaged manifest the time of ``done`` counts.
    """
    try:
        manifest = manifest_of(storage, tag)
        return None if is_written_over(storage, tag, manifest) else manifest.order_time
    except MalformedFile:
        return marked


def manifest_of(storage: Storage, tag: str) -> Manifest:
    """Read the manifest of a tag. Raises MalformedFile, OSError."""
    key = f"{tag}/{MANIFEST}" if tag else MANIFEST
    return load_manifest(storage.read(key), f"{storage.url}/{key}")


def is_written_over(storage: Storage, tag: str, manifest: Manifest) -> bool:
    """Return whether another program saved over a tag of ours: ``done``, which would name the attempt, is its own.

    Tags that older versions saved on a file system have such a ``done`` too. Of these it is not known.
    """
    return manifest.is_named_by_done and storage.read(f"{tag}/{DONE}", NOTE) == FOREIGN_MARK


T = TypeVar("T")

_SIGNS = (CorruptCheckpoint, CheckpointNotFound, UnsafePickle, OSError, EOFError)
"""Errors of reading a tag whose files are damaged, are being removed, or belong to two saves."""

_TRIES = 10
"""Number of attempts to read the latest tag. A job that writes faster than others read must keep more tags."""


class Identity:
    """The save found under the name ``tag`` at construction.

    ``fingerprint`` is equal for all who look at that save, and for no other. It is None if there is no such directory.
    """

    def __init__(self, storage: Storage, tag: str) -> None:
        self.tag: str = tag
        self._storage = storage
        self.fingerprint: str | None
        self.fingerprint, self._done = _look(storage, tag)

    @property
    def lasts(self) -> bool:
        """True if the next save of that name has another fingerprint. NxD 0.6 and its converter leave no such trace."""
        return self.fingerprint not in (None, _UNMARKED)

    def is_of(self, manifest: Manifest) -> bool:
        """Return whether ``done`` names the manifest's attempt, as our saves into a store leave it."""
        return self._done == mark_of(manifest.order_time, manifest.attempt)

    @property
    def names_attempt(self) -> bool:
        """True if ``done`` has an attempt, which `is_of` compares."""
        return b" " in self._done

    def must_be(self, fingerprint: str | None) -> None:
        """Raise TagReplaced unless it is the save with that fingerprint."""
        if self.fingerprint is None or self.fingerprint != fingerprint:
            raise self._replaced(self.fingerprint)

    def require(self) -> None:
        """Raise TagReplaced unless the same save is still there."""
        fingerprint, _ = _look(self._storage, self.tag)
        if fingerprint is None or fingerprint != self.fingerprint:
            raise self._replaced(fingerprint)

    @property
    def copy(self) -> str:
        """Identity of this copy of the save: several hosts may each have one on their own disk.

        It is equal for all who look at the same copy. Copies keep the times of files, so a file system's inode is part
        of it; where there is none, such as for an archive, each reader has its own.
        """
        used = self._storage.used if isinstance(self._storage, LayeredStorage) else [self._storage]
        return " ".join([str(self.fingerprint), *(_copy_in(storage, self.tag) for storage in used)])

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context for reading the tag: errors that another save or a removal causes are raised as TagReplaced."""
        try:
            yield
        except _SIGNS as error:
            if self._is_there():
                raise
            raise self._replaced(_look(self._storage, self.tag).fingerprint, error) from error

    def _is_there(self) -> bool:
        try:
            self.require()
        except TagReplaced:
            return False
        except OSError:
            pass  # nothing can be learned: then the first error says more
        return True

    def _replaced(self, fingerprint: str | None, error: Exception | None = None) -> TagReplaced:
        what = "removed" if fingerprint is None else "replaced by another save"
        met = "" if error is None else f" (met: {type(error).__name__}: {error})"
        where = f"{self._storage.url}/{self.tag}" if self.tag else self._storage.url
        return TagReplaced(f"{where} was {what} while it was read; read it again, or another tag{met}")


def of_latest(looks_again: bool, read: Callable[[], T]) -> T:
    """Call ``read``; if the tag was replaced or removed, call it again for the tag that is the latest then.

    Without ``looks_again``, for a named tag, or after too many replacements, TagReplaced is raised.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except TagReplaced:
            if not looks_again:
                raise
    return read()


def require_one_save(saves: Sequence[str | None]) -> None:
    """Raise RanksDisagree unless the ranks, in order, are about to load one save; see `OpenTag.save_name`."""
    for rank, save in enumerate(saves):
        if save != saves[0]:
            raise RanksDisagree(
                f"rank 0 loads {saves[0]}, rank {rank} {save}; all ranks must make the same calls, in the same order, "
                "and load the same save; without a manifest of ours, from the same path"
            )


def _copy_in(storage: Storage, tag: str) -> str:
    while isinstance(storage, StorageWrapper):
        storage = storage.inner
    identity: object = None if not storage.renames else uuid4().hex
    if isinstance(storage, LocalStorage):
        with suppress(OSError, CheckpointError):  # reading it raises the error
            done = f"{tag}/{names.DONE}"
            identity = storage.inode(done if storage.is_file(done) else tag)
    return str(identity)


class _Seen(NamedTuple):
    """The fingerprint of a save, and in a store the content of its ``done``, if it is ours."""

    fingerprint: str | None
    done: bytes = b""


def _look(storage: Storage, tag: str) -> _Seen:
    prefix = f"{tag}/" if tag else ""
    if not storage.renames and (done := _content(storage, f"{prefix}{names.DONE}")) not in (None, FOREIGN_MARK):
        return _Seen(_digest_of(done), done)  # it holds the order time and the attempt
    # A manifest may be large. On a file system the time of `done` orders the tags: no two saves of ours have the same.
    about = _size if storage.renames else _digest
    manifest = about(storage, f"{prefix}{names.MANIFEST}")
    # Who saves over the files of a tag, as neuronx_distributed does, writes its markers again.
    times = [_time(storage, f"{prefix}{marker}") for marker in (names.MARKER, names.DONE)]
    word = f"{manifest} {times}"
    return _Seen(None if word == _UNMARKED and not storage.is_dir(tag) else word)


def _content(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.read(key)
    except FileNotFoundError:
        return None
    except (CorruptCheckpoint, IsADirectoryError):
        return b"damaged"  # its reader reports it


def _digest(storage: Storage, key: str) -> str | None:
    data = _content(storage, key)
    return None if data is None else _digest_of(data)


def _digest_of(data: bytes) -> str:
    return f"{len(data)} {crc32.crc32(data):08x}"


def _size(storage: Storage, key: str) -> str | None:
    try:
        return str(storage.size(key))
    except FileNotFoundError:
        return None
    except CorruptCheckpoint:
        return "damaged"  # its reader reports it


_UNMARKED = "None [None, None]"
"""Fingerprint of a directory without manifest and markers."""


def _time(storage: Storage, key: str) -> float | None:
    try:
        return storage.time(key)
    except (FileNotFoundError, CorruptCheckpoint):
        return None


_damage: dict[tuple[str, str], tuple[str, str]] = {}
"""The fingerprint of a damaged save, and a sentence about the damage, by URL and tag."""


def note_damage(storage: Storage, identity: Identity | None, why: str | None) -> None:
    """Record damage of the save with this identity in ``storage``, a sentence; None forgets it: all bytes are right."""
    if identity is None:
        return
    place = storage.url, identity.tag
    if why is None:
        _damage.pop(place, None)
    elif identity.fingerprint is not None:
        _damage[place] = identity.fingerprint, why


def is_noted(storage: Storage, tag: str) -> bool:
    """Return whether damage of any save of that name is recorded."""
    return (storage.url, tag) in _damage


def known_damage(storage: Storage, identity: Identity | None) -> str | None:
    """Return the recorded damage of this very save; None if there is none."""
    if identity is None:
        return None
    fingerprint, why = _damage.get((storage.url, identity.tag), (None, ""))
    return why if fingerprint is not None and fingerprint == identity.fingerprint else None
