"""A tar archive as a storage: its members are the files. Only read, by ranges, in its place.

The first member of a packed archive is a list of all, which spares readers a request per header, `MEMBER_LIST`:
``{"format_version": 1, "members": [[name, offset, bytes, time], ...]}`` in order. An offset is that of the member's
bytes, from the end of the list's own member on. Between the bytes of two members there is one header and nothing else,
and after the last one the archive's end: any other list is ignored. Each member's header is compared with the list.
"""

from __future__ import annotations

import errno
import io
import math
import os
import re
import tarfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from nxd_ckpt.core import document
from nxd_ckpt.core.limits import DOCUMENT, MEMBER_LENGTH, MESSAGE, check_count
from nxd_ckpt.core.names import DONE, MANIFEST, MARKER
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import DirEntry, Reader, ReadOnlyStorage, Storage, checked_length

MEMBER_LIST = ".nxd_ckpt/members.json"
LONGEST_HEADER = 2**20
"""Maximum bytes of a header: names and times need a few hundred, padding to pages up to 4096."""
END = 2 * tarfile.BLOCKSIZE
"""Minimum bytes of zeros at the end of an archive."""
_VERSION = 1


class Member(NamedTuple):
    """A file in the archive: the offset of its bytes, their number, and its time.

    ``header`` is the number of bytes of its header before them, if that was not compared yet; else 0.
    """

    offset: int
    nbytes: int
    time: float
    header: int = 0


def dump_members(members: Iterable[tuple[str, int, int, float]]) -> bytes:
    """Return the list of (name, offset, bytes, time) in the archive's form."""
    return document.plain({"format_version": _VERSION, "members": list(members)}).encode()


def load_members(data: bytes, begin: int, size: int) -> dict[str, Member]:
    """Return the members in a list, of an archive of ``size`` bytes whose list's own member ends at ``begin``.

    Raises ValueError if it is not such a list, or not of this archive.
    """
    members: dict[str, Member] = {}
    end = begin
    fields = document.whole(data)
    lines = fields.get("members") if isinstance(fields, dict) and fields.get("format_version") == _VERSION else None
    if not isinstance(lines, list) or not lines:
        raise ValueError(f"expected members, in format {_VERSION}")
    for line in lines:
        name, member = _member(line, begin, end)
        if name in members:
            raise ValueError(f"{name!r} twice")
        members[name] = member
        end = member.offset + member.nbytes + -member.nbytes % tarfile.BLOCKSIZE
    if end + END != size:
        raise ValueError(f"the archive has {size} bytes, expected {end + END}")
    return members


def _member(line: Any, begin: int, end: int) -> tuple[str, Member]:
    """Return one line of the list; the member before it ends at ``end``."""
    if type(line) is not list or [type(item) for item in line] != [str, int, int, float]:
        raise ValueError(f"expected [name, offset, bytes, time], found {line!r:.100}")
    name, offset, nbytes, time = line
    header = begin + offset - end
    if nbytes < 0 or header % tarfile.BLOCKSIZE or not 0 < header <= LONGEST_HEADER or not math.isfinite(time):
        raise ValueError(f"{name!r} cannot lie at byte {offset}")
    return name, Member(begin + offset, nbytes, time, header)


def is_header_of(header: bytes, name: str, member: Member) -> bool:
    """Return whether ``header``, the bytes before a member's own, is that of the file ``name``, with the list's length.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(header), mode="r:") as archive:
            info = archive.next()
    except (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError):
        return False
    if info is None or not info.isreg() or info.issparse():
        return False
    actual = (info.name.removeprefix("./"), info.offset_data, info.size, float(info.mtime))
    return actual == (name, len(header), member.nbytes, member.time)


_AHEAD = 64 * 2**10
"""Bytes to read for a header: those of small members come along."""
_OF_TARFILE = (ValueError, LookupError, OverflowError, RecursionError)
"""Errors of tarfile for invalid numbers, headers of headers, and truncated lists of pieces."""
_LONGEST_LIST = 256 * 2**20
"""Maximum bytes of a list of members: about a hundred for each."""


def find_members(reader: Reader, size: int, where: str) -> dict[str, Member]:
    """Return the files of an archive of ``size`` bytes, by name.

    Raises:
        MalformedFile: truncated, damaged, or with members that no checkpoint has; names the member.
    """
    file = _Headers(reader, size)
    return _listed(file, where) or _below_its_name(_walked(file, where), where)


def _below_its_name(members: dict[str, Member], where: str) -> dict[str, Member]:
    """Return the members; of an archive of a tag's content (``tar -C step_3 .``) below a tag of the archive's name."""
    if DONE not in members or members.keys().isdisjoint((MARKER, MANIFEST)):
        return members
    tag = re.sub(r"\.(tar(\.\w+)?|t\w+)$", "", where.rpartition("/")[2]).lstrip(".") or "tag"
    return {f"{tag}/{name}": member for name, member in members.items()}


def _listed(file: _Headers, where: str) -> dict[str, Member]:
    """Return the members from the archive's list; none if there is no list that fits.

    The archive's end is checked: a list that was packed again with other files does not belong to this archive.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            info = archive.next()
            if info is None or info.name != MEMBER_LIST or info.size > min(file.size, _LONGEST_LIST):
                return {}
            begin = info.offset_data + info.size + -info.size % tarfile.BLOCKSIZE
            members = load_members(file.bytes_at(info.offset_data, info.size), begin, file.size)
    except (tarfile.TarError, *_OF_TARFILE):
        return {}
    name, last = list(members.items())[-1]
    header = bytearray(last.header)
    end = bytearray(END)
    file.reader.read_ranges([(last.offset - last.header, memoryview(header)), (file.size - END, memoryview(end))])
    if any(end) or not is_header_of(bytes(header), name, last):
        return {}
    for name in members:
        _check_name(name, name, where)
    _refuse_files_as_folders(members, where)
    members[name] = last._replace(header=0)
    return members


