"""Bringing one file from a storage to another: as a hard link, or copied and digested on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from nxd_ckpt.core.manifest import CRC_BLOCK, FileEntry
from nxd_ckpt.errors import DigestMismatch, MalformedFile, PartNotFound
from nxd_ckpt.formats import crc32
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage

Progress = Callable[[int], None]
"""Called with the bytes of each chunk that was copied."""


def bring(
    source: Storage, source_key: str, target: Storage, key: str, expected: FileEntry | None, progress: Progress
) -> FileEntry:
    """Make ``key`` what ``source_key`` is; durable but for its name. With ``expected`` a hard link, where that works.

    Raises:
        PartNotFound, MalformedFile, DigestMismatch: the file is not there, or is not the ``expected`` one.
    """
    where = f"{source.url}/{source_key}"
    try:
        nbytes = source.size(source_key)
    except FileNotFoundError as error:
        raise PartNotFound(f"{where} is missing: the tag lost files since it was saved") from error
    if expected is not None and expected.nbytes != nbytes:
        raise MalformedFile(f"{where} has {nbytes} bytes, expected {expected.nbytes}: truncated or replaced")
    if expected is not None and _link(source, source_key, target, key):
        return expected
    found, _ = copy(source, source_key, target, key, {}, progress)
    if expected is not None and found != expected:
        raise DigestMismatch(
            f"{where}: expected CRC-32 {expected.crc32:08x}, found {found.crc32:08x}: its bytes changed"
        )
    return found


def copy(
    source: Storage, source_key: str, target: Storage, key: str, records: Mapping[int, int], progress: Progress
) -> tuple[FileEntry, dict[int, list[int]]]:
    """Copy a file; its size and CRC-32, and the CRC-32s of the blocks of each record (offset: bytes), by its offset."""
    nbytes = source.size(source_key)
    memory = memoryview(bytearray(min(CRC_BLOCK, nbytes)))
    whole, blocks = 0, {offset: list[int]() for offset in records}
    writer = target.create(key, nbytes)
    try:
        for start, stop, record in _segments(nbytes, records):
            part = memory[: stop - start]
            source.read_into(source_key, start, part)
            found = crc32.crc32(part)
            whole = crc32.combine(whole, found, len(part))
            if record is not None:
                blocks[record].append(found)
            writer.write_at(start, part)
            progress(len(part))
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return FileEntry(nbytes, whole), blocks


def _segments(nbytes: int, records: Mapping[int, int]) -> Iterator[tuple[int, int, int | None]]:
    """[start, stop) of the whole file, ascending: each a block of the record at the third number, or of no record."""
    cursor = 0
    for offset, size in [*sorted(records.items()), (nbytes, 0)]:
        spans = ((cursor, offset, None), (offset, offset + size, offset))
        for begin, end, record in spans:
            for start in range(begin, end, CRC_BLOCK):
                yield start, min(start + CRC_BLOCK, end), record
        cursor = offset + size


def _link(source: Storage, source_key: str, target: Storage, key: str) -> bool:
    """Make a hard link, and its bytes durable; False where that does not work, as between file systems."""
    if not isinstance(source, LocalStorage) or not isinstance(target, LocalStorage):
        return False
    path = target.path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.path(source_key).resolve(), path)
    except OSError:
        return False
    if target.durable:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return True
