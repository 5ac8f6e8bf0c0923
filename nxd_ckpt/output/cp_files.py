"""The files that a tag consists of, and bringing each to another storage: verified, and only if it is not there yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from enum import Enum

from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.errors import DigestMismatch, MalformedFile, PartNotFound
from nxd_ckpt.formats import crc32
from nxd_ckpt.output.host_copies import HostCopies
from nxd_ckpt.output.tag_file import TagFile
from nxd_ckpt.output.transfer import Progress, copy, digest, link, must_be, sync
from nxd_ckpt.storage.base import Replicated, Storage, is_mounted, remove_if
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.union import changed_everywhere
from nxd_ckpt.tag.verify import DigestsInside, files_of

_MEMORY = 8 * 2**20


class Brought(Enum):
    """How a file came to be where it is wanted."""

    COPIED = "copied"
    LINKED = "linked"
    KEPT = "kept"


def files_to_copy(opened: OpenTag) -> list[TagFile]:
    """Every file of the tag but for its markers, in order of name.

    Raises:
        PartNotFound: a file is not there that the indexes name.
        CorruptCheckpoint: an index, or the structure of a file of neuronx_distributed's, is damaged.
    """
    files = TagFiles(opened.storage, opened.tag)
    there = set(files_of(files))
    if opened.manifest is None:
        inside = DigestsInside(files)
        return [_foreign(files, inside, file) for file in sorted(there)]
    entries = dict(_entries(opened))
    for file in entries:
        if file not in there:
            raise PartNotFound(f"{files.where(file)} is missing: the tag lost files since it was saved")
    return [
        TagFile(file, entries[file].nbytes, entries[file])
        if file in entries
        else TagFile(file, opened.storage.size(files.key(file)))
        for file in sorted(there)
    ]


def _entries(opened: OpenTag) -> Iterator[tuple[str, FileEntry]]:
    """What is known of a tag of ours, its indexes and manifest included."""
    assert opened.manifest is not None
    for rank, line in enumerate(opened.manifest.ranks):
        at = opened.topology.coordinates_of(rank)
        yield from opened.index(at).files.items()
        yield names.index_file(at), FileEntry(line.nbytes, line.crc32)
    manifest = opened.storage.read(f"{opened.tag}/{names.MANIFEST}")
    yield names.MANIFEST, FileEntry(len(manifest), crc32.crc32(manifest))


def _foreign(files: TagFiles, inside: DigestsInside, file: str) -> TagFile:
    nbytes = files.storage.size(files.key(file))
    return TagFile(file, nbytes, inside=tuple(inside.of(file, nbytes)))


class FileCopy:
    """Brings files of the tag ``opened`` below ``folder`` of ``target``. Several threads may.

    ``hard_links`` says that files of ours may be linked where that works: none of them is ever modified in place.
    ``readers`` read ahead, at least one for each of those threads; without them each makes its own. ``hosts`` are asked
    first: they bring what they hold themselves. ``confirm`` raises if another job took the target over meanwhile.
    """

    def __init__(
        self,
        opened: OpenTag,
        target: Storage,
        folder: str,
        *,
        hard_links: bool,
        progress: Progress,
        readers: Executor | None = None,
        hosts: HostCopies | None = None,
        confirm: Callable[[], bool] = lambda: True,
    ) -> None:
        self._hosts, self._own_turn = hosts, nullcontext() if hosts is None else hosts.own_turn
        self._opened, self._target, self._folder = opened, target, folder
        self._hard_links, self._progress = hard_links and opened.manifest is not None, progress
        self._readers, self._confirm = readers, confirm
        self._there: Mapping[str, None] = dict.fromkeys(files_of(TagFiles(target, folder)))

    def surplus(self, files: Sequence[TagFile]) -> list[str]:
        """What is there, and is none of ``files``."""
        wanted = {file.name for file in files}
        return [name for name in self._there if name not in wanted]

    def remove(self, name: str) -> None:
        """Remove a file from the folder, unless the job may not write there any more."""
        remove_if(self._target, f"{self._folder}/{name}", self._confirm)

    def bring(self, file: TagFile) -> Brought:
        """Copy or link the file and compare its digests; its bytes are durable then. One that is there is checked.

        Raises:
            PartNotFound, MalformedFile, DigestMismatch: it is not what it was when the tag was saved.
            DirectoryInUse: see ``confirm``.
            OSError.
        """
        source, source_key = self._opened.storage, f"{self._opened.tag}/{file.name}"
        key = f"{self._folder}/{file.name}"
        if not self._target.renames or is_mounted(self._target):
            self._confirm()  # what is written there may be in the tag itself, or below a place that was unmounted
        if file.name in self._there:
            with self._own_turn:
                is_right = self._is_right(file, source, source_key, key)
            if is_right:
                sync(self._target, key)  # who wrote it may have died before it was durable
                return Brought.KEPT
            self.remove(file.name)
        hosts, target = self._hosts, self._target
        if hosts is not None and hosts.bring(file, target, self._folder, self._progress, self._confirm):
            return Brought.COPIED
        if self._hard_links and file.entry is not None and link(source, source_key, self._target, key):
            _must_be(file, digest(self._target, key, self._progress, self._readers), f"{source.url}/{source_key}")
            return Brought.LINKED
        with self._own_turn:
            try:
                self._copy(file, source, source_key, key)
            except (DigestMismatch, MalformedFile):
                if not self._has_good_copy(file, source, source_key):
                    raise
                self.remove(file.name)
                self._copy(file, source, source_key, key)
        return Brought.COPIED

    def _is_right(self, file: TagFile, source: Storage, source_key: str, key: str) -> bool:
        """Whether an earlier attempt brought all of the file."""
        if self._target.size(key) != file.nbytes:
            return False
        found = digest(self._target, key, self._progress, self._readers)
        return found == (file.entry or digest(source, source_key, self._progress, self._readers))

    def _has_good_copy(self, file: TagFile, source: Storage, source_key: str) -> bool:
        """Whether the source has several copies of the file, one of them good, which is read from now on."""
        if file.entry is None or not isinstance(source, Replicated):
            return False
        return changed_everywhere(source, source_key, file.entry, memoryview(bytearray(_MEMORY))) is None

    def _copy(self, file: TagFile, source: Storage, source_key: str, key: str) -> None:
        where = f"{source.url}/{source_key}"
        try:
            found, blocks = copy(
                source, source_key, self._target, key, file.records, self._progress, self._readers
            )
        except FileNotFoundError as error:
            raise PartNotFound(f"{where} is missing: the tag lost files since it was saved") from error
        verify(file, found, blocks, where)


def verify(file: TagFile, found: FileEntry, blocks: Mapping[int, Sequence[int]], where: str) -> None:
    """Raise unless what was read is what the tag's indexes say, and the digests inside the file.

    ``blocks`` are the CRC-32s of the blocks of its records, by their offset.
    """
    _must_be(file, found, where)
    for record in file.inside:
        crc = crc32.combine_blocks(blocks[record.offset], record.nbytes)
        if record.crc32 not in (None, crc):
            raise DigestMismatch(
                f"{where}, record {record.name!r}: expected CRC-32 {record.crc32:08x}, found {crc:08x}: its bytes "
                "changed"
            )


def _must_be(file: TagFile, found: FileEntry, where: str) -> None:
    """Raise unless what was read is what the tag's indexes say."""
    must_be(file.entry or FileEntry(file.nbytes, found.crc32), found, where)