def _walked(file: _Headers, where: str) -> dict[str, Member]:
    """Return the members from the archive's headers."""
    members: dict[str, Member] = {}
    last = ""
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for info in archive:
                name = last = _checked(info, where)
                if info.isdir() or name == MEMBER_LIST:
                    continue
                if name in members:
                    raise MalformedFile(f"{where}: two members are called {name!r}, as in no packed checkpoint")
                if info.offset_data + info.size > file.size:
                    raise _truncated(where, f"{name} has {info.size} bytes from {info.offset_data} on", file.size)
                members[name] = Member(info.offset_data, info.size, float(info.mtime))
            end = archive.offset
    except tarfile.TarError as error:
        is_cut = bool(last) or file.size < tarfile.BLOCKSIZE  # the name in a header that is cut off would be a text
        other = None if is_cut else document.instead_of_data(file.bytes_at(0, min(document.HEAD, file.size)))
        if other is not None:
            raise MalformedFile(f"{where}: expected a tar archive, found {other}") from error
        raise _truncated(where, f"after {last or 'its beginning'}: {error}", file.size) from error
    except _OF_TARFILE as error:
        raise MalformedFile(f"{where}: not a tar archive after {last or 'its beginning'}: {error}") from error
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile treats unreadable headers as the end
        raise _truncated(where, f"{last} is followed by neither a member nor the archive's end", file.size)
    _refuse_files_as_folders(members, where)
    return members


def _checked(info: tarfile.TarInfo, where: str) -> str:
    """Return the member's name. Raises MalformedFile for anything but a file or directory inside the archive."""
    name = info.name.removeprefix("./")
    if not (info.isreg() or info.isdir()) or info.issparse():
        raise MalformedFile(f"{where}: {name!r} is a link, a device or a sparse file; expected plain files only")
    if info.size < 0:
        raise MalformedFile(f"{where}: {name!r} has {info.size} bytes, expected none or more; restore it from a copy")
    if name not in ("", "."):
        _check_name(name, info.name, where)
    return name


def _check_name(name: str, shown: str, where: str) -> None:
    check_count(len(name), MEMBER_LENGTH, f"{where}: characters of the name of the member {name[:MESSAGE]!r}...")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise MalformedFile(f"{where}: the member {shown!r} lies outside of the archive, or has no plain name")


def _refuse_files_as_folders(names: Iterable[str], where: str) -> None:
    files = set(names)
    for name in files:
        parent = name.rpartition("/")[0]
        while parent:
            if parent in files:
                raise MalformedFile(f"{where}: {parent!r} is a file, and {name!r} lies below it")
            parent = parent.rpartition("/")[0]


def _truncated(where: str, what: str, size: int) -> MalformedFile:
    return MalformedFile(
        f"{where}: {what}, but the archive has {size} bytes: truncated or damaged; restore it from a copy"
    )


class _Headers(io.RawIOBase):
    """The archive as tarfile reads it: headers, a window at a time."""

    def __init__(self, reader: Reader, size: int) -> None:
        self.reader = reader
        self.size = size
        self._at = 0
        self._begin = 0
        self._window = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if base + offset < 0:  # a header can ask for that
            raise ValueError(f"a header at byte {base + offset}")
        self._at = base + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        if not 0 <= count <= LONGEST_HEADER:
            raise ValueError(f"a header of {count} bytes, at most {LONGEST_HEADER} are allowed")
        return b"".join(self._pieces(count))

    def bytes_at(self, offset: int, count: int) -> bytes:
        """Return any bytes of the archive, from the window if they are in it. Raises ValueError past its end."""
        if offset + count > self.size:
            raise ValueError(f"{count} bytes at byte {offset}, the archive has {self.size}")
        start = offset - self._begin
        if 0 <= start and start + count <= len(self._window):
            return self._window[start : start + count]
        memory = bytearray(count)
        self.reader.read_ranges([(offset, memoryview(memory))])
        return bytes(memory)

    def _pieces(self, count: int) -> Iterator[bytes]:
        stop = min(self._at + count, self.size)
        while self._at < stop:
            if not self._begin <= self._at < self._begin + len(self._window):
                memory = bytearray(min(_AHEAD, self.size - self._at))
                self.reader.read_ranges([(self._at, memoryview(memory))])
                self._begin = self._at
                self._window = bytes(memory)
            piece = self._window[self._at - self._begin : stop - self._begin]
            self._at += len(piece)
            yield piece


