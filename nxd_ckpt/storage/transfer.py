"""The transfer of one file between storages, as a hard link, or copied and digested, within a rate."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, nullcontext
from itertools import groupby
from typing import NamedTuple, TypeVar

from nxd_ckpt import effects
from nxd_ckpt.core.manifest import CRC_BLOCK, FileEntry
from nxd_ckpt.errors import CheckpointError, DigestMismatch, InvalidArgument, MalformedFile, PartNotFound
from nxd_ckpt.formats import crc32
from nxd_ckpt.storage.arena import Arena
from nxd_ckpt.storage.base import Storage, Writer, completed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.system import sync_path


class Throttle:
    """A limit of ``bytes_per_second`` on average; None is unlimited. Unused time is not saved up."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def schedule(self, nbytes: int) -> tuple[float, float]:
        """Return the seconds until ``nbytes`` more may begin to pass, and until they have passed."""
        if self._rate is None:
            return 0.0, 0.0
        with self._lock:
            now = effects.monotonic()
            begin = max(self._free_at, now)
            self._free_at = begin + nbytes / self._rate
            return begin - now, self._free_at - now


class SavePace:
    """A limit of ``bytes_per_second`` on each of two kinds of work on the same bytes, which overlap.

    It ends once ``hurry`` is set.
    """

    def __init__(self, bytes_per_second: float, hurry: effects.Event) -> None:
        self._digests = Throttle(bytes_per_second)
        self._writes = Throttle(bytes_per_second)
        self._hurry = hurry

    def digest(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may be digested."""
        self._wait(self._digests.schedule(nbytes)[0])

    def write(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may be written."""
        self._wait(self._writes.schedule(nbytes)[0])

    def _wait(self, seconds: float) -> None:
        if seconds > _SHORT:
            self._hurry.wait(seconds)


_SHORT = 0.02
"""Seconds for which no thread sleeps: to wake up for each of many small tensors would cost more than to digest them."""


def check_retries(retries: int, url: str) -> None:
    """Raise InvalidArgument for an impossible option of a store."""
    if retries < 0:
        raise InvalidArgument(f"{url}: retries is {retries}; expected 0 or more")


Task = TypeVar("Task")
Filled = TypeVar("Filled")


def prefetched(
    tasks: Sequence[Task], fill: Callable[[Task, Arena], Filled], nbytes: int, threads: Executor | None = None
) -> Iterator[Filled]:
    """Yield ``fill``'s result for each task, valid until the next is asked for. Errors of ``fill`` pass.

    Memory: two arenas of at most ``nbytes`` each, which are filled in turn. Reads on ``threads`` if given.
    """
    arenas = Arena(nbytes), Arena(nbytes)
    with nullcontext(threads) if threads is not None else ThreadPoolExecutor(1, "nxd_ckpt-reader") as thread:
        ahead = [thread.submit(fill, task, arenas[0]) for task in tasks[:1]]
        try:
            for number in range(len(tasks)):
                filled = ahead.pop().result()
                if number + 1 < len(tasks):
                    ahead.append(thread.submit(fill, tasks[number + 1], arenas[(number + 1) % 2]))
                yield filled
        finally:
            wait(ahead)  # it fills memory that is released afterwards


_PIECE = 8 * 2**20


class StoredFile(NamedTuple):
    """A file by its key in a storage."""

    storage: Storage
    key: str

    @property
    def where(self) -> str:
        """Name of the file in errors."""
        return f"{self.storage.url}/{self.key}"

    @property
    def nbytes(self) -> int:
        """Size in bytes, which the storage is asked for."""
        return self.storage.size(self.key)


@contextmanager
def _of_a_tag(file: StoredFile) -> Iterator[None]:
    """Raise PartNotFound if the file is missing."""
    try:
        yield
    except FileNotFoundError as error:
        raise PartNotFound(f"{file.where} is missing: the tag lost files since it was saved") from error


Progress = Callable[[int], None]
"""A function that is called with the bytes of each chunk that was copied."""


def link_or_copy(
    source: StoredFile, target: StoredFile, expected: FileEntry | None, progress: Progress
) -> FileEntry:
    """Make ``target`` equal to ``source``, durable except for its name. With ``expected``, by a hard link if possible.

    Raises:
        PartNotFound, MalformedFile, DigestMismatch: the file is missing, or differs from ``expected``.
    """
    with _of_a_tag(source):
        nbytes = source.nbytes
    if expected is not None and expected.nbytes != nbytes:
        require_equal(expected, FileEntry(nbytes, 0), source.where)
    if expected is not None and link(source, target):
        return expected
    entry, _ = copy(source, target, {}, progress)
    if expected is not None:
        require_equal(expected, entry, source.where)
    return entry


def copy(
    source: StoredFile,
    target: StoredFile,
    records: Mapping[int, int],
    progress: Progress,
    readers: Executor | None = None,
) -> tuple[FileEntry, dict[int, list[int]]]:
    """Copy a file; return its size and CRC-32, and the CRC-32s of the blocks of each record, by offset.

    ``records`` are the bytes of each record, by offset. While a piece is written, the next one is read, by ``readers``
    if given; memory for two pieces of 8 MiB. Raises PartNotFound.
    """
    with _of_a_tag(source):
        nbytes = source.nbytes
    writer = target.storage.create(target.key, nbytes)
    with completed(writer):
        return copy_into(source, writer, 0, records, progress, readers)


def copy_into(
    source: StoredFile,
    writer: Writer,
    at: int,
    records: Mapping[int, int],
    progress: Progress,
    readers: Executor | None = None,
) -> tuple[FileEntry, dict[int, list[int]]]:
    """Copy a file into ``writer``, from byte ``at`` on. Arguments and result are otherwise those of `copy`."""
    with _of_a_tag(source):
        digests = _Digests(source.nbytes, records)
    for moved in _copied(_read_of_a_tag(source, digests.nbytes, readers), writer, at, digests):
        progress(moved)
    return digests.entry, digests.blocks


def copy_by_pieces(source: StoredFile, target: StoredFile, expected: FileEntry) -> Generator[int, None, None]:
    """Copy a file with the ``expected`` entry, one piece for each step of the iterator; yield the bytes of each piece.

    The copy is complete at the iterator's end. If the iterator is closed before, or fails, there is no copy.

    Raises:
        MalformedFile, DigestMismatch: the file differs from ``expected``.
    """
    nbytes = source.nbytes
    if nbytes != expected.nbytes:
        require_equal(expected, FileEntry(nbytes, 0), source.where)
    writer = target.storage.create(target.key, nbytes)
    digests = _Digests(nbytes, {})
    with completed(writer):
        yield from _copied(_read(source, nbytes, None), writer, 0, digests)
        require_equal(expected, digests.entry, source.where)


def require_equal(expected: FileEntry, actual: FileEntry, where: str) -> None:
    """Raise MalformedFile or DigestMismatch if a file has another size or CRC-32 than when the tag was saved."""
    if actual.nbytes != expected.nbytes:
        raise MalformedFile(f"{where} has {actual.nbytes} bytes, expected {expected.nbytes}: truncated or replaced")
    if actual != expected:
        raise DigestMismatch(
            f"{where}: expected CRC-32 {expected.crc32:08x}, found {actual.crc32:08x}: its bytes changed"
        )


_Pieces = Iterator[tuple[int, memoryview]]
"""Pieces of a file with their offsets; a piece is valid until the next one is asked for."""


def _copied(pieces: _Pieces, writer: Writer, at: int, digests: _Digests) -> Iterator[int]:
    """Write the pieces of a file, and digest it; yield the bytes of each piece."""
    for start, piece in pieces:
        digests.take(piece)
        writer.write_at(at + start, piece)
        writer.settle()  # the memory will be reused
        yield len(piece)


def digest(file: StoredFile, progress: Progress, readers: Executor | None = None) -> FileEntry:
    """Return the size and CRC-32 of a file, by reading it."""
    nbytes = file.nbytes
    crc = 0
    for _, piece in _read(file, nbytes, readers):
        crc = crc32.crc32(piece, crc)
        progress(len(piece))
    return FileEntry(nbytes, crc)


def link(source: StoredFile, target: StoredFile) -> bool:
    """Make a hard link, and its bytes durable; return False if that is impossible, as between file systems."""
    if not isinstance(source.storage, LocalStorage) or not isinstance(target.storage, LocalStorage):
        return False
    path = target.storage.path(target.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.storage.path(source.key).resolve(), path)
    except OSError:
        return False
    sync(*target)
    return True


def sync(storage: Storage, key: str) -> None:
    """Make the bytes of a file durable, which another process may have left in the page cache."""
    if not isinstance(storage, LocalStorage) or not storage.durable:
        return
    storage.size(key)  # raises unless it is a regular file: opening another kind could block
    sync_path(storage.path(key))


def _read_of_a_tag(file: StoredFile, nbytes: int, readers: Executor | None) -> _Pieces:
    """Yield the file's pieces. Raises PartNotFound if it is missing; an error of who takes them is not that."""
    with _of_a_tag(file):
        yield from _read(file, nbytes, readers)


def _read(file: StoredFile, nbytes: int, readers: Executor | None) -> _Pieces:
    with closing(file.storage.open(file.key)) as reader:

        def fill(start: int, arena: Arena) -> tuple[int, memoryview]:
            piece = arena.reserve(min(_PIECE, nbytes - start))
            reader.read_ranges([(start, piece)])
            return start, piece

        yield from prefetched(range(0, nbytes, _PIECE), fill, _PIECE, readers)


class _Digests:
    """CRC-32s of a file that is read in pieces: of the whole, and of the blocks of each of its ``records``."""

    def __init__(self, nbytes: int, records: Mapping[int, int]) -> None:
        self.nbytes = nbytes
        self._crc = 0
        self.blocks = {offset: list[int]() for offset in records}
        self._pieces = groupby(_segments(nbytes, records), lambda segment: segment[0] // _PIECE)

    def take(self, piece: memoryview) -> None:
        """Add the next piece."""
        for start, stop, record in next(self._pieces)[1]:
            crc = crc32.crc32(piece[start % _PIECE : start % _PIECE + stop - start])
            self._crc = crc32.combine(self._crc, crc, stop - start)
            if record is None:
                continue
            blocks = self.blocks[record]
            if (start - record) % CRC_BLOCK:  # the block began in the piece before
                blocks[-1] = crc32.combine(blocks[-1], crc, stop - start)
            else:
                blocks.append(crc)

    @property
    def entry(self) -> FileEntry:
        """Size and CRC-32 of the file, once all pieces were taken."""
        return FileEntry(self.nbytes, self._crc)


def _segments(nbytes: int, records: Mapping[int, int]) -> Iterator[tuple[int, int, int | None]]:
    """Yield (start, stop, record offset or None) of segments of the whole file, ascending.

    Each segment is in one piece, and in one block of its record, or in no record.
    """
    cursor = 0
    for offset, size in [*sorted(records.items()), (nbytes, 0)]:
        for begin, end, record in ((cursor, offset, None), (offset, offset + size, offset)):
            start = begin
            while start < end:
                block = start + CRC_BLOCK - (start - begin) % CRC_BLOCK
                stop = min(end, block, start + _PIECE - start % _PIECE)
                yield start, stop, record
                start = stop
        cursor = offset + size


class CopyPace:
    """Rate limit, progress and cancellation of a copy, shared by all of its threads.

    ``stop`` makes each of them give up at its next piece. ``bytes_per_second`` None is no limit.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self.stop: threading.Event = threading.Event()
        self._throttle = Throttle(bytes_per_second)
        self._counter = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes that were moved so far."""
        return self._counter.nbytes

    def moved(self, nbytes: int) -> None:
        """Count ``nbytes``, and return when more may be moved. Raises CheckpointError once the copy is to stop."""
        self._counter.add(nbytes)
        if self.stop.wait(self._throttle.schedule(nbytes)[1]):
            raise CheckpointError("stopped: another file could not be copied")
