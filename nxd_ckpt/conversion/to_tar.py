"""Form "tar": a whole tag as one tar file, readable without unpacking, or compressed."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO

from nxd_ckpt.conversion.result import Converted
from nxd_ckpt.core import names
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.cp_files import TagFile, files_to_copy, verify
from nxd_ckpt.output.locations import locate_apart
from nxd_ckpt.output.output import Output
from nxd_ckpt.output.source import Source, open_source
from nxd_ckpt.storage.archive_storage import END, MEMBER_LIST, dump_members
from nxd_ckpt.storage.archive_unpacking import compressing, compression_of
from nxd_ckpt.storage.base import Storage, Writer, completed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.system import default_work_dir, sync_file
from nxd_ckpt.storage.transfer import StoredFile, copy_into
from nxd_ckpt.storage.urls import ARCHIVES, StrPath
from nxd_ckpt.tag.opened import OpenTag

_PIECE = 16 * 2**20


class CompressedWriter:
    """A writer of ``nbytes`` bytes in ascending order, which become the compressed file ``key`` of ``storage``.

    A directory gets them at once; a file for a store is first an unnamed file on this host (see TMPDIR).
    """

    def __init__(self, storage: Storage, key: str, kind: str, nbytes: int) -> None:
        self._storage = storage
        self._key = key
        self._file = _scratch(storage, key)
        self._stream = compressing(kind, self._file, nbytes)
        self._written = 0

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._written:
            raise ValueError(f"{self._key}: expected byte {self._written} next in a compressed file, found {offset}")
        self._stream.write(memoryview(data))
        self._written += len(data)

    def settle(self) -> None:
        """Do nothing: the bytes were already copied or compressed."""

    def close(self) -> None:
        """Finish the file. Raises OSError, like every write."""
        self._stream.close()
        self._file.flush()
        if not isinstance(self._storage, LocalStorage):
            self._send(self._storage)
        elif self._storage.durable:
            sync_file(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        with suppress(OSError, ValueError):
            self._file.close()

    def _send(self, storage: Storage) -> None:
        nbytes = self._file.tell()
        self._file.seek(0)
        writer = storage.create(self._key, nbytes)
        with completed(writer):
            for offset in range(0, nbytes, _PIECE):
                writer.write_at(offset, self._file.read(_PIECE))
                writer.settle()  # or memory would grow with the file


def _scratch(storage: Storage, key: str) -> BinaryIO:
    if isinstance(storage, LocalStorage):
        return storage.path(key).open("xb")
    return tempfile.TemporaryFile(dir=default_work_dir())


_PAGE = 4096
"""Members' bytes begin at a multiple of this, so that they can be written and read with direct IO, like files."""


def to_tar(source: Source, dst: StrPath, chosen: ConvertOptions) -> Converted:
    """Make ``dst``, a tar file with the unchanged files of a tag.

    Everything that reads a checkpoint takes the archive like a checkpoint directory, and reads only the ranges that it
    needs; a compressed one is first unpacked to the system's temporary directory. Any tar unpacks it. Every file is
    verified, files of NxD by the digests in them. The manifest and indexes come first, ``done`` last; the same tag
    gives the same bytes. Extra memory: 16 MiB, about 100 MiB with zstd. A compressed archive for a store goes through
    the system's temporary directory.

    Raises:
        UnsupportedState: the source is no tag.
        InvalidArgument: the archive's name has another end, or zstandard is missing.
        TagReplaced: the tag was removed, or saved again, while it was packed; nothing appears.
    """
    if not source.is_tag:
        raise UnsupportedState(
            f"{source.root.path} was written by {source.writer.value}: an archive holds the files of a tag as they "
            "are; convert it to a tag first, then that to an archive"
        )
    target = locate_apart(dst, source.place, chosen.written_with)
    if not target.name.endswith(ARCHIVES):
        raise InvalidArgument(f"output {target.path}: expected a name that ends in {' or '.join(ARCHIVES)}")
    compression_of(target.name)
    output = Output(target, chosen, None)
    opened = open_source(source.place)
    with opened.guarded():
        members = list(_members(opened))
    head = _list_of(opened.tag, members)
    members = [replace(member, at=member.at + len(head)) for member in members]
    nbytes = members[-1].end + END
    files = {member.file.name: member.file.nbytes for member in members}
    done = Converted(source.root.path, target.path, "tar", source.writer.value, nbytes, files=files)
    if chosen.dry_run:
        return done
    with output.filled(source, opened, nbytes, chosen.progress, verified=True) as written:
        _write(opened, head, members, nbytes, output, written)
    return replace(done, nbytes=output.storage.size(target.name))


