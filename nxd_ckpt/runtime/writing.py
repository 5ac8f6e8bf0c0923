"""Writing staged files: digests, headers, bytes, index. Runs beside the caller's thread only.

A large file is digested one stretch ahead of what is being written. Many small ones are written by several threads at
once: what each waits for is its own sync. Nothing here holds the interpreter while bytes move.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from nxd_ckpt.core.manifest import FileEntry, RankIndex, TensorEntry, dump_index
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats import crc32, torch_zip_writer
from nxd_ckpt.formats.torch_zip_writer import Storage as Place
from nxd_ckpt.runtime.plan import PlannedFile, SavePlan
from nxd_ckpt.runtime.staging import Span, Wave
from nxd_ckpt.storage.base import Storage, Writer

_CHUNK = 16 * 2**20
"""Bytes per write call: large enough for any disk, small enough for progress to be seen."""

_SMALL = 4 * 2**20
"""Bytes below which a file takes longer to open, sync and close than to write: those go over several threads."""

WRITERS = 8
"""Threads that serve small files well: more than cores, because most of the time they wait for the disk."""

Blocks = list[list[int]]
"""The CRC-32s of the blocks of each storage of a file, in order."""


@dataclass
class _OpenFile:
    """A file that goes in several waves."""

    writer: Writer
    blocks: Blocks


@dataclass(frozen=True)
class _Written:
    """What is known of a file once it is complete: the planned one with its final image, and its digests."""

    planned: PlannedFile
    blocks: Blocks
    entry: FileEntry


class FileWriter:
    """Writes one rank's planned files below ``folder``, wave by wave.

    ``progress`` is called with the bytes written so far after every chunk, by one of the ``threads`` at a time.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        files: Sequence[PlannedFile],
        progress: Callable[[int], None],
        threads: Executor,
    ) -> None:
        self._storage, self._folder, self._files, self._progress = storage, folder, list(files), progress
        self._threads = threads
        self._open: dict[int, _OpenFile] = {}
        self._written: dict[int, _Written] = {}
        self._lock = threading.Lock()
        self.nbytes = 0

    def write(self, wave: Wave, views: Sequence[memoryview]) -> None:
        """Digest and write one staged wave. Files that are whole in it are finished and synced."""
        small: list[Future[None]] = []
        try:
            for span, view in zip(wave, views, strict=True):
                if span.storage is not None:
                    self._write_part(span, view)
                elif len(view) < _SMALL:
                    small.append(self._threads.submit(self._write_whole, span.file, view))
                else:
                    self._write_whole(span.file, view, self._threads)
            for written in small:
                written.result()
        finally:
            _end(small)

    def _write_whole(self, number: int, view: memoryview, ahead: Executor | None = None) -> None:
        """``view`` is the file's tensors and their headers, the latter not filled in yet."""
        planned = self._files[number] = self._files[number].settled()
        with _naming(planned.key):
            writer = self._create(planned)
            try:
                blocks = self._write_tensors(planned, writer, view, ahead)
                self._finish(number, writer, blocks)
            except BaseException:
                writer.abort()
                raise

    def _write_tensors(self, planned: PlannedFile, writer: Writer, view: memoryview, ahead: Executor | None) -> Blocks:
        image, done = planned.image, 0
        blocks: Blocks = []
        with closing(_digested(view, _stretches(image.storages), ahead)) as stretches:
            for stretch in stretches:
                for crcs in stretch:
                    index = len(blocks)
                    whole = crc32.combine_blocks(crcs, image.storages[index].nbytes)
                    offset, header = image.header(index, whole)
                    view[offset : offset + len(header)] = header
                    blocks.append(crcs)
                end = image.storages[len(blocks) - 1].end
                ready = end if len(blocks) == len(image.storages) else end // _CHUNK * _CHUNK
                if ready > done:
                    self._put(writer, done, view[done:ready])
                    done = ready
        return blocks

    def _write_part(self, span: Span, view: memoryview) -> None:
        assert span.storage is not None
        with _naming(self._files[span.file].key):
            if span.file not in self._open:
                planned = self._files[span.file] = self._files[span.file].settled()
                self._open[span.file] = _OpenFile(self._create(planned), [[] for _ in planned.image.storages])
            handle = self._open[span.file]
            handle.blocks[span.storage] += crc32.block_crcs(view)
            self._put(handle.writer, span.start, view)

    def finish(self) -> None:
        """Complete the files that went in several waves, then make all their names durable."""
        for number, handle in list(self._open.items()):
            planned = self._files[number]
            with _naming(planned.key):
                for index, crc in enumerate(_whole(planned, handle.blocks)):
                    offset, header = planned.image.header(index, crc)
                    self._put(handle.writer, offset, memoryview(header))
                self._finish(number, handle.writer, handle.blocks)
            del self._open[number]
        # Parents too: the first to write below a directory created it, and its own name must last as well.
        folders = {str(parent) for planned in self._files for parent in PurePosixPath(planned.key).parents}
        for folder in sorted(folders, reverse=True):
            with _naming(f"{folder}/"):
                self._storage.sync_dir(self._folder if folder == "." else f"{self._folder}/{folder}")

    def abort(self) -> None:
        for handle in self._open.values():
            handle.writer.abort()
        self._open.clear()

    def index(self, plan: SavePlan, at: Coordinates) -> RankIndex:
        """What was written, as the index file of the rank at these coordinates says it."""
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
        return RankIndex(at, files, tuple(tensors), plan.parameters, plan.optimizer_names)

    def replicated_digest(self) -> int | None:
        """A digest of all written tensors that should be equal on every tp rank; None if there are none."""
        lines = sorted(
            f"{tensor.name} {written.blocks[tensor.storage]}"
            for written in self._in_order()
            for tensor in written.planned.tensors
            if tensor.replicated
        )
        return crc32.crc32("\n".join(lines).encode()) if lines else None

    def _in_order(self) -> list[_Written]:
        """What was written, as it was planned, whatever the waves and threads."""
        return [self._written[number] for number in range(len(self._files))]

    def _create(self, planned: PlannedFile) -> Writer:
        return self._storage.create(f"{self._folder}/{planned.key}", planned.image.nbytes)

    def _finish(self, number: int, writer: Writer, blocks: Blocks) -> None:
        planned = self._files[number]
        crcs = _whole(planned, blocks)
        tail = planned.image.tail(crcs)
        self._put(writer, planned.image.tensor_nbytes, memoryview(tail))
        writer.close()
        entry = FileEntry(planned.image.nbytes, torch_zip_writer.file_crc32(planned.image, crcs, tail))
        self._written[number] = _Written(planned, blocks, entry)

    def _put(self, writer: Writer, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            writer.write_at(offset + start, part)
            with self._lock:
                self.nbytes += len(part)
                self._progress(self.nbytes)


def _whole(planned: PlannedFile, blocks: Blocks) -> list[int]:
    """The CRC-32 of each storage."""
    return [
        crc32.combine_blocks(crcs, place.nbytes) for place, crcs in zip(planned.image.storages, blocks, strict=True)
    ]


_Stretches = Generator[Blocks, None, None]


def _stretches(places: Sequence[Place]) -> Iterator[Sequence[Place]]:
    """Neighbouring storages of about :data:`_CHUNK` bytes together, or one that is larger."""
    first = 0
    for index, place in enumerate(places):
        if place.end - places[first].offset >= _CHUNK or index == len(places) - 1:
            yield places[first : index + 1]
            first = index + 1


def _digested(view: memoryview, stretches: Iterable[Sequence[Place]], ahead: Executor | None) -> _Stretches:
    """The digests of each stretch of storages in ``view``; ``ahead`` computes the next while one is being used."""

    def digest(places: Sequence[Place]) -> Blocks:
        return [crc32.block_crcs(view[place.offset : place.end]) for place in places]

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


def _end(tasks: Collection[Future[Any]]) -> None:
    """Return once none of them is running, nor ever will: they look into memory that is used again."""
    for task in tasks:
        task.cancel()
    wait(tasks)


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Errors of the operating system, with the file that they were about: a write or a sync does not say."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"writing {key}: {type(error).__name__}: {error}") from error


def write_index(storage: Storage, folder: str, key: str, index: RankIndex) -> tuple[int, int]:
    """Write the index durably; its size in bytes and CRC-32, for the vote."""
    data = dump_index(index)
    with _naming(key):
        storage.write(f"{folder}/{key}", data)
        storage.sync_dir(os.path.dirname(f"{folder}/{key}"))
    return len(data), crc32.crc32(data)
