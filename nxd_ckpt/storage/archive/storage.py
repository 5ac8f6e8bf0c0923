"""A tar archive as a storage: its members are the files. Only read, by ranges, in its place."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn, Protocol

from nxd_ckpt.core.limits import DOCUMENT
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.archive.member_list import Member, is_header_of
from nxd_ckpt.storage.archive.members import find_members
from nxd_ckpt.storage.base import DirEntry, Reader, Storage, Writer, checked_length

SUFFIX = ".tar"


class ArchiveFile(Protocol):
    """The file from which the bytes of an archive are read."""

    @property
    def url(self) -> str: ...

    @property
    def renames(self) -> bool: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def read_nbytes(self) -> int: ...

    def size(self) -> int: ...

    def open(self) -> Reader: ...


@dataclass(frozen=True)
class StoredFile:
    """The file ``key`` of a storage, as an archive's file."""

    inner: Storage
    key: str

    @property
    def url(self) -> str:
        return f"{self.inner.url.rstrip('/')}/{self.key}"

    @property
    def renames(self) -> bool:
        return self.inner.renames

    @property
    def concurrency(self) -> int:
        return self.inner.concurrency

    @property
    def read_nbytes(self) -> int:
        return self.inner.read_nbytes

    def size(self) -> int:
        return self.inner.size(self.key)

    def open(self) -> Reader:
        return self.inner.open(self.key)


class ArchiveStorage:
    """The members of an archive. One reader per working thread serves all members: in a store, opening costs a request.

    Raises MalformedFile at the first use of an archive that is damaged or hostile; names the member.
    """

    def __init__(self, file: ArchiveFile) -> None:
        self._file = file
        self.url, self.renames = file.url, file.renames
        self.concurrency, self.read_nbytes = file.concurrency, file.read_nbytes
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
                key, is_dir = parent, True
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
