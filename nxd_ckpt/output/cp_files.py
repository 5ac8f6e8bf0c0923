"""A tag's files, and the copy of each to another storage: verified, and only if it is not there yet.

Hosts with disks of their own copy to a lower tier themselves, at rank 0's request. Rank 0 asks for each piece of a
file, so its throttle and its cancelling apply to all hosts. It receives no bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum

from nxd_ckpt import effects
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import DigestMismatch, MalformedFile, PartNotFound
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.torch_zip import check_digest
from nxd_ckpt.layouts.files import TagFiles
from nxd_ckpt.storage.base import Replicated, Storage
from nxd_ckpt.storage.hosts.hosts_storage import HostsStorage
from nxd_ckpt.storage.transfer import CopyPace, Progress, StoredFile, copy, digest, require_equal, sync
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.union import changed_everywhere
from nxd_ckpt.tag.verify import Digested, DigestsInside, files_of, guests_in


class HostCopies:
    """Copies of a tag's ``files`` to tier number ``tier``. Safe for threads.

    Rank 0 copies at most ``own`` files at once itself.
    """

    def __init__(self, source: HostsStorage, tag: str, files: Sequence[TagFile], tier: int, own: int) -> None:
        self._source = source
        self._tag = tag
        self._tier = tier
        holders = source.holders([f"{tag}/{file.name}" for file in files])
        self._copier = assign_hosts(files, {file.name: holders[f"{tag}/{file.name}"] for file in files})
        self._left_out = {source.hosts.here}
        self.own_turn: effects.Semaphore = effects.Semaphore(own)

    def side_by_side(self, files: Sequence[TagFile]) -> list[TagFile]:
        """Return the files in an order that keeps all hosts busy: one file of each host, then the next of each."""
        turns: dict[str, int] = {}
        begun = Counter[int | None]()
        for file in files:
            copier = self._copier.get(file.name)
            begun[copier] += 1
            turns[file.name] = begun[copier]
        return sorted(files, key=lambda file: turns[file.name])

    def copy(
        self, file: TagFile, target: Storage, folder: str, progress: Progress, confirm: Callable[[], bool]
    ) -> bool:
        """Return True if another host copied the file below ``folder``, and verified it; otherwise none of it is there.

        A host that fails is not asked again. Errors of ``progress`` pass, and of ``confirm``, which is called before a
        failed copy is removed. Raises OSError if ``target`` is not reachable.
        """
        number = self._copier.get(file.name)
        key = f"{folder}/{file.name}"
        if number is None or file.entry is None or number in self._left_out:
            return False
        try:
            pieces = self._source.copy_out(
                number, f"{self._tag}/{file.name}", self._tier, folder, file.name, file.entry
            )
            with closing(pieces):
                for moved in pieces:
                    progress(moved)
            if target.size(key) == file.nbytes:
                return True
            problem: Exception = OSError(f"{target.url}/{key} is not what the host wrote")
        except (OSError, EOFError, MalformedFile) as error:
            problem = error
        if number not in self._left_out:
            self._left_out.add(number)
            logger.warning(
                "nxd_ckpt: rank 0 copies files of %s itself, instead of host %d: %s", self._tag, number, problem
            )
        target.remove_if(key, confirm)
        return False


def assign_hosts(files: Iterable[TagFile], holders: Mapping[str, Iterable[int]]) -> dict[str, int]:
    """Return the host that copies each file, by name: of its holders, the one with the fewest bytes to copy. Pure."""
    load = Counter[int]()
    chosen: dict[str, int] = {}
    for file in sorted(files, key=lambda file: (-file.nbytes, file.name)):
        least = min(sorted(holders[file.name]), key=lambda number: load[number], default=None)
        if least is not None:
            chosen[file.name] = least
            load[least] += file.nbytes
    return chosen


@dataclass(frozen=True)
class TagFile:
    """One file of a tag.

    ``entry`` is its entry in the tag's indexes, or None. ``inside`` are the digests inside a file of
    neuronx_distributed.
    """

    name: str
    nbytes: int
    entry: FileEntry | None = None
    inside: tuple[Digested, ...] = field(default=(), repr=False)

    @property
    def records(self) -> dict[int, int]:
        """Bytes of each record with a digest, by its offset."""
        return {record.offset: record.nbytes for record in self.inside}


_MEMORY = 8 * 2**20


class CopyResult(Enum):
    """The way in which a file of a copy was made."""

    COPIED = "copied"
    KEPT = "kept"


def files_to_copy(opened: OpenTag) -> list[TagFile]:
    """Return every file of the tag except its markers, in order of name.

    Raises:
        PartNotFound: a file in the indexes is missing.
        CorruptCheckpoint: an index, or the structure of a file of neuronx_distributed, is damaged.
    """
    files = TagFiles(opened.storage, opened.tag)
    present = {file for file in files_of(files) if names.is_own(file) or _is_copied(files, file)}
    if opened.manifest is None:
        inside = DigestsInside(files)
        return [_foreign(files, inside, file) for file in sorted(present)]
    entries = dict(_entries(opened))
    for file in entries:
        if file not in present:
            raise PartNotFound(f"{files.where(file)} is missing: the tag lost files since it was saved")
    return [
        TagFile(file, entries[file].nbytes, entries[file])
        if file in entries
        else TagFile(file, opened.storage.size(files.key(file)))
        for file in sorted(present)
    ]


def _is_copied(files: TagFiles, guest: str) -> bool:
    """Return whether a file of others is one that can be copied, not a pipe or a link to nothing."""
    is_file = files.storage.is_file(files.key(guest))
    if not is_file:
        logger.warning("%s is not copied: it is no file", files.where(guest))
    return is_file


def copy_guests(source: Storage, tag: str, target: Storage, folder: str) -> None:
    """Copy files of others in the ``tag`` of ``source`` to ``folder``, durably, unless one of the name is there."""
    files = TagFiles(source, tag)
    copied = [file for file in guests_in(files) if _is_copied(files, file)]
    for file in copied:
        with suppress(FileExistsError):
            copy(StoredFile(source, files.key(file)), StoredFile(target, f"{folder}/{file}"), {}, lambda moved: None)
    for directory in names.folders_of(copied) if copied else ():
        target.sync_dir(f"{folder}/{directory}".rstrip("/"))


def _entries(opened: OpenTag) -> Iterator[tuple[str, FileEntry]]:
    """Yield the entries of a tag of ours, with its indexes and manifest."""
    assert opened.manifest is not None
    for rank, line in enumerate(opened.manifest.ranks):
        at = opened.topology.coordinates_of(rank)
        yield from opened.index(at).files.items()
        yield names.index_file(at), line
    yield from opened.manifest.guests.items()
    manifest = opened.storage.read(f"{opened.tag}/{names.MANIFEST}")
    yield names.MANIFEST, FileEntry(len(manifest), crc32.crc32(manifest))


def _foreign(files: TagFiles, inside: DigestsInside, file: str) -> TagFile:
    nbytes = files.storage.size(files.key(file))
    return TagFile(file, nbytes, inside=tuple(inside.of(file, nbytes)))


@dataclass(frozen=True)
class CopyMeans:
    """The means of copies: each of the ``threads`` copies one file at a time, all of them within the ``pace``.

    ``readers``, at least as many, read ahead for them; without readers each file has its own thread for that.
    """

    threads: Executor
    pace: CopyPace
    readers: Executor | None = None


class FileCopy:
    """A copy of files of the tag ``opened`` to ``folder`` of ``target``. Safe for threads.

    ``hosts`` are asked first to copy files on their disks. ``confirm`` raises if another job took over the target.
    """

    def __init__(
        self,
        opened: OpenTag,
        target: Storage,
        folder: str,
        means: CopyMeans,
        hosts: HostCopies | None = None,
        confirm: Callable[[], bool] = lambda: True,
    ) -> None:
        self._hosts = hosts
        self._own_turn = nullcontext() if hosts is None else hosts.own_turn
        self._opened = opened
        self._target = target
        self._folder = folder
        self._progress = means.pace.moved
        self._readers = means.readers
        self._confirm = confirm
        self._present: Mapping[str, None] = dict.fromkeys(files_of(TagFiles(target, folder)))

    def surplus(self, files: Sequence[TagFile]) -> list[str]:
        """Return files in the folder that are none of ``files``. In a tag's own place, files of others stay."""
        kept = {file.name for file in files}
        is_tag = not self._target.renames
        return [name for name in self._present if name not in kept and (names.is_own(name) or not is_tag)]

    def remove(self, name: str) -> None:
        """Remove a file from the folder, unless the job may no longer write there."""
        self._target.remove_if(f"{self._folder}/{name}", self._confirm)

    def copy(self, file: TagFile) -> CopyResult:
        """Copy the file, durably, and compare its digests. A file that is there already is checked.

        Raises:
            PartNotFound, MalformedFile, DigestMismatch: the file is missing, or changed since the tag was saved.
            DirectoryInUse: from ``confirm``.
            OSError: a storage failed.
        """
        source = StoredFile(self._opened.storage, f"{self._opened.tag}/{file.name}")
        target = StoredFile(self._target, f"{self._folder}/{file.name}")
        if not self._target.renames or self._target.may_be_unmounted:
            self._confirm()  # the folder may be the tag itself, or below a place that was unmounted
        if file.name in self._present:
            with self._own_turn:
                is_right = self._is_right(file, source, target)
            if is_right:
                sync(*target)  # its writer may have died before it was durable
                return CopyResult.KEPT
            self.remove(file.name)
        hosts = self._hosts
        if hosts is not None and hosts.copy(file, self._target, self._folder, self._progress, self._confirm):
            return CopyResult.COPIED
        with self._own_turn:
            try:
                self._copy(file, source, target)
            except (DigestMismatch, MalformedFile):
                if file.entry is not None or names.is_own(file.name):
                    if not self._has_good_copy(file, source):
                        raise
                else:  # somebody wrote to it meanwhile
                    file = replace(file, nbytes=source.nbytes)
                self.remove(file.name)
                self._copy(file, source, target)
        return CopyResult.COPIED

    def _is_right(self, file: TagFile, source: StoredFile, target: StoredFile) -> bool:
        """Return whether an earlier attempt copied all of the file."""
        if target.nbytes != file.nbytes:
            return False
        actual = digest(target, self._progress, self._readers)
        return actual == (file.entry or digest(source, self._progress, self._readers))

    def _has_good_copy(self, file: TagFile, source: StoredFile) -> bool:
        """Return whether the source has several copies of the file, and a good one, which is read from now on."""
        if file.entry is None or not isinstance(source.storage, Replicated):
            return False
        return changed_everywhere(*source, file.entry, memoryview(bytearray(_MEMORY))) is None

    def _copy(self, file: TagFile, source: StoredFile, target: StoredFile) -> None:
        actual, blocks = copy(source, target, file.records, self._progress, self._readers)
        verify(file, actual, blocks, source.where)


def verify(file: TagFile, actual: FileEntry, blocks: Mapping[int, Sequence[int]], where: str) -> None:
    """Raise MalformedFile or DigestMismatch if a file differs from the tag's indexes, or from the digests inside it.

    ``blocks`` are the CRC-32s of the blocks of its records, by their offset.
    """
    _require_entry(file, actual, where)
    for record in file.inside:
        crc = crc32.combine_blocks(blocks[record.offset], record.nbytes)
        check_digest(crc, record.crc32, where, record.name)


def _require_entry(file: TagFile, actual: FileEntry, where: str) -> None:
    """Raise MalformedFile or DigestMismatch if a file differs from the tag's indexes."""
    require_equal(file.entry or FileEntry(file.nbytes, actual.crc32), actual, where)
