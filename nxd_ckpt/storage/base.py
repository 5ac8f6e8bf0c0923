"""The contract that every storage keeps.

A storage holds bytes under keys: posix paths relative to one root (``step_300/model/x.pt``). It is naive on purpose:
retries, latency and faults are wrappers around it. What a caller may rely on:

1. After `Storage.write` or `Writer.close` returned, the bytes are complete and, on a durable storage,
   on the disk. The *name* is only durable after `Storage.sync_dir` of the directory that holds it.
2. `Storage.write` replaces at once: a reader sees the old bytes or the new ones, never a mixture.
3. Where `Storage.renames` is true, `Storage.rename` is atomic and moves a whole directory.
4. A missing key raises FileNotFoundError; reading past the end raises EOFError. What is there, but cannot be what was
   asked for, raises MalformedFile at once, and never blocks: a directory, FIFO, device or link that leads nowhere in
   place of a file, a file in place of a directory, more bytes than `Storage.read` is to take, a key that leaves
   the root. Every other failure is an OSError. All name the url and the key, never credentials.
5. Nothing is written, moved or removed through a link below the root, so nothing outside of it. Links are followed to
   read: a tag, or its files, may lie elsewhere.
6. A `Reader` goes on reading the file that it opened, whatever is renamed or written under the key meanwhile;
   where that cannot be, it raises OSError and never mixes two files.

An object store (``renames`` is false) has keys and nothing else. There ``make_dir``, ``sync_dir`` and ``set_time`` do
nothing, a directory is there while a key lies below it, and a key can be seen by all from the moment its writer closes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.errors import MalformedFile


class DirEntry(NamedTuple):
    """One name in a directory listing."""

    name: str
    is_dir: bool


class Writer(Protocol):
    """One file being written: any order of offsets, each byte once."""

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        """Put ``data`` at byte ``offset``. It may be looked into until `settle` or `close` returns."""

    def settle(self) -> None:
        """Return once nothing looks into memory that was handed over; raises what failed on the way."""

    def close(self) -> None:
        """Complete the file; on a durable storage its bytes are on the disk after this.

        Raises FileExistsError where the key was taken meanwhile and the storage can tell.
        """

    def abort(self) -> None:
        """Give up; the file is left incomplete or removed. Never raises; nothing looks into memory afterwards."""


class Reader(Protocol):
    """One file, open for many reads. By one thread at a time; another opens its own."""

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memory (one byte per item) from its offset on: ascending ones in as few operations as it takes."""

    def close(self) -> None:
        """Give it back. Safe to call again."""


class Storage(Protocol):
    """Bytes by key; see the module's contract. All sizes and offsets are bytes, all times seconds since the epoch."""

    url: str
    renames: bool
    """Whether directories can be renamed at once, as file systems do and object stores do not."""

    concurrency: int
    """Reads at once that serve it well: one for each core of a local disk, more where each waits for a network."""

    read_nbytes: int
    """Bytes of a read that serve it well: a block of a tensor, more where a request costs as much as its bytes."""

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        """All of a file that has at most ``limit`` bytes; raises MalformedFile for a longer one."""

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from byte ``offset`` on."""

    def open(self, key: str) -> Reader:
        """Open a file for many reads."""

    def size(self, key: str) -> int: ...

    def is_dir(self, key: str) -> bool: ...

    def is_file(self, key: str) -> bool: ...

    def list(self, key: str = "") -> list[DirEntry]:
        """Names directly below the directory ``key``, sorted; an absent directory is empty."""

    def write(self, key: str, data: bytes) -> None:
        """Write a small file whole, creating directories on the way."""

    def create(self, key: str, nbytes: int) -> Writer:
        """A new file that will have ``nbytes`` bytes, under a free key, creating directories on the way."""

    def link_new(self, key: str, data: bytes) -> bool:
        """Write a small file only if the key is free; False if it exists."""

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        """Replace a small file only if it holds ``expected``; False if it holds something else or is gone.

        Of several that try at once, one succeeds.
        """

    def make_dir(self, key: str) -> None:
        """Create a directory, durably, with those above it; an existing one is fine.

        The place itself (``""``), and what leads to it, is durable afterwards, whoever created it.
        """

    def sync_dir(self, key: str) -> None:
        """Make the names in this directory durable."""

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory; the target must not exist."""

    def remove(self, key: str) -> None:
        """Remove a file or a whole directory; absent is fine."""

    def discard_unfinished(self, key: str) -> None:
        """Free what writers left in the directory ``key`` that died before they closed. None may be alive."""

    def time(self, key: str) -> float:
        """When it was last modified; 0 if the store does not report it."""

    def set_time(self, key: str, seconds: float) -> None: ...


@contextmanager
def completed(writer: Writer) -> Iterator[None]:
    """The file is written within, and closed at the end; if anything is raised, it is given up."""
    try:
        yield
        writer.close()
    except BaseException:
        writer.abort()
        raise


