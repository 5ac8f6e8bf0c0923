"""The contract that every storage keeps.

A storage keeps bytes under keys: posix paths relative to one root (``step_300/model/x.pt``). It is naive on purpose:
retries, latency and faults are wrappers around it. A caller may rely on this:

1. After `Storage.write` or `Writer.close` returned, the bytes are complete and, on a durable storage,
   on the disk. The *name* is only durable after `Storage.sync_dir` of the directory that holds it.
2. `Storage.write` replaces at once: a reader sees the old bytes or the new ones, never a mixture.
3. Where `Storage.renames` is true, `Storage.rename` is atomic and moves a whole directory.
4. A missing key raises FileNotFoundError; reading past the end raises EOFError. Anything of another kind than was asked
   for raises MalformedFile at once, and never blocks: a directory, FIFO, device or link that leads nowhere in place of
   a file, a file in place of a directory, more bytes than `Storage.read` may take, a key that leaves the root. Every
   other failure is an OSError. All name the url and the key, never credentials.
5. Nothing is written, moved or removed through a link below the root, so nothing outside of it. Links are followed to
   read: a tag, or its files, may lie elsewhere.
6. A `Reader` keeps reading the file that it opened, even if another one is renamed to the key or written under it;
   where that is impossible, it raises OSError and never mixes two files.

An object store (``renames`` is false) has keys and nothing else. There ``make_dir``, ``sync_dir`` and ``set_time`` do
nothing, a directory is there while a key lies below it, and a key can be seen by all from the moment its writer closes.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import TracebackType
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

from typing_extensions import Self

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.errors import MalformedFile


class DirEntry(NamedTuple):
    """One name in a directory listing."""

    name: str
    is_dir: bool


class Writer(Protocol):
    """One file being written: any order of offsets, each byte once."""

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Put ``data`` at byte ``offset``. It may be read until `settle` or `close` returns."""

    def settle(self) -> None:
        """Return once the memory that was passed in is no longer read; raise earlier failures."""

    def close(self) -> None:
        """Complete the file; on a durable storage its bytes are on the disk after this.

        Raises FileExistsError if the key was taken meanwhile and the storage can tell.
        """

    def abort(self) -> None:
        """Give up; the file is left incomplete or removed. Never raises; the memory is not read afterwards."""


class Reader(Protocol):
    """One file, open for many reads. For one thread at a time; another opens its own."""

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memory (one byte per item) from its offset on, ascending ones in as few operations as possible."""

    def close(self) -> None:
        """Release the file. Safe to call again."""


class MemoryReader:
    """A reader of the file ``where``, all of which is in memory."""

    def __init__(self, data: bytes | memoryview, where: str) -> None:
        self._data = memoryview(data)
        self._where = where

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for offset, memory in ranges:
            part = self._data[offset : offset + len(memory)]
            if len(part) < len(memory):
                raise EOFError(f"{self._where}: {len(memory) - len(part)} bytes missing at byte {offset + len(part)}")
            memory[:] = part

    def close(self) -> None:
        """Do nothing: the file stays in memory."""


def pread_of(reader: Reader, start: int = 0) -> Callable[[int, int], bytes]:
    """Return a function of an offset, counted from ``start`` on, and a number: it reads so many bytes there."""

    def pread(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        reader.read_ranges([(start + offset, memoryview(data))])
        return bytes(data)

    return pread


class Version(NamedTuple):
    """The identity of a key's current file: its bytes, and a mark that no other file of the key has."""

    nbytes: int
    mark: str


