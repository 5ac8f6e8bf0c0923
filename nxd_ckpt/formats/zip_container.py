"""The zip container of torch files: stored (uncompressed) records, a directory, an end mark.

No size or offset depends on a digest, so that a file's layout is known before its contents.
Source: PKWARE's APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")
LOCAL_MARK, CENTRAL_MARK, END_MARK = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64_MARK, LOCATOR64_MARK = b"PK\x06\x06", b"PK\x06\x07"

FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
STORED = 0
NEW_YEAR_1980 = 0x21
ZIP64, PADDING = 0x0001, 0x4246  # ids of extra fields; torch pads under this one, too


@dataclass(frozen=True)
class Record:
    """One stored file of the archive: the offsets of its header and of its ``nbytes`` of data.

    ``crc32`` is None if unknown: not computed yet, or 0 in a file, which torch uses for "not recorded".
    """

    __slots__ = ("crc32", "header_offset", "name", "nbytes", "offset")

    name: str
    header_offset: int
    offset: int
    nbytes: int
    crc32: int | None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def place(name: str, nbytes: int, cursor: int, alignment: int) -> Record:
    """Return the record of ``name`` with its header at ``cursor`` and its data at the next fitting multiple."""
    header = LOCAL.size + len(name) + (20 if nbytes >= FULL32 else 0)
    offset = -(-(cursor + header) // alignment) * alignment
    if 0 < offset - cursor - header < 4:  # an extra field takes four bytes itself
        offset += alignment
    return Record(name, cursor, offset, nbytes, None)


def local_header(record: Record, crc32: int) -> bytes:
    """Return everything from the record's header offset to its data, padding included."""
    size, sizes = record.nbytes, b""
    if size >= FULL32:
        size, sizes = FULL32, struct.pack("<2H2Q", ZIP64, 16, record.nbytes, record.nbytes)
    room = record.offset - record.header_offset - LOCAL.size - len(record.name) - len(sizes)
    padding = struct.pack("<2H", PADDING, room - 4).ljust(room, b"\0") if room else b""
    name, extra = record.name.encode("ascii"), sizes + padding
    version = 45 if sizes else 20
    fixed = (version, 0, STORED, 0, NEW_YEAR_1980, crc32, size, size, len(name), len(extra))
    return LOCAL.pack(LOCAL_MARK, *fixed) + name + extra


def _wide(record: Record) -> list[int]:
    """Return the numbers of the directory entry that need 64 bits, in the extra field's order."""
    sizes = [record.nbytes] * 2 if record.nbytes >= FULL32 else []
    return sizes + ([record.header_offset] if record.header_offset >= FULL32 else [])


def directory_nbytes(records: Sequence[Record]) -> int:
    """Return the length of `directory` for ``records``; needs no digest."""
    entries = 0
    for record in records:
        wide = len(_wide(record))
        entries += CENTRAL.size + len(record.name) + (4 + 8 * wide if wide else 0)
    return entries + END.size + (END64.size + LOCATOR64.size if _needs64(records, entries) else 0)


def _directory_offset(records: Sequence[Record]) -> int:
    return records[-1].end


def _needs64(records: Sequence[Record], nbytes: int) -> bool:
    return len(records) >= FULL16 or _directory_offset(records) >= FULL32 or nbytes >= FULL32


def directory(records: Sequence[Record], crcs: Sequence[int]) -> bytes:
    """Return the central directory and end marks that follow the data of the last record."""
    entries = b"".join(map(_entry, records, crcs))
    count, offset = len(records), _directory_offset(records)
    numbers = (min(count, FULL16), min(count, FULL16), min(len(entries), FULL32), min(offset, FULL32))
    end = END.pack(END_MARK, 0, 0, *numbers, 0)
    if not _needs64(records, len(entries)):
        return entries + end
    wide = (END64.size - 12, 45, 45, 0, 0, count, count, len(entries), offset)
    locator = LOCATOR64.pack(LOCATOR64_MARK, 0, offset + len(entries), 1)
    return entries + END64.pack(END64_MARK, *wide) + locator + end


def _entry(record: Record, crc32: int) -> bytes:
    wide = _wide(record)
    extra = struct.pack(f"<2H{len(wide)}Q", ZIP64, 8 * len(wide), *wide) if wide else b""
    size, version, name = min(record.nbytes, FULL32), 45 if wide else 20, record.name.encode("ascii")
    fixed = (version, version, 0, STORED, 0, NEW_YEAR_1980, crc32, size, size, len(name), len(extra))
    offset = min(record.header_offset, FULL32)
    return CENTRAL.pack(CENTRAL_MARK, *fixed, 0, 0, 0, 0, offset) + name + extra