@dataclass(frozen=True)
class _Member:
    """One file of the tag, and its header, which begins at byte ``at`` of the archive."""

    file: TagFile
    time: float
    header: bytes
    at: int

    @property
    def offset(self) -> int:
        return self.at + len(self.header)

    @property
    def end(self) -> int:
        """Offset of the next header."""
        return self.offset + self.file.nbytes + -self.file.nbytes % tarfile.BLOCKSIZE


def _members(opened: OpenTag) -> Iterator[_Member]:
    """Yield the members in the archive's order, with offsets from the end of its list, which is a page boundary."""
    at = 0
    for file in sorted([*files_to_copy(opened), *_markers(opened)], key=_order):
        key = f"{opened.tag}/{file.name}"
        seconds = opened.storage.time(key)
        member = _Member(file, float(seconds), _header(key, file.nbytes, seconds, at), at)
        yield member
        at = member.end


def _list_of(tag: str, members: Sequence[_Member]) -> bytes:
    """Return the list of members as a member itself, of whole pages, so that the others' bytes begin on pages too."""
    data = dump_members((f"{tag}/{each.file.name}", each.offset, each.file.nbytes, each.time) for each in members)
    data += b" " * (-len(data) % _PAGE)
    return _header(MEMBER_LIST, len(data), members[0].time, 0) + data


def _markers(opened: OpenTag) -> Iterator[TagFile]:
    for name in (names.MARKER, names.DONE):
        key = f"{opened.tag}/{name}"
        if opened.storage.is_file(key):
            yield TagFile(name, opened.storage.size(key))


def _order(file: TagFile) -> tuple[int, str]:
    """Return the sort key of a file: manifest and indexes first, the markers of completeness last."""
    ranks = {names.MANIFEST: 0, names.MARKER: 3, names.DONE: 4}
    return ranks.get(file.name, 1 if file.name.startswith(f"{names.INDEX_DIR}/") else 2), file.name


def _header(name: str, nbytes: int, seconds: float, at: int) -> bytes:
    """Return a member's header for byte ``at``, padded by a comment so that the member's bytes begin on a page."""
    info = tarfile.TarInfo(name)
    info.size = nbytes
    info.mtime = seconds
    info.mode = 0o644
    info.pax_headers = {"mtime": str(float(seconds))}
    header = info.tobuf(tarfile.PAX_FORMAT)
    missing = -(at + len(header)) % _PAGE
    if not missing:
        return header
    frame = len(f"{missing} comment=\n")  # the record counts itself
    info.pax_headers = {**info.pax_headers, "comment": " " * (missing - frame)}
    return info.tobuf(tarfile.PAX_FORMAT)


def _write(
    opened: OpenTag, head: bytes, members: Sequence[_Member], nbytes: int, output: Output, written: Counter
) -> None:
    storage = output.storage
    key = output.folder
    compressed = compression_of(output.place.name)
    writer = CompressedWriter(storage, key, compressed, nbytes) if compressed else storage.create(key, nbytes)
    with completed(writer):
        writer.write_at(0, head)
        for member in members:
            _put(opened, member, writer, written)
        writer.write_at(members[-1].end, bytes(nbytes - members[-1].end))
        if opened.manifest is None:  # no digest distinguishes its files from those of a later save
            opened.require_unchanged()
        output.require()


def _put(opened: OpenTag, member: _Member, writer: Writer, written: Counter) -> None:
    """Write the member's header, its bytes, verified, and the padding of the last block."""
    file = member.file
    source = StoredFile(opened.storage, f"{opened.tag}/{member.file.name}")
    writer.write_at(member.at, member.header)
    entry, blocks = copy_into(source, writer, member.offset, file.records, written.add)
    verify(file, entry, blocks, source.where)
    end = member.offset + file.nbytes
    writer.write_at(end, bytes(member.end - end))
