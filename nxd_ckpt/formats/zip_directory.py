"""The zip container of torch files: stored (uncompressed) records, a directory, an end mark.

No size or offset depends on a digest, so that a file's layout is known before its contents. The directory of an
untrusted file is read with few reads. Source: PKWARE's APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from nxd_ckpt.core import limits
from nxd_ckpt.core.document import HEAD, instead_of_data
from nxd_ckpt.core.limits import check_count, shown
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.tensors import StorageSpan

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


class Record(NamedTuple):
    """One stored file of the archive: the offsets of its header and of its ``nbytes`` of data.

    ``crc32`` is None if unknown: not computed yet, or 0 in a file, which torch uses for "not recorded".
    """

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
    size = record.nbytes
    sizes = b""
    if size >= FULL32:
        size = FULL32
        sizes = struct.pack("<2H2Q", ZIP64, 16, record.nbytes, record.nbytes)
    room = record.offset - record.header_offset - LOCAL.size - len(record.name) - len(sizes)
    padding = struct.pack("<2H", PADDING, room - 4).ljust(room, b"\0") if room else b""
    name = record.name.encode("ascii")
    extra = sizes + padding
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
    count = len(records)
    offset = _directory_offset(records)
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
    size = min(record.nbytes, FULL32)
    version = 45 if wide else 20
    name = record.name.encode("ascii")
    fixed = (version, version, 0, STORED, 0, NEW_YEAR_1980, crc32, size, size, len(name), len(extra))
    offset = min(record.header_offset, FULL32)
    return CENTRAL.pack(CENTRAL_MARK, *fixed, 0, 0, 0, 0, offset) + name + extra


Pread = Callable[[int, int], bytes]
"""(offset, nbytes) -> these bytes of a file; fewer only at its end."""

TAIL = 64 * 2**10
"""Bytes read from the end of a file at first: the end mark and most directories."""

_DIRECTORY = 512 * limits.RECORDS

ENCRYPTED, DIGEST_FOLLOWS = 0x1, 0x8


def read_records(pread: Pread, size: int, file: str) -> list[Record]:
    """Return every record of the archive, by position. Reads the end, the directory, and headers in batches.

    Verifies that the directory ends the file, and that every record is stored plainly, lies before the directory,
    agrees with its own header and overlaps no other. Raises MalformedFile, naming ``file`` and the fault.
    """
    begin = max(0, size - TAIL)
    pread = remembering(pread, begin, _exactly(pread, begin, size - begin, file))
    end, count, offset, nbytes = _find_directory(pread, size, file)
    check_count(count, limits.RECORDS, f"{file}: records")
    check_count(nbytes, _DIRECTORY, f"{file}: bytes of its directory")
    if offset + nbytes != end:
        raise malformed(file, f"its directory of {nbytes} bytes at {offset} does not end where it should, at {end}")
    raw = _exactly(pread, offset, nbytes, file)
    entries = sorted(_parse_entries(raw, count, file))
    records = []
    before = 0
    for entry, window in zip(entries, _headers(pread, entries, offset, file), strict=True):
        record = _located(entry, *window, file)
        if record.header_offset < before or record.end > offset:
            raise malformed(file, f"record {shown(record.name)} overlaps another, or the directory")
        records.append(record)
        before = record.end
    return records


def has_digests(end: bytearray, spans: Iterable[StorageSpan]) -> bool:
    """Return whether the end of a file, with its directory, has size and digest of each of these records, in order."""
    at = 0
    for span in spans:
        size = min(span.nbytes, FULL32)
        at = end.find(struct.pack("<3I", span.crc32 or 0, size, size), at) + 1
        if not at:
            return False
    return True


def remembering(pread: Pread, begin: int, data: bytes) -> Pread:
    """Wrap ``pread`` to return bytes inside ``data``, the file's bytes from ``begin`` on, from memory."""

    def remembered(offset: int, nbytes: int) -> bytes:
        if begin <= offset and offset + nbytes <= begin + len(data):
            return data[offset - begin : offset - begin + nbytes]
        return pread(offset, nbytes)

    return remembered


def malformed(file: str, what: str) -> MalformedFile:
    """Return the error for a damaged file."""
    return MalformedFile(f"{file}: {what}. The file is truncated or damaged: restore it, or load another tag")


def _exactly(pread: Pread, offset: int, nbytes: int, file: str) -> bytes:
    data = pread(offset, nbytes)
    if len(data) != nbytes:
        raise malformed(file, f"expected {nbytes} bytes at {offset}, found {len(data)}")
    return data


def _find_directory(pread: Pread, size: int, file: str) -> tuple[int, int, int, int]:
    """Return (required end of the directory, number of entries, offset, bytes)."""
    begin = max(0, size - TAIL)
    tail = _exactly(pread, begin, size - begin, file)
    at = tail.rfind(END_MARK)
    if at < 0 or at + END.size > len(tail):
        raise _not_a_zip(pread, size, file)
    _, disk, first_disk, on_disk, count, nbytes, offset, comment = END.unpack_from(tail, at)
    if begin + at + END.size + comment != size:
        raise malformed(file, f"{size - begin - at - END.size} bytes follow its end mark, expected {comment}")
    end = begin + at
    locator = at - LOCATOR64.size
    if locator >= 0 and tail.startswith(LOCATOR64_MARK, locator):
        end = LOCATOR64.unpack_from(tail, locator)[2]
        if end + END64.size != begin + locator:
            raise malformed(file, f"its 64-bit end mark is not where it should be, at {begin + locator - END64.size}")
        wide = END64.unpack(_exactly(pread, end, END64.size, file))
        mark, (disk, first_disk, on_disk, count, nbytes, offset) = wide[0], wide[4:]
        if mark != END64_MARK:
            raise malformed(file, f"no 64-bit end mark at {end}")
    if disk or first_disk or on_disk != count:
        raise malformed(file, "it is one part of a split archive")
    return end, count, offset, nbytes