SUFFIX = ".tar"


class ArchiveFile:
    """The file from which the bytes of an archive are read: ``key`` of ``inner``."""

    def __init__(self, inner: Storage, key: str) -> None:
        self._inner = inner
        self._key = key
        self.url: str = f"{inner.url.rstrip('/')}/{key}"
        self.renames: bool = inner.renames
        self.concurrency: int = inner.concurrency
        self.read_nbytes: int = inner.read_nbytes

    def size(self) -> int:
        return self._inner.size(self._key)

    def open(self) -> Reader:
        return self._inner.open(self._key)


class ArchiveStorage(ReadOnlyStorage):
    """The members of an archive. One reader per working thread serves all members: in a store, opening costs a request.

    Raises MalformedFile at the first use of an archive that is damaged or hostile; names the member.
    """

    def __init__(self, file: ArchiveFile) -> None:
        self._file = file
        self.url: str = file.url
        self.renames: bool = file.renames
        self.concurrency: int = file.concurrency
        self.read_nbytes: int = file.read_nbytes
        self._idle: list[Reader] = []
        weakref.finalize(self, _close, self._idle)

    @cached_property
    def _members(self) -> dict[str, Member]:
        reader = self._file.open()
        try:
            members = find_members(reader, self._file.size(), self.url)
        except BaseException:
            reader.close()
            raise
        self._idle.append(reader)
        return members

    @cached_property
    def _folders(self) -> Mapping[str, Mapping[str, DirEntry]]:
        """Entries directly below each directory, by name."""
        folders: dict[str, dict[str, DirEntry]] = {"": {}}
        for key in self._members:
            is_dir = False
            while key:
                parent, _, name = key.rpartition("/")
                folders.setdefault(parent, {}).setdefault(name, DirEntry(name, is_dir))
                key = parent
                is_dir = True
        return folders

    def _member(self, key: str) -> Member:
        try:
            return self._members[key]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such member", f"{self.url}/{key}") from None

    def read(self, key: str, limit: int = DOCUMENT) -> bytes:
        data = bytearray(checked_length(self._member(key).nbytes, limit, f"{self.url}/{key}"))
        self.read_into(key, 0, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.read_member(key, [(offset, memoryview(buffer).cast("B"))])

    def open(self, key: str) -> Reader:
        self._member(key)
        return _MemberReader(self, key)

    def read_member(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each memory from its offset in a member on. From any thread.

        Raises MalformedFile if the member's header, which is read along the first time, does not match the list.
        """
        member = self._member(key)
        for offset, memory in ranges:
            missing = offset + len(memory) - member.nbytes
            if missing > 0:
                raise EOFError(f"{self.url}/{key}: {missing} bytes missing at byte {member.nbytes}")
        reads = [(member.offset + offset, memory) for offset, memory in ranges]
        header = bytearray(member.header)
        if header:
            reads.insert(0, (member.offset - member.header, memoryview(header)))
        self._read(reads)
        if header and not is_header_of(bytes(header), key, member):
            raise MalformedFile(
                f"{self.url}: the header of {key} does not match the archive's list of members: damaged or changed; "
                "restore it from a copy"
            )
        self._members[key] = member._replace(header=0)

    def _read(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        try:
            reader = self._idle.pop()
        except IndexError:
            reader = self._file.open()
        try:
            reader.read_ranges(ranges)
        except BaseException:
            reader.close()  # one that failed is not used again
            raise
        self._idle.append(reader)

    def size(self, key: str) -> int:
        return self._member(key).nbytes

    def is_dir(self, key: str) -> bool:
        return key in self._folders

    def is_file(self, key: str) -> bool:
        return key in self._members

    def list(self, key: str = "") -> list[DirEntry]:
        return sorted(self._folders.get(key, {}).values())

    def time(self, key: str) -> float:
        return self._member(key).time

    def refuse(self, key: str) -> NoReturn:
        raise OSError(errno.EROFS, "an archive is read-only: copy the tag out of it first (nxd-ckpt cp)", self.url)


class _MemberReader(NamedTuple):
    """A reader that keeps nothing open: the archive's own readers serve all members, one after the other."""

    archive: ArchiveStorage
    key: str

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.archive.read_member(self.key, ranges)

    def close(self) -> None:
        """Do nothing: nothing is kept open."""


def _close(readers: list[Reader]) -> None:
    while readers:
        readers.pop().close()