class Storage(ABC):
    """Bytes by key; see the module's contract. All sizes and offsets are bytes, all times seconds since the epoch.

    A storage is a subclass. Methods without a body here must be written; the others do what an object store does that
    can do nothing more.
    """

    url: str
    renames: bool = False
    """True if directories can be renamed atomically, as in file systems, not in object stores."""

    concurrency: int
    """Best number of reads at once: one per core for a local disk, more where each waits for a network."""

    read_nbytes: int
    """Best size of a read in bytes: what a core's cache holds, more where a request costs as much as its bytes."""

    may_be_unmounted: bool = False
    """True if its root may lead to another directory from one moment to the next, without an error."""

    may_lack_files: bool = False
    """True if files may be lost while others of their tag are there: they lie on disks of several hosts."""

    duplicates: bool = False
    """True if `duplicate` can make a second file of one."""

    @abstractmethod
    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        """Return all of a file that has at most ``limit`` bytes; raise MalformedFile for a longer one."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset`` on."""
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, memoryview(buffer).cast("B"))])

    @abstractmethod
    def open(self, key: str) -> Reader:
        """Open a file for many reads."""

    def open_unseen(self, key: str) -> Reader:
        """Open a file for many reads, all of which are compared with known digests; it may only be missed when read.

        Where a look at it takes a request, there is none: the first read decides which version is read.
        """
        return self.open(key)

    @abstractmethod
    def size(self, key: str) -> int: ...

    @abstractmethod
    def is_dir(self, key: str) -> bool: ...

    @abstractmethod
    def is_file(self, key: str) -> bool: ...

    @abstractmethod
    def list(self, key: str = "") -> list[DirEntry]:
        """Return the names directly below the directory ``key``, sorted; an absent directory is empty."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Write a small file whole, creating directories on the way."""

    @abstractmethod
    def create(self, key: str, nbytes: int) -> Writer:
        """Create a file that will have ``nbytes`` bytes, under a free key, creating directories on the way."""

    @abstractmethod
    def link_new(self, key: str, data: bytes) -> bool:
        """Write a small file only if the key is free; False if it exists."""

    @abstractmethod
    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        """Replace a small file only if its content is ``expected``; False if it is another, or the file is gone.

        Of several that try at once, one succeeds.
        """

    def write_reserved(self, reserve: str, key: str, data: bytes) -> None:
        """Write a small file whole, with the space and the name of the file ``reserve``, which is then gone."""
        self.remove(reserve)
        self.write(key, data)

    def make_dir(self, key: str) -> None:
        """Create a directory, durably, with those above it; an existing one is fine.

        The root (``""``), and the directories above it, are durable afterwards, also if another process created them.
        In a store a directory is there while a key lies below it.
        """

    def sync_dir(self, key: str) -> None:
        """Make the names in this directory durable. In a store acknowledged writes last."""

    def without_syncs(self) -> Storage:
        """Return the storage for notes to processes that live, which are worth nothing once the power is gone.

        What it writes is seen by all at once. A storage that cannot leave its syncs out returns itself.
        """
        return self

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory; the target must not exist."""
        raise OSError(f"{self.url}: cannot rename {source} to {target}: an object store has no rename")

    def swap(self, one: str, other: str) -> bool:
        """Exchange the names of two files or directories atomically; False if that is impossible."""
        return False

    def version(self, key: str) -> Version:
        """Return a file's version; it changes when the file is replaced or written to."""
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), key)

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        """Give the free key ``target`` the bytes of ``source``, if it still has ``version``, without moving them.

        The new file is complete, and as durable as after `Writer.close`. Either may then be removed or replaced without
        changing the other.

        Returns False if that is impossible; then, and after an OSError, ``target`` is unchanged.
        """
        return False

    def share(self, source: str, target: str) -> bool:
        """Give a file a second name, making directories on the way: what is written to one is in both.

        Returns False if that is impossible, as for a link or a FIFO, or if ``target`` exists.
        """
        return False

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove a file or a whole directory; absent is fine."""

    def remove_if(self, key: str, confirm: Callable[[], bool]) -> bool:
        """Remove a file or a whole directory if ``confirm`` returns True; return its answer. Absent is fine.

        A storage that can tell them keeps files that come between the call and the removal, however long this process
        stands still.
        """
        if not confirm():
            return False
        self.remove(key)
        return True

    def drop_empty(self, key: str) -> None:
        """Remove a directory that nothing is in, where such directories stay. Raises OSError, also if there is none."""

    def discard_unfinished(self, key: str) -> None:
        """Free the unfinished files in the directory ``key`` of writers that died. None may be alive.

        Nothing is to be done where they lie among the others, and go with them, or are dropped by the store's rules.
        """

    @abstractmethod
    def time(self, key: str) -> float:
        """Return when it was last modified; 0 if the store does not report it."""

    def set_time(self, key: str, seconds: float) -> None:
        """Set when it was last modified, unless times belong to the store."""

    def is_link(self, key: str) -> bool:
        """Return whether this is another name, a symbolic link, of something."""
        return False

    def without_links(self) -> Storage | None:
        """Return the directory of its root by a path without links; None if there is no such path."""
        return None


class ReadOnlyStorage(Storage):
    """A storage of which every change raises the OSError (EROFS) of `refuse`."""

    def refuse(self, key: str) -> NoReturn:
        """Raise the error of a change of ``key``."""
        raise NotImplementedError

    def write(self, key: str, data: bytes) -> None:
        self.refuse(key)

    def create(self, key: str, nbytes: int) -> Writer:
        self.refuse(key)

    def link_new(self, key: str, data: bytes) -> bool:
        self.refuse(key)

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        self.refuse(key)

    def make_dir(self, key: str) -> None:
        self.refuse(key)

    def sync_dir(self, key: str) -> None:
        self.refuse(key)

    def rename(self, source: str, target: str) -> None:
        self.refuse(source)

    def remove(self, key: str) -> None:
        self.refuse(key)

    def discard_unfinished(self, key: str) -> None:
        self.refuse(key)

    def set_time(self, key: str, seconds: float) -> None:
        self.refuse(key)


@contextmanager
def completed(writer: Writer) -> Iterator[None]:
    """Close the writer at the end of the block; abort it if anything is raised."""
    try:
        yield
        writer.close()
    except BaseException:
        with suppress(Exception):  # it would hide the cause
            writer.abort()
        raise


_CANNOT_RENAME = {errno.EPERM, errno.EXDEV, errno.EINVAL, errno.EMFILE, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of mounted object stores when a directory with files is renamed; EMFILE is gcsfuse's."""


