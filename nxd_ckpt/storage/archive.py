"""A tar archive as a storage: its members are the files. Only read, by ranges, without unpacking it.

Nothing in an archive is trusted: one with links, devices, sparse files, two members of a name, or names that lead out
of it is refused as a whole, and so is one that does not end as archives do.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import NamedTuple, NoReturn

from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import Entry, Reader, Storage, Writer

SUFFIX = ".tar"
COMPRESSED = (".tar.zst", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

_AHEAD = 64 * 2**10
"""Bytes that are read for a header: those of small members come along."""
_LONGEST = 2**20
"""Bytes that a header may have: names and times need a few hundred, padding to pages up to 4096."""


class Member(NamedTuple):
    """A file in the archive: where its bytes begin, how many there are, and its time."""

    offset: int
    nbytes: int
    time: float


class ArchiveStorage:
    """The members of the archive ``key`` of ``inner``.

    Raises MalformedFile at the first use of an archive that is damaged or hostile; names the member.
    """

    def __init__(self, inner: Storage, key: str) -> None:
        self._inner, self._key = inner, key
        self.url = f"{inner.url.rstrip('/')}/{key}"
        self.renames, self.concurrency = inner.renames, inner.concurrency

    @cached_property
    def _members(self) -> Mapping[str, Member]:
        size = self._inner.size(self._key)
        with closing(self._inner.open(self._key)) as reader:
            return read_members(reader, size, self.url)

    @cached_property
    def _folders(self) -> Mapping[str, Mapping[str, Entry]]:
        """What is directly below each directory, by name."""
        found: dict[str, dict[str, Entry]] = {"": {}}
        for key in self._members:
            is_dir = False
            while key:
                parent, _, name = key.rpartition("/")
                found.setdefault(parent, {}).setdefault(name, Entry(name, is_dir))
                key, is_dir = parent, True
        return found

    def _member(self, key: str) -> Member:
        try:
            return self._members[key]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such member", f"{self.url}/{key}") from None

    def read(self, key: str) -> bytes:
        data = bytearray(self._member(key).nbytes)
        self.read_into(key, 0, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with closing(self.open(key)) as reader:
            reader.read_ranges([(offset, memoryview(buffer).cast("B"))])

    def open(self, key: str) -> Reader:
        member = self._member(key)
        return _MemberReader(self._inner.open(self._key), member, f"{self.url}/{key}")

    def size(self, key: str) -> int:
        return self._member(key).nbytes

    def is_dir(self, key: str) -> bool:
        return key in self._folders

    def is_file(self, key: str) -> bool:
        return key in self._members

    def list(self, key: str = "") -> list[Entry]:
        return sorted(self._folders.get(key, {}).values())

    def time(self, key: str) -> float:
        return self._member(key).time

    def write(self, key: str, data: bytes) -> None:
        self._refuse()

    def create(self, key: str, nbytes: int) -> Writer:
        self._refuse()

    def link_new(self, key: str, data: bytes) -> bool:
        self._refuse()

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        self._refuse()

    def make_dir(self, key: str) -> None:
        self._refuse()

    def sync_dir(self, key: str) -> None:
        self._refuse()

    def rename(self, source: str, target: str) -> None:
        self._refuse()

    def remove(self, key: str) -> None:
        self._refuse()

    def discard_unfinished(self, key: str) -> None:
        self._refuse()

    def set_time(self, key: str, seconds: float) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OSError(errno.EROFS, "an archive is only read: copy the tag out of it first (nxd-ckpt cp)", self.url)


class _MemberReader:
    def __init__(self, inner: Reader, member: Member, where: str) -> None:
        self._inner, self._member, self._where = inner, member, where

    def read_ranges(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for offset, memory in ranges:
            missing = offset + len(memory) - self._member.nbytes
            if missing > 0:
                raise EOFError(f"{self._where}: {missing} bytes missing at byte {self._member.nbytes}")
        self._inner.read_ranges([(self._member.offset + offset, memory) for offset, memory in ranges])

    def close(self) -> None:
        self._inner.close()


def read_members(reader: Reader, size: int, where: str) -> dict[str, Member]:
    """The files of an archive of ``size`` bytes, by name.

    Raises:
        MalformedFile: truncated, damaged, or with members that no checkpoint has; names the member.
    """
    found: dict[str, Member] = {}
    last = ""
    file = _Headers(reader, size)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for info in archive:
                name = last = _checked(info, where)
                if info.isdir():
                    continue
                if name in found:
                    raise MalformedFile(f"{where}: two members are called {name!r}; no checkpoint was packed so")
                if info.offset_data + info.size > size:
                    raise _truncated(where, f"{name} has {info.size} bytes from {info.offset_data} on", size)
                found[name] = Member(info.offset_data, info.size, float(info.mtime))
            end = archive.offset
    except tarfile.TarError as error:
        raise _truncated(where, f"after {last or 'its beginning'}: {error}", size) from error
    except (ValueError, OverflowError, RecursionError) as error:  # numbers, or headers of headers
        raise MalformedFile(f"{where}: not a tar archive after {last or 'its beginning'}: {error}") from error
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile takes what it cannot read for the end
        raise _truncated(where, f"{last} is followed by neither a member nor the archive's end", size)
    _refuse_files_as_folders(found, where)
    return found


def _checked(info: tarfile.TarInfo, where: str) -> str:
    """The member's name. Raises MalformedFile for what is neither a file nor a directory inside the archive."""
    name = info.name.removeprefix("./")
    parts = name.split("/")
    if not (info.isreg() or info.isdir()) or info.issparse():
        raise MalformedFile(f"{where}: {name!r} is a link, a device or a sparse file; expected plain files only")
    if name not in ("", ".") and any(part in ("", ".", "..") for part in parts):
        raise MalformedFile(f"{where}: the member {info.name!r} lies outside of the archive, or has no plain name")
    return name


def _refuse_files_as_folders(found: Mapping[str, Member], where: str) -> None:
    for name in found:
        parent = name.rpartition("/")[0]
        while parent:
            if parent in found:
                raise MalformedFile(f"{where}: {parent!r} is a file, and {name!r} lies below it")
            parent = parent.rpartition("/")[0]


def _truncated(where: str, what: str, size: int) -> MalformedFile:
    return MalformedFile(
        f"{where}: {what}, but the archive has {size} bytes: truncated or damaged; restore it from a copy"
    )


class _Headers(io.RawIOBase):
    """What tarfile reads of the archive: headers, a window at a time."""

    def __init__(self, reader: Reader, size: int) -> None:
        self._reader, self._size, self._at = reader, size, 0
        self._begin, self._window = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        if not 0 <= count <= _LONGEST:
            raise ValueError(f"a header of {count} bytes, at most {_LONGEST} are allowed")
        return b"".join(self._pieces(count))

    def _pieces(self, count: int) -> Iterator[bytes]:
        stop = min(self._at + count, self._size)
        while self._at < stop:
            if not self._begin <= self._at < self._begin + len(self._window):
                memory = bytearray(min(_AHEAD, self._size - self._at))
                self._reader.read_ranges([(self._at, memoryview(memory))])
                self._begin, self._window = self._at, bytes(memory)
            piece = self._window[self._at - self._begin : stop - self._begin]
            self._at += len(piece)
            yield piece
