"""Proving a whole tag, byte for byte, against its manifest and indexes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.errors import CheckpointError, DigestMismatch, MalformedFile, PartNotFound
from nxd_ckpt.formats import crc32
from nxd_ckpt.layout import names
from nxd_ckpt.runtime.opening import OpenTag, choose_tag, open_complete_tag
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import open_storage

_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Verification:
    """What was read and what is wrong with it. ``problems`` name file, expected and found; empty means proved."""

    tag: str
    files: int
    nbytes: int
    problems: tuple[str, ...]


def verify_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> Verification:
    """Read every file of a tag that nxd_ckpt wrote, by default the latest, and compare size and CRC-32.

    Headers, padding and directories are covered too, unlike by a load, which proves what it reads. Extra memory: one
    chunk of 16 MiB.

    Raises:
        CheckpointNotFound: no such tag.
        PartNotFound: it has no manifest: neuronx_distributed wrote it, and only ``load_checkpoint`` can prove its
            tensors.
    """
    storage = open_storage(path)
    opened = open_complete_tag(storage, choose_tag(storage, tag))
    if opened.manifest is None:
        raise PartNotFound(f"{opened.where} has no manifest of nxd_ckpt's: there are no digests to compare with")
    files, nbytes = 0, 0
    problems: list[str] = []
    for file, entry in _entries(opened, problems):
        files, nbytes = files + 1, nbytes + entry.nbytes
        try:
            _prove(storage, f"{opened.tag}/{file}", entry)
        except CheckpointError as error:
            problems.append(str(error))
    return Verification(opened.tag, files, nbytes, tuple(problems))


def _entries(opened: OpenTag, problems: list[str]) -> Iterator[tuple[str, FileEntry]]:
    """Every file that any rank wrote; an index that cannot be trusted is a problem by itself."""
    for rank in range(opened.topology.world_size):
        try:
            index = opened.index(opened.topology.coordinates_of(rank))
        except CheckpointError as error:
            problems.append(str(error))
            continue
        yield from index.files.items()
    one = FileEntry(1, crc32.crc32(b"1"))
    yield names.MARKER, one
    yield names.DONE, one


def _prove(storage: Storage, key: str, entry: FileEntry) -> None:
    where = f"{storage.url}/{key}"
    try:
        size = storage.size(key)
    except FileNotFoundError as error:
        raise PartNotFound(f"{where} is missing") from error
    if size != entry.nbytes:
        raise MalformedFile(f"{where} has {size} bytes, expected {entry.nbytes}")
    found = 0
    memory = memoryview(bytearray(min(_CHUNK, size)))
    for offset in range(0, size, _CHUNK):
        part = memory[: min(_CHUNK, size - offset)]
        storage.read_into(key, offset, part)
        found = crc32.crc32(part, found)
    if found != entry.crc32:
        raise DigestMismatch(f"{where}: expected CRC-32 {entry.crc32:08x}, found {found:08x}")