@runtime_checkable
class Swapping(Protocol):
    """What a storage may also be able to do."""

    def swap(self, one: str, other: str) -> bool:
        """Give two files or directories each other's name, at once; False where that cannot be done."""


class Version(NamedTuple):
    """Which of the files that a key may have led to it leads to now: its bytes, and a mark that another does not have.
    """

    nbytes: int
    mark: str


@runtime_checkable
class Duplicating(Protocol):
    """What a storage may also be able to do."""

    def version(self, key: str) -> Version:
        """That of a file; it is another once the file was replaced or written to."""

    def duplicate(self, source: str, version: Version, target: str) -> bool:
        """Let the free key ``target`` have the bytes of ``source``, if that is still of ``version``, without moving
        them: complete, and as durable as after `Writer.close`. The one may be removed or replaced, and the other
        stays.

        False where that cannot be done, or with an OSError: ``target`` is then as it was.
        """


@runtime_checkable
class Confirming(Protocol):
    """What a storage may also be able to do."""

    def remove_if(self, key: str, confirm: Callable[[], bool]) -> bool:
        """Remove a file or a whole directory, as it is before ``confirm`` is asked, which says whether it is to go.

        What comes under these keys after that stays, however long this process stands still.
        """


def remove_if(storage: Storage, key: str, confirm: Callable[[], bool]) -> bool:
    """Remove a file or a whole directory if ``confirm`` says that it is to go; whether it did. Absent is fine.

    Only a `Confirming` storage leaves alone what comes there between that word and the removal.
    """
    if isinstance(storage, Confirming):
        return storage.remove_if(key, confirm)
    if not confirm():
        return False
    storage.remove(key)
    return True


@runtime_checkable
class Mounted(Protocol):
    """What a storage may also be."""

    may_be_unmounted: bool
    """True if its root may lead to another directory from one moment to the next, without an error."""

def is_mounted(storage: Storage) -> bool:
    """True for a storage that says so of itself."""
    return isinstance(storage, Mounted) and storage.may_be_unmounted


@runtime_checkable
class Linked(Protocol):
    """A storage whose root is a path that may have links in it."""

    def without_links(self) -> Storage | None:
        """The directory where its root leads to now, by a path without links; None where there is no such path."""


def without_links(storage: Storage) -> Storage | None:
    """As `Linked.without_links`; None for any other storage."""
    return storage.without_links() if isinstance(storage, Linked) else None


@runtime_checkable
class Reserving(Protocol):
    """A storage whose disk may be full, so that space for a small file is worth being kept."""

    def write_reserved(self, reserve: str, key: str, data: bytes) -> None:
        """As `Storage.write`, with the space and the name of the file ``reserve``, which is gone afterwards."""


@runtime_checkable
class PerHost(Protocol):
    """A storage that is made of a directory of each host of a job."""

    @property
    def own(self) -> Storage:
        """The directory of the host of this process."""

    @property
    def is_home(self) -> bool:
        """True where ``own`` has the job's own small files."""

    def expect(self, key: str, mark: bytes | None) -> None:
        """From now on change nothing in ``own`` but where the file ``key`` holds this mark; None: no matter what."""


def here(storage: Storage) -> Storage:
    """What of the storage is on this host; all of it, if it is not `PerHost`."""
    return storage.own if isinstance(storage, PerHost) else storage


@runtime_checkable
class Scattered(Protocol):
    """What a storage may also be."""

    may_lack_files: bool
    """Whether files may be lost while others of their tag are there: they lie on disks of several hosts."""


def may_lack_files(storage: Storage) -> bool:
    """Whether it says so of itself."""
    return isinstance(storage, Scattered) and storage.may_lack_files


@runtime_checkable
class Replicated(Protocol):
    """What a storage may also be."""

    is_replicated: bool
    """Whether it was told to keep each file in several places."""

    distrusted: set[tuple[str, int]]
    """Keys, and the number of a place whose copy of it is read only where there is no other."""

    def copies(self, key: str) -> dict[int, Storage]:
        """The places that have a file, each as a storage of its own, which is only read.

        A number means the same place in every process of the job.
        """


def checked_length(nbytes: int, limit: int, where: str) -> int:
    """``nbytes``, if it is at most ``limit``. Raises MalformedFile, naming the file ``where``."""
    if nbytes > limit:
        raise MalformedFile(f"{where} has {nbytes} bytes, at most {limit} are expected: it is not what its name says")
    return nbytes


def checked_key(key: str, where: str) -> str:
    """``key``, if it is that of something below the root (or "", the root). Raises MalformedFile, naming ``where``."""
    if key and ("\0" in key or any(part in ("", ".", "..") for part in key.split("/"))):
        raise MalformedFile(f"{where}: the name {key!r:.200} leaves the directory; it is refused")
    return key