def can_rename(storage: Storage, key: str) -> bool:
    """Try to rename a directory with a file in it, which some mounts of object stores refuse.

    ``key`` is the beginning of two names that nobody else uses.
    """
    source = f"{key}.source"
    target = f"{key}.target"
    storage.remove(target)  # of a process that was killed here
    try:
        storage.write(f"{source}/file", b"1")
        return _renames(storage, source, target)
    finally:
        with suppress(OSError):  # else the next that tries removes it
            storage.remove(source)
            storage.remove(target)


def _renames(storage: Storage, source: str, target: str) -> bool:
    try:
        storage.rename(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_RENAME:
            raise
        return False
    return True


@runtime_checkable
class PerHost(Protocol):
    """A storage that consists of a directory on each host of a job."""

    @property
    def own(self) -> Storage:
        """The directory on the host of this process."""

    @property
    def is_home(self) -> bool:
        """True if ``own`` has the job's own small files."""

    def expect(self, key: str, mark: bytes | None) -> None:
        """Change nothing in ``own`` from now on unless the file ``key`` has this mark; None ends that."""

    def claim(self, folder: str, run_id: str) -> Callable[[], None]:
        """Claim ``own`` for the ranks of the run on this host, by a lock in ``folder``; return how to give it back.

        Raises DirectoryInUse if a live process of another run on this host has it.
        """


def here(storage: Storage) -> Storage:
    """Return the part of the storage on this host; all of it, if it is not `PerHost`."""
    return storage.own if isinstance(storage, PerHost) else storage


@runtime_checkable
class Replicated(Protocol):
    """A storage that can keep each file in several places."""

    is_replicated: bool
    """True if it keeps each file in several places."""

    distrusted: set[tuple[str, int]]
    """Keys, each with the number of a place whose copy is read only if there is no other."""

    def copies(self, key: str) -> dict[int, Storage]:
        """Return the places that have a file, each as a storage of its own, which is only read.

        A number means the same place in every process of the job.
        """


def checked_length(nbytes: int, limit: int, where: str) -> int:
    """Return ``nbytes`` if it is at most ``limit``. Raises MalformedFile, naming the file ``where``."""
    if nbytes > limit:
        raise MalformedFile(
            f"{where} has {nbytes} bytes, at most {limit} are expected: its content does not match its name"
        )
    return nbytes


_OUTSIDE = frozenset({"", ".", ".."})


def checked_key(key: str, where: str) -> str:
    """Return ``key`` if it lies below the root (or is "", the root). Raises MalformedFile, naming ``where``."""
    if key and ("\0" in key or not _OUTSIDE.isdisjoint(key.split("/"))):
        raise MalformedFile(f"{where}: the name {key!r:.200} leaves the directory; it is refused")
    return key


Range = tuple[int, memoryview]
"""An offset in bytes, and the memory to be filled from there on."""

HOLE = 64 * 2**10
"""Bytes between two ranges that take less time than another request of 30 ms."""


class ByteRun(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, and the memories for them, in ascending order without overlaps."""

    begin: int
    end: int
    ranges: list[Range]


def runs(ranges: Sequence[Range]) -> Iterator[ByteRun]:
    """Group neighbouring ranges; empty ones are left out."""
    begin = 0
    end = 0
    together: list[Range] = []
    for offset, buffer in ranges:
        if not len(buffer):
            continue
        if together and not 0 <= offset - end <= HOLE:
            yield ByteRun(begin, end, together)
            together = []
        if not together:
            begin = offset
        together.append((offset, buffer))
        end = offset + len(buffer)
    if together:
        yield ByteRun(begin, end, together)


class Closing:
    """An object with `close`, also usable as a context manager."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
