"""Which save a tag is. Its name does not say: another save may take the name while a reader still reads the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar
from uuid import uuid4

from nxd_ckpt.core import names
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, TagReplaced, UnsafePickle
from nxd_ckpt.formats import crc32
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.layered import LayeredStorage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.wrapper import StorageWrapper

T = TypeVar("T")

_SIGNS = (CorruptCheckpoint, CheckpointNotFound, UnsafePickle, OSError, EOFError)
"""Errors of reading a tag whose files are damaged, are being removed, or are those of two saves."""

_TRIES = 10
"""How often a reader begins again with the latest tag. A job that writes faster than others read must keep more
tags."""


class Identity:
    """The save that is found under the name ``tag`` when this is made.

    ``word`` is the same for all who look at that save, and for no other. It is None where there is no such directory.
    """

    def __init__(self, storage: Storage, tag: str) -> None:
        self._storage, self._tag = storage, tag
        self.word = _word(storage, tag)

    @property
    def lasts(self) -> bool:
        """Whether the next save of that name has another word. NxD 0.6 and its converter leave nothing that tells."""
        return self.word not in (None, _UNMARKED)

    def must_be(self, word: str | None) -> None:
        """Raise TagReplaced unless it is the save that ``word`` stands for."""
        if self.word is None or self.word != word:
            raise self._replaced(self.word)

    def require(self) -> None:
        """Raise TagReplaced unless the same save is there still."""
        word = _word(self._storage, self._tag)
        if word is None or word != self.word:
            raise self._replaced(word)

    @property
    def copy(self) -> str:
        """Which copy of that save it is: several hosts may each have one on a disk of their own.

        The same for all who look at the same copy. Copies keep the times of files, so a file system is asked more; what
        cannot be asked, such as an archive on a disk, may be another one for each that looks.
        """
        used = self._storage.used if isinstance(self._storage, LayeredStorage) else [self._storage]
        return " ".join([str(self.word), *(_copy_in(storage, self._tag) for storage in used)])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The tag is read within this context: an error caused by another save, or by its removal, is raised as
        TagReplaced."""
        try:
            yield
        except _SIGNS as error:
            if self._is_there():
                raise
            raise self._replaced(_word(self._storage, self._tag), error) from error

    def _is_there(self) -> bool:
        try:
            self.require()
        except TagReplaced:
            return False
        except OSError:
            pass  # nothing can be learned: then the first error says more
        return True

    def _replaced(self, word: str | None, error: Exception | None = None) -> TagReplaced:
        what = "removed" if word is None else "replaced by another save"
        met = "" if error is None else f" (met: {type(error).__name__}: {error})"
        where = f"{self._storage.url}/{self._tag}" if self._tag else self._storage.url
        return TagReplaced(f"{where} was {what} while it was read; read it again, or another tag{met}")


def of_latest(looks_again: bool, read: Callable[[], T]) -> T:
    """``read()``; again with the tag that is the latest then, if it was replaced or removed. Not where only one was
    named: then it ``looks_again`` for none.

    Raises TagReplaced there, and where too many in a row were replaced.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except TagReplaced:
            if not looks_again:
                raise
    return read()


def _copy_in(storage: Storage, tag: str) -> str:
    while isinstance(storage, StorageWrapper):
        storage = storage.inner
    found: object = None if not storage.renames else uuid4().hex
    if isinstance(storage, LocalStorage):
        with suppress(OSError, CheckpointError):  # whoever reads it will say so
            done = f"{tag}/{names.DONE}"
            found = storage.inode(done if storage.is_file(done) else tag)
    return str(found)


def _word(storage: Storage, tag: str) -> str | None:
    prefix = f"{tag}/" if tag else ""
    done = _digest(storage, f"{prefix}{names.DONE}")
    if not storage.renames and done not in (None, _ONE):
        return f"{done}"  # our own holds the order time and the attempt
    # A manifest may be large. On a file system the time of `done` orders the tags: no two saves of ours have the same.
    about = _size if storage.renames else _digest
    manifest = about(storage, f"{prefix}{names.MANIFEST}")
    # Who saves over the files of a tag, as neuronx_distributed does, writes its markers anew.
    times = [_time(storage, f"{prefix}{marker}") for marker in (names.MARKER, names.DONE)]
    word = f"{manifest} {times}"
    return None if word == _UNMARKED and not storage.is_dir(tag) else word


def _digest(storage: Storage, key: str) -> str | None:
    try:
        data = storage.read(key)
    except FileNotFoundError:
        return None
    except (CorruptCheckpoint, IsADirectoryError):
        return "damaged"  # whoever needs it says so
    return f"{len(data)} {crc32.crc32(data):08x}"


def _size(storage: Storage, key: str) -> str | None:
    try:
        return str(storage.size(key))
    except FileNotFoundError:
        return None
    except CorruptCheckpoint:
        return "damaged"  # whoever needs it says so


_UNMARKED = "None [None, None]"
"""The word of a directory without manifest and markers."""
_ONE = f"1 {crc32.crc32(b'1'):08x}"


def _time(storage: Storage, key: str) -> float | None:
    try:
        return storage.time(key)
    except (FileNotFoundError, CorruptCheckpoint):
        return None
