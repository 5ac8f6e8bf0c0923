"""Writing staged files: digests, headers, bytes, index. Runs on the background thread only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from nxd_ckpt.core.manifest import FileEntry, RankIndex, TensorEntry, dump_index
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.formats import crc32, torch_zip_writer
from nxd_ckpt.runtime.plan import PlannedFile, SavePlan
from nxd_ckpt.runtime.staging import Wave
from nxd_ckpt.storage.base import Storage, Writer

_CHUNK = 16 * 2**20
"""Bytes per write call: large enough for any disk, small enough for progress to be seen."""


@dataclass
class _OpenFile:
    writer: Writer
    blocks: dict[int, list[int]] = field(default_factory=dict)


class FileWriter:
    """Writes one rank's planned files below ``folder``, wave by wave.

    ``progress`` is called with the bytes written so far after every chunk.
    """

    def __init__(
        self, storage: Storage, folder: str, files: Sequence[PlannedFile], progress: Callable[[int], None]
    ) -> None:
        self._storage, self._folder, self._files, self._progress = storage, folder, files, progress
        self._open: dict[int, _OpenFile] = {}
        self._blocks: dict[int, Mapping[int, list[int]]] = {}
        self._entries: dict[str, FileEntry] = {}
        self.nbytes = 0

    def write(self, wave: Wave, views: Sequence[memoryview]) -> None:
        """Digest and write one staged wave. Files that are whole in it are finished and synced."""
        for span, view in zip(wave, views, strict=True):
            with _naming(self._files[span.file].key):
                if span.storage is None:
                    self._write_whole(span.file, view)
                else:
                    handle = self._opened(span.file)
                    handle.blocks.setdefault(span.storage, []).extend(crc32.block_crcs(view))
                    self._put(handle.writer, span.start, view)

    def _write_whole(self, number: int, view: memoryview) -> None:
        handle = self._opened(number)
        for index, storage in enumerate(self._files[number].image.storages):
            handle.blocks[index] = crc32.block_crcs(view[storage.offset : storage.offset + storage.nbytes])
        for offset, literal in self._literals(number):
            view[offset : offset + len(literal)] = literal
        self._put(handle.writer, 0, view)
        self._finish(number)

    def finish(self) -> None:
        """Complete the files that went in several waves, then make all their names durable."""
        for number in list(self._open):
            with _naming(self._files[number].key):
                for index in range(len(self._files[number].image.storages)):
                    self._open[number].blocks.setdefault(index, [])  # storages without bytes are in no wave
                for offset, literal in self._literals(number):
                    self._put(self._open[number].writer, offset, memoryview(literal))
                self._finish(number)
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
                file=planned.key,
                offset=planned.image.storages[tensor.storage].offset,
                nbytes=planned.image.storages[tensor.storage].nbytes,
                dtype=tensor.dtype,
                shape=tensor.shape,
                crc32=tuple(self._blocks[number][tensor.storage]),
                pieces=tensor.pieces,
            )
            for number, planned in enumerate(self._files)
            for tensor in planned.tensors
        ]
        files = {planned.key: self._entries[planned.key] for planned in self._files}  # in order, whatever the waves
        return RankIndex(at, files, tuple(tensors), plan.parameters, plan.optimizer_names)

    def replicated_digest(self) -> int | None:
        """A digest of all written tensors that should be equal on every tp rank; None if there are none."""
        lines = sorted(
            f"{tensor.name} {self._blocks[number][tensor.storage]}"
            for number, planned in enumerate(self._files)
            for tensor in planned.tensors
            if tensor.replicated
        )
        return crc32.crc32("\n".join(lines).encode()) if lines else None

    def _opened(self, number: int) -> _OpenFile:
        if number not in self._open:
            planned = self._files[number]
            writer = self._storage.create(f"{self._folder}/{planned.key}", planned.image.nbytes)
            self._open[number] = _OpenFile(writer)
        return self._open[number]

    def _finish(self, number: int) -> None:
        planned, handle = self._files[number], self._open[number]
        handle.writer.close()
        del self._open[number]
        self._blocks[number] = handle.blocks
        crcs = self._whole(planned, handle.blocks)
        self._entries[planned.key] = FileEntry(planned.image.nbytes, torch_zip_writer.file_crc32(planned.image, crcs))

    def _literals(self, number: int) -> list[tuple[int, bytes]]:
        planned = self._files[number]
        return planned.image.literals(self._whole(planned, self._open[number].blocks))

    @staticmethod
    def _whole(planned: PlannedFile, blocks: Mapping[int, list[int]]) -> dict[int, int]:
        storages = planned.image.storages
        return {index: crc32.combine_blocks(crcs, storages[index].nbytes) for index, crcs in blocks.items()}

    def _put(self, writer: Writer, offset: int, view: memoryview) -> None:
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            writer.write_at(offset + start, part)
            self.nbytes += len(part)
            self._progress(self.nbytes)


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