def _not_a_zip(pread: Pread, size: int, file: str) -> MalformedFile:
    start = pread(0, min(size, 4))
    if start == LOCAL_MARK:
        return malformed(file, "it begins like a torch file but has no end mark")
    other = instead_of_data(pread(0, min(size, HEAD)))
    if other is not None:
        return MalformedFile(f"{file}: expected a torch zip file, found {other}")
    return malformed(file, f"expected a torch zip file, found {size} bytes beginning with {start!r}")


_Entry = tuple[int, str, bytes, int, int]
"""Offset of the local header, name, the name's bytes, nbytes, CRC-32. A plain tuple, since there may be very many."""


def _parse_entries(raw: bytes, count: int, file: str) -> Iterator[_Entry]:
    at = 0
    names: set[str] = set()
    for _ in range(count):
        if not raw.startswith(CENTRAL_MARK, at) or at + CENTRAL.size > len(raw):
            raise malformed(file, f"its directory breaks off after {len(names)} of {count} entries")
        fields = CENTRAL.unpack_from(raw, at)
        _, _, _, flags, method, _, _, crc32, packed, nbytes, name_length, extra_length, comment, *_, offset = fields
        at += CENTRAL.size
        raw_name = raw[at : at + name_length]
        at += name_length + extra_length + comment
        name = raw_name.decode("utf-8", "backslashreplace")
        if FULL32 in (packed, nbytes, offset):
            extra = raw[at - extra_length - comment : at - comment]
            packed, nbytes, offset = _widened(extra, [nbytes, packed, offset], name, file)
        if method != STORED or packed != nbytes or flags & ENCRYPTED:
            raise MalformedFile(
                f"{file}: its record {shown(name)} is compressed or encrypted, as torch.save writes none: it is "
                "TorchScript, whose state dict can be saved, or another zip archive"
            )
        if name in names:
            raise malformed(file, f"record {shown(name)} occurs twice")
        names.add(name)
        yield offset, name, raw_name, nbytes, crc32
    if at != len(raw):
        raise malformed(file, f"its directory of {count} entries is {len(raw)} bytes long, expected {at}")


def _widened(extra: bytes, numbers: list[int], name: str, file: str) -> Iterator[int]:
    """Yield ``numbers``, with those saturated at 32 bits replaced from the 64-bit extra field, in order."""
    field = _extra_field(extra)
    wide = struct.iter_unpack("<Q", field[: len(field) // 8 * 8])
    for number in numbers:
        (value,) = next(wide, (None,)) if number == FULL32 else (number,)
        if value is None:
            raise malformed(file, f"record {shown(name)} lacks its 64-bit size or offset")
        yield value


def _extra_field(extra: bytes) -> bytes:
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == ZIP64:
            return extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    return b""


_MERGE = 64 * 2**10
_WINDOW = 2**20


def _headers(pread: Pread, entries: Sequence[_Entry], limit: int, file: str) -> Iterator[tuple[bytes, int]]:
    """Yield bytes of the file, and the offset in them of each entry's local header, up to its name.

    Headers no further apart than ``_MERGE`` share a read.
    """
    begin = 0
    window = b""
    for index, (start, name, raw_name, _, _) in enumerate(entries):
        end = start + LOCAL.size + len(raw_name)
        if end > limit:
            raise malformed(file, f"the header of record {shown(name)} at {start} is not in the file")
        if end > begin + len(window):
            begin = start
            for following in range(index + 1, len(entries)):
                next_start, _, next_name, _, _ = entries[following]
                reach = next_start + LOCAL.size + len(next_name)
                if next_start - end > _MERGE or reach - begin > _WINDOW or reach > limit:
                    break
                end = reach
            window = _exactly(pread, begin, end - begin, file)
        yield window, start - begin


def _located(entry: _Entry, window: bytes, at: int, file: str) -> Record:
    """Return the record of a directory entry; its data offset comes from the local header, which must agree."""
    start, name, raw_name, nbytes, crc32 = entry
    mark, _, flags, method, _, _, digest, _, length, name_length, extra_length = LOCAL.unpack_from(window, at)
    agrees = mark == LOCAL_MARK and method == STORED and window.startswith(raw_name, at + LOCAL.size)
    if not flags & DIGEST_FOLLOWS:
        agrees = agrees and digest == crc32 and length in (FULL32, nbytes)
    if not agrees or name_length != len(raw_name) or flags & ENCRYPTED:
        raise malformed(file, f"record {shown(name)} and its header at {start} differ")
    offset = start + LOCAL.size + name_length + extra_length
    return Record(name, start, offset, nbytes, crc32 if crc32 or not nbytes else None)
