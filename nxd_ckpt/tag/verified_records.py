"""Verified blocks of a tag's records, and the digests that the others must have.

A record is the bytes of one tensor in a file. An index has a digest for every block of it. Without an index there is
one digest for all of it: its blocks are then read in any order, as parts of them are requested, and the last decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nxd_ckpt.core.manifest import TensorEntry
from nxd_ckpt.formats.tensors import TensorStub
from nxd_ckpt.tag.verification import Digest

Record = tuple[str, int]
"""The file's key, and the offset of the record in it."""


class Expected(NamedTuple):
    """Digest of one block: its own CRC-32, or the ``segment``-th of a longer digest."""

    crc32: int | None = None
    digest: Digest | None = None
    segment: int = 0


class _Begun(NamedTuple):
    """A record with one digest for all its blocks, some of which have been read."""

    stub: TensorStub
    name: str
    digest: Digest
    missing: set[int]


class VerifiedRecords:
    """State of a tag's records. ``entries`` are those of its indexes, if it has any. For one thread."""

    def __init__(self, entries: Mapping[Record, TensorEntry]) -> None:
        self._entries = entries
        self._whole: set[Record] = set()
        self._blocks: set[tuple[Record, int]] = set()
        self._begun: dict[Record, _Begun] = {}

    def entry(self, stub: TensorStub) -> TensorEntry | None:
        """Return the index entry of the stub's record."""
        return self._entries.get(_record(stub))

    def is_whole(self, stub: TensorStub) -> bool:
        """Return whether all of the record is verified, or will be by earlier requests."""
        return _record(stub) in self._whole

    def claim_whole(self, stub: TensorStub) -> None:
        """Mark that all of the record will be read and compared."""
        self._whole.add(_record(stub))

    def claim(self, stub: TensorStub, block: int, count: int, name: str, where: str) -> Expected | None:
        """Return the digest to compare the block with.

        The caller must read all of it. None if there is none, or it was claimed.

        ``count`` is the record's number of blocks. ``name`` and ``where`` describe tensor and bytes in errors.
        """
        record = _record(stub)
        if record in self._whole or (record, block) in self._blocks:
            return None
        entry, crc = self._entries.get(record), stub.storage.crc32
        if entry is None and crc is None:
            return None
        self._blocks.add((record, block))
        if entry is not None:
            return Expected(entry.crc32[block])
        if record not in self._begun:
            digest = Digest(where, crc or 0, count)
            self._begun[record] = _Begun(stub, name, digest, set(range(count)))
        begun = self._begun[record]
        begun.missing.discard(block)
        return Expected(None, begun.digest, block)

    def unread(self) -> Iterator[tuple[TensorStub, int, str]]:
        """Yield the unread blocks of records that have been begun: a stub, the block, and the tensor's name."""
        for begun in self._begun.values():
            yield from ((begun.stub, block, begun.name) for block in sorted(begun.missing))


def _record(stub: TensorStub) -> Record:
    return stub.file, stub.storage.offset
