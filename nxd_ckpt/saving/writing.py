"""Writing staged files: digests, headers, bytes, index. Never runs on the caller's thread.

A large file is digested one stretch ahead of the write. Many small ones are written by several threads at
once: each waits mostly for its own sync. Nothing here holds the interpreter while bytes move.

With ``dedup=True`` the storage duplicates files that are byte for byte those of an earlier tag, instead of a new write.
Equality is a comparison of the staged bytes with those that the earlier tag has now, not of digests. The reasons, and
possible changes meanwhile, are in docs/decisions/024.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nxd_ckpt import effects
from nxd_ckpt.commit.publication import Publication
from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.core.manifest import FileEntry, RankIndex, TensorEntry, dump_index
from nxd_ckpt.core.names import DONE, folders_of, tensors_dirs
from nxd_ckpt.core.tags import latest
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.image import StorageRecord
from nxd_ckpt.saving.options import CHUNK
from nxd_ckpt.saving.plan import SavePlan
from nxd_ckpt.saving.planned_file import PlannedFile, Span, Wave
from nxd_ckpt.storage.base import Reader, Storage, Version, Writer
from nxd_ckpt.storage.system import tell_room
from nxd_ckpt.storage.transfer import SavePace
from nxd_ckpt.tag.directory import list_tags

_SMALL = 4 * 2**20
"""Size below which a file takes longer to open, sync and close than to write: such files go to several threads."""

_CLOSING = 4
"""Largest number of large files that are synced and closed while others are written."""

WRITERS = 8
"""Threads that serve small files well: more than cores, because most of the time they wait for the disk."""

Blocks = list[list[int]]
"""CRC-32s of the blocks of each storage of a file, in order."""


@dataclass
class _OpenFile:
    """A file that is being written: its storages in order, each with the header before it once it is digested."""

    planned: PlannedFile
    writer: Writer
    blocks: Blocks
    digest: Callable[[memoryview], list[int]]
    crcs: list[int] = field(default_factory=list)
    crc32: int = 0

    def header(self) -> tuple[int, bytes]:
        """Return (offset, bytes) of the next header; all blocks of its storage must be known."""
        index = len(self.crcs)
        nbytes = self.planned.image.storages[index].nbytes
        self.crcs.append(crc32.combine_blocks(self.blocks[index], nbytes))
        offset, header = self.planned.image.header(index, self.crcs)
        self.crc32 = crc32.combine(crc32.crc32(header, self.crc32), self.crcs[-1], nbytes)
        return offset, header

    def tail(self) -> bytes:
        """Return the bytes after the last storage."""
        tail = self.planned.image.tail(self.crcs)
        self.crc32 = crc32.crc32(tail, self.crc32)
        return tail

    def head(self) -> bytes:
        """Return the bytes before the first storage, once all blocks are known."""
        head = self.planned.image.head(self.blocks)
        self.crc32 = crc32.combine(crc32.crc32(head), self.crc32, self.planned.image.nbytes - len(head))
        return head


@dataclass(frozen=True)
class _Written:
    """A complete file: its plan with the final image, and its digests."""

    planned: PlannedFile
    blocks: Blocks
    entry: FileEntry


class FileWriter:
    """Writer of one rank's planned files below ``folder``, wave by wave.

    ``progress`` is called with the bytes of every written chunk, by one of the ``threads`` at a time; with a pace also
    with 0, before digests. Files that equal those of the tag ``parent`` are duplicated. With ``closes_later`` one of
    the threads syncs and closes a large file while the next ones are written; then there is no ``parent``, whose files
    are compared when they close.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        files: Sequence[PlannedFile],
        progress: Callable[[int], None],
        threads: Executor,
        parent: str | None = None,
        closes_later: bool = False,
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._files = list(files)
        self._progress = progress
        self._threads = threads
        self._parent = parent
        self._closes_later = closes_later
        self._closing: deque[tuple[_OpenFile, Future[None]]] = deque()
        self._pace: SavePace | None = None
        self._planned_nbytes = sum(file.image.nbytes for file in files)
        self._open: dict[int, _OpenFile] = {}
        self._written: dict[int, _Written] = {}
        self._lock = effects.Lock()
        self.nbytes: int = 0
        self.duplicated_nbytes: int = 0
        """Of all files so far; of those that were duplicated."""

    def write(self, wave: Wave, views: Sequence[memoryview], pace: SavePace | None = None) -> None:
        """Digest and write the next wave at its ``pace``. Files that end in it are completed and synced."""
        small: list[Future[None]] = []
        self._pace = pace
        try:
            for span, view in zip(wave, views, strict=True):
                if len(view) < _SMALL and len(wave) > 1 and span.is_whole(self._files[span.file].image):
                    small.append(self._threads.submit(self._write_span, span, view))
                else:
                    self._write_span(span, view, self._threads)
            for written in small:
                written.result()
            for handle in self._open.values():
                with self._naming(handle.planned.key):
                    handle.writer.settle()  # the next wave comes into the same memory
        finally:
            _end(small)

    def _naming(self, key: str) -> AbstractContextManager[None]:
        return _naming(key, self._storage, self._planned_nbytes)

    def _write_span(self, span: Span, view: memoryview, others: Executor | None = None) -> None:
        """Write a span on this thread; ``others`` may help."""
        with self._naming(self._files[span.file].key):
            handle = self._open.pop(span.file, None) or self._create(span.file)
            image = handle.planned.image
            try:
                if span.is_part:
                    self._write_part(handle, span, view)
                else:
                    self._write_tensors(handle, span, view, others if len(view) > CHUNK else None)
                if (span.storages.stop, span.stop) == (len(image.storages), image.tensor_nbytes):
                    self._complete(span.file, handle, others if self._closes_later else None)
                else:
                    self._open[span.file] = handle
            except BaseException:
                _abort(handle)
                raise

    def _write_tensors(self, handle: _OpenFile, span: Span, view: memoryview, ahead: Executor | None) -> None:
        """Write ``view``: tensors and their headers, the latter not filled in yet."""
        self._put_missing_header(handle)
        storages = handle.planned.image.storages
        done = span.start
        with closing(_digested(handle, view, span.start, _stretches(storages, span.storages), ahead)) as stretches:
            for stretch in stretches:
                for crcs in stretch:
                    handle.blocks.append(crcs)
                    offset, header = handle.header()
                    view[offset - span.start : offset - span.start + len(header)] = header
                end = storages[len(handle.blocks) - 1].end
                ready = end if end == span.stop else end // CHUNK * CHUNK
                if ready > done:
                    self._put(handle.writer, done, view[done - span.start : ready - span.start])
                    done = ready

    def _write_part(self, handle: _OpenFile, span: Span, view: memoryview) -> None:
        if span.start == handle.planned.image.storages[span.storages.start].offset:
            self._put_missing_header(handle)
            handle.blocks.append([])
        handle.blocks[-1] += handle.digest(view)
        self._put(handle.writer, span.start, view)

    def _put_missing_header(self, handle: _OpenFile) -> None:
        """Write the header of a storage that came in parts, once all of it is there."""
        if len(handle.crcs) < len(handle.blocks):
            offset, header = handle.header()
            self._put(handle.writer, offset, memoryview(header))

    def finish(self) -> None:
        """Make the names of all files durable."""
        self._await_closed(0)
        for folder in tensors_dirs(planned.key for planned in self._files):
            with self._naming(folder):
                self._storage.make_dir(f"{self._folder}/{folder}")
        # Parents too: the first to write below a directory created it, and its own name must last as well.
        folders = folders_of(planned.key for planned in self._files)
        effects.side_by_side(*(partial(self._sync, folder) for folder in folders))

    def _sync(self, folder: str) -> None:
        with self._naming(folder or self._folder):
            self._storage.sync_dir(f"{self._folder}/{folder}".rstrip("/"))

    def abort(self) -> None:
        _end([closed for _, closed in self._closing])
        unclosed = [handle for handle, closed in self._closing if closed.cancelled() or closed.exception() is not None]
        for handle in (*self._open.values(), *unclosed):
            _abort(handle)
        self._open.clear()
        self._closing.clear()

    def _await_closed(self, most: int) -> None:
        """Return when at most ``most`` files are being closed. Raises the error of one that could not be."""
        while len(self._closing) > most:
            handle, closed = self._closing[0]
            with self._naming(handle.planned.key):
                closed.result()
            self._closing.popleft()

    def discard(self) -> None:
        """Remove the files of a failed attempt, as far as possible: the disk may be full."""
        self.abort()
        for written in self._written.values():
            with suppress(OSError):
                self._storage.remove(f"{self._folder}/{written.planned.key}")

    def index(self, plan: SavePlan, at: Coordinates) -> RankIndex:
        """Return the index of the rank at these coordinates with everything written."""
        tensors = [
            TensorEntry(
                name=tensor.name,
                file=written.planned.key,
                offset=written.planned.image.storages[tensor.storage].offset,
                nbytes=written.planned.image.storages[tensor.storage].nbytes,
                dtype=tensor.dtype,
                shape=tensor.shape,
                crc32=tuple(written.blocks[tensor.storage]),
                pieces=tensor.pieces,
            )
            for written in self._in_order()
            for tensor in written.planned.tensors
        ]
        files = {written.planned.key: written.entry for written in self._in_order()}
        trees = {
            written.planned.key: tree.element
            for written in self._in_order()
            if (tree := written.planned.tree) is not None
        }
        mesh = plan.mesh if plan.leads else None
        return RankIndex(at, files, tuple(tensors), plan.parameters, plan.optimizer_names, mesh, trees)

    def blocks(self, place: tuple[int, int]) -> list[int]:
        """Return the CRC-32s of the blocks of a storage that was written: of a file, by their numbers."""
        file, storage = place
        return self._written[file].blocks[storage]

    def chunks(self) -> tuple[DcpChunk, ...]:
        """Return the metadata of a torch DCP directory for everything written, in the order of the state dict."""
        placed = (chunk for written in self._in_order() for chunk in written.planned.placed_chunks())
        return tuple(chunk for _, chunk in sorted(placed))

    def replicated_digest(self) -> int | None:
        """Return a digest of all written tensors that should be equal on every tp rank; None if there are none."""
        lines = sorted(
            f"{tensor.name} {written.blocks[tensor.storage]}"
            for written in self._in_order()
            for tensor in written.planned.tensors
            if tensor.replicated
        )
        return crc32.crc32("\n".join(lines).encode()) if lines else None

    def _in_order(self) -> list[_Written]:
        """Return the written files in the order of the plan, whatever the waves and threads."""
        return [self._written[number] for number in range(len(self._files))]

    def _create(self, number: int) -> _OpenFile:
        planned = self._files[number] = self._files[number].settled()
        key = f"{self._folder}/{planned.key}"
        nbytes = planned.image.nbytes
        if self._parent is None:
            writer = self._storage.create(key, nbytes)
        else:
            writer = _create(self._storage, key, nbytes, f"{self._parent}/{planned.key}")
        return _OpenFile(planned, writer, [], self._digest)

    def _complete(self, number: int, handle: _OpenFile, closers: Executor | None) -> None:
        """Write everything that is missing, and close the file, on one of the ``closers`` if given."""
        self._put_missing_header(handle)
        image = handle.planned.image
        self._put(handle.writer, image.tensor_nbytes, memoryview(handle.tail()))
        self._put(handle.writer, 0, memoryview(handle.head()))
        if closers is None:
            handle.writer.close()
        else:
            handle.writer.settle()  # the memory will be reused
            self._await_closed(_CLOSING - 1)
            self._closing.append((handle, closers.submit(handle.writer.close)))
        if isinstance(handle.writer, DedupWriter) and handle.writer.duplicated:
            with self._lock:
                self.duplicated_nbytes += image.nbytes
        self._written[number] = _Written(handle.planned, handle.blocks, FileEntry(image.nbytes, handle.crc32))

    def _digest(self, view: memoryview) -> list[int]:
        pace = self._pace
        if pace is None:
            return crc32.block_crcs(view)

        def begin(nbytes: int) -> None:
            pace.digest(nbytes)
            with self._lock:
                self._progress(0)  # of a large tensor nothing is written for a long time

        return crc32.block_crcs(view, begin)

    def _put(self, writer: Writer, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            if self._pace is not None:
                self._pace.write(len(part))
            writer.write_at(offset + start, part)
            with self._lock:
                self.nbytes += len(part)
                self._progress(len(part))


_Stretches = Generator[Blocks, None, None]


def _stretches(storages: Sequence[StorageRecord], numbers: range) -> Iterator[Sequence[StorageRecord]]:
    """Neighbours among the ``storages`` with these numbers, of about `CHUNK` bytes together, or a larger one."""
    first = numbers.start
    for number in numbers:
        if storages[number].end - storages[first].offset >= CHUNK or number == numbers[-1]:
            yield storages[first : number + 1]
            first = number + 1


def _digested(
    handle: _OpenFile,
    view: memoryview,
    start: int,
    stretches: Iterable[Sequence[StorageRecord]],
    ahead: Executor | None,
) -> _Stretches:
    """Yield the digests of each stretch of storages in ``view``, which begins at byte ``start`` of its file.

    ``ahead`` computes the next while one is being used.
    """

    def digest(places: Sequence[StorageRecord]) -> Blocks:
        return [handle.digest(view[place.offset - start : place.end - start]) for place in places]

    if ahead is None:
        yield from map(digest, stretches)
        return
    pending: deque[Future[Blocks]] = deque()
    try:
        for places in stretches:
            pending.append(ahead.submit(digest, places))
            if len(pending) > 1:
                yield pending.popleft().result()
        yield from (future.result() for future in pending)
    finally:
        _end(pending)


def _abort(handle: _OpenFile) -> None:
    """Drop a file. An error is only logged: raised, it would hide from all ranks why the save failed."""
    try:
        handle.writer.abort()
    except Exception as error:
        logger.warning("%s of a failed save could not be removed: %s", handle.planned.key, error)


def _end(tasks: Collection[Future[Any]]) -> None:
    """Return once none of them runs or will run: they hold views of memory that is reused."""
    for task in tasks:
        task.cancel()
    wait(tasks)


@contextmanager
def _naming(key: str, storage: Storage, nbytes: int) -> Iterator[None]:
    """Add the file to errors of the operating system: those of a write or a sync do not name it.

    That of a full disk says that ``nbytes`` are to be written, and how many are free.
    """
    try:
        yield
    except OSError as error:
        tell_room(error, storage.url, nbytes)
        raise CheckpointError(f"writing {key}: {type(error).__name__}: {error}") from error


def write_index(storage: Storage, publication: Publication, key: str, index: RankIndex) -> FileEntry:
    """Write the index durably; its size in bytes and CRC-32, for the vote.

    Raises DirectoryInUse if a file that it tells of is not there any more.
    """
    entry = write_small(storage, publication, key, dump_index(index))
    publication.must_hold(storage, index.files)
    return entry


def write_small(storage: Storage, publication: Publication, key: str, data: bytes) -> FileEntry:
    """Write a small file of the attempt durably."""
    with _naming(key, storage, len(data)):
        publication.put(storage, {key: data})
    return FileEntry(len(data), crc32.crc32(data))


_FIRST, _PIECE = 64 * 2**10, 2**20
"""Bytes that are compared first, and then at a time. In most files that changed, the first differ."""

_ABSENT = (OSError, EOFError, CheckpointError)
"""Errors of reading a file that does not exist, is damaged, or cannot be read."""


def parent_of(storage: Storage, last_saved: str | None) -> str | None:
    """Return the tag whose files may be unchanged: the one that this job saved last, else the newest complete one."""
    if not storage.duplicates:
        return None
    with suppress(*_ABSENT):
        if last_saved is not None and storage.is_file(f"{last_saved}/{DONE}"):
            return last_saved
        newest = latest(list_tags(storage))
        return None if newest is None else newest.tag
    return None


def _create(storage: Storage, key: str, nbytes: int, source: str) -> Writer:
    """Create a file like ``storage.create(key, nbytes)``.

    If its bytes equal the file ``source``, that is duplicated.
    """
    with suppress(*_ABSENT):
        if storage.duplicates:
            version = storage.version(source)
            if version.nbytes == nbytes:
                return DedupWriter(storage, key, source, version)
    return storage.create(key, nbytes)


class DedupWriter:
    """Writer that compares its data with the file ``source``, and buffers them while they are equal.

    At the first byte that differs, or when the memory is needed, it writes all of them.
    """

    def __init__(self, storage: Storage, key: str, source: str, version: Version) -> None:
        self._storage = storage
        self._key = key
        self._source = source
        self._version = version
        self._reader: Reader | None = storage.open(source)
        self._memory = np.empty(min(_PIECE, version.nbytes), np.uint8)
        self._equal: list[tuple[int, memoryview]] = []
        self._writer: Writer | None = None
        self.duplicated: bool = False
        """True if nothing was written."""

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if self._writer is None and self._is_equal(offset, view):
            self._equal.append((offset, view))
        else:
            self._written().write_at(offset, view)

    def settle(self) -> None:
        self._written().settle()

    def close(self) -> None:
        if self._writer is None and self._is_whole and self._duplicate():
            self.duplicated = True
            self._release()
        else:
            self._written().close()

    def abort(self) -> None:
        self._release()
        if self._writer is not None:
            self._writer.abort()

    @property
    def _is_whole(self) -> bool:
        return sum(len(view) for _, view in self._equal) == self._version.nbytes

    def _is_equal(self, offset: int, view: memoryview) -> bool:
        done = 0
        size = min(_FIRST, len(view))
        while done < len(view):
            part = view[done : done + size]
            stored = self._memory[: len(part)]
            try:
                assert self._reader is not None
                self._reader.read_ranges([(offset + done, stored.data)])
            except _ABSENT:
                return False
            if not np.array_equal(np.frombuffer(part, np.uint8), stored):
                return False
            done += len(part)
            size = _PIECE
        return True

    def _duplicate(self) -> bool:
        try:
            return self._storage.duplicate(self._source, self._version, self._key)
        except OSError:  # the source was removed meanwhile, or there are no links, or too many: then it is written
            return False

    def _written(self) -> Writer:
        """Return the writer of the file, after writing all buffered data."""
        if self._writer is None:
            self._writer = self._storage.create(self._key, self._version.nbytes)
            for offset, view in self._equal:
                self._writer.write_at(offset, view)
            self._release()
        return self._writer

    def _release(self) -> None:
        self._equal.clear()
        if self._reader is not None:
            self._reader.close()
        self._reader = None
