"""Which blocks of a tag's records are verified by now, and with what the others are to be compared.

A record is the bytes of one tensor in a file. An index has a digest for every block of it. Without an index there is
one digest for all of it: its blocks are then read in any order, for whoever wants parts of them, and the last decides.
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
    """What the bytes of one block are compared with: their own CRC-32, or as the ``segment``-th of a digest."""

    crc32: int | None = None
    digest: Digest | None = None
    segment: int = 0


class _Begun(NamedTuple):
    """A record whose blocks are compared all together, some of which have been read."""

    stub: TensorStub
    name: str
    digest: Digest
    missing: set[int]


class VerifiedRecords:
    """What is known of a tag's records. ``entries`` are what its indexes say, as far as it has any. By one thread."""

    def __init__(self, entries: Mapping[Record, TensorEntry]) -> None:
        self._entries = entries
        self._whole: set[Record] = set()
        self._blocks: set[tuple[Record, int]] = set()
        self._begun: dict[Record, _Begun] = {}

    def entry(self, stub: TensorStub) -> TensorEntry | None:
        """What an index says of the stub's record."""
        return self._entries.get(_record(stub))

    def is_whole(self, stub: TensorStub) -> bool:
        """Whether all of the record is verified, or will be by what was asked for."""
        return _record(stub) in self._whole

    def claim_whole(self, stub: TensorStub) -> None:
        """Say that all of the record will be read and compared."""
        self._whole.add(_record(stub))

    def claim(self, stub: TensorStub, block: int, count: int, name: str, where: str) -> Expected | None:
        """What to compare the block with; whoever asks reads all of it. None where nothing is to be compared, or was.

        ``count`` is how many blocks the record has. ``name`` and ``where`` say in errors what tensor this is, and which
        bytes.
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
        """What is missing to verify the records that have been begun: a stub of each, block by block, and its name."""
        for one in self._begun.values():
            yield from ((one.stub, block, one.name) for block in sorted(one.missing))


def _record(stub: TensorStub) -> Record:
    return stub.file, stub.storage.offset
