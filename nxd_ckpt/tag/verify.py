"""Verification of a whole tag: ours byte for byte against its indexes, NxD's by the digests in its files.

Our tags have digests of every byte of every file, headers and padding included. The files of neuronx_distributed
are zip archives with a CRC-32 for each record (a tensor's bytes, or the pickle). Those are compared, and bytes without
a digest are counted. Missing files are found by the references between files.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.core import names, units
from nxd_ckpt.core.findings import collect_problems
from nxd_ckpt.core.manifest import FileEntry, TensorEntry
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    DigestMismatch,
    MalformedFile,
    PartNotFound,
    UnreadableFormat,
    UnsafePickle,
    UnsupportedState,
    as_checkpoint_errors,
)
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.formats.torch_zip import read_directory
from nxd_ckpt.layouts import legacy
from nxd_ckpt.layouts.files import MissingTensor, TagFiles
from nxd_ckpt.layouts.payload import refuse_numbers
from nxd_ckpt.layouts.torch_dcp import DcpFiles, read_metadata
from nxd_ckpt.layouts.weight_files import OF_TORCH
from nxd_ckpt.storage.base import Storage, pread_of
from nxd_ckpt.storage.progress import Counter, report, watched
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.choosing import Place, choose_anything, open_complete_tag
from nxd_ckpt.tag.digest_lists import DIGESTS, SUMS, read_seal, read_sums, sha256_of
from nxd_ckpt.tag.directory import NO_TAG
from nxd_ckpt.tag.identity import FOREIGN_MARK, Identity, is_noted, known_damage, mark_of, note_damage, of_latest
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.verification import changed_tensors, crc32_of, verify_file

_CHUNK = 16 * 2**20
_DEEPEST = 16
"""Maximum directories above a file of a tag; NxD's and ours have two, files of others more."""
_MARKERS = (names.MARKER, names.DONE)


@dataclass(frozen=True)
class Verification:
    """Counts and problems of a verification. Each problem names a file, what was expected, and what was found.

    ``nbytes`` counts all bytes that were read: ``verified`` of them match a recorded digest, and ``undigested`` are
    contents (records of zip files, other files) without one. The rest lies around records, or in damaged files.
    ``ours``: the tag was compared with its indexes. ``guests`` are files of others beside ours that the save was not
    given: they carry no digest, and were not read.
    """

    tag: str
    files: int
    nbytes: int
    problems: tuple[str, ...]
    verified: int = 0
    undigested: int = 0
    ours: bool = True
    guests: tuple[str, ...] = ()


@as_checkpoint_errors
@takes()
def verify_checkpoint(
    path: str | os.PathLike[str],
    tag: Tag | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> Verification:
    """Read every file of a tag, by default the latest, and compare it with the recorded digests.

    In our tags they cover all bytes of all files, while a load verifies only the bytes it reads. In tags that NxD wrote
    they are the CRC-32s in its files, and files that others refer to must exist. Extra memory: one chunk of 16 MiB.
    ``progress`` shows a bar on standard error, if that is a terminal.

    Raises:
        CheckpointNotFound: no such tag.
        TagReplaced: ``tag`` was removed, or saved again, while it was read. Without ``tag`` the new latest one is read.
    """
    storage = open_storage(path, storage_options=storage_options)
    return of_latest(tag is None, lambda: _verify(storage, tag, (path, storage_options), progress))


def _verify(storage: Storage, tag: Tag | None, place: Place, progress: bool) -> Verification:
    started = effects.monotonic()
    chosen = "" if tag is None else str(tag)
    try:
        inside, found = choose_anything(storage, tag, place)
        chosen = found.key
        opened = found.open(inside, chosen)
    except CorruptCheckpoint as error:  # without marker and manifest the expected content is unknown
        return Verification(chosen, 0, 0, (str(error),))
    try:
        verification = _verified(opened, progress)
    except UnreadableFormat as error:  # of an index
        return Verification(chosen, 0, 0, (str(error),))
    report("verified", opened.where, verification.nbytes, started)
    return verification


def _verified(opened: OpenTag, progress: bool) -> Verification:
    with opened.guarded(verified=opened.manifest is not None):
        verification = _verify_foreign(opened, progress) if opened.manifest is None else _verify_ours(opened, progress)
        verification = replace(verification, problems=(*verification.problems, *_problems_of_seal(opened)))
        if verification.problems:
            opened.require_unchanged()
    note_damage(opened.storage, opened.identity, next(iter(verification.problems), None))
    return verification


def _problems_of_seal(opened: OpenTag) -> Iterator[str]:
    """Yield problems of a tag beside a trainer's files, which a seal lists: files that are gone or changed."""
    storage = opened.storage
    if opened.manifest is None or not storage.is_file(DIGESTS):
        return
    try:
        seal = read_seal(storage)
        if f"{opened.tag}/{names.MANIFEST}" in seal:  # else another program's file of that name
            yield from map(str, problems_of(storage, "", seal))
    except CheckpointError as error:
        yield str(error)


def _require_sizes(opened: OpenTag, sizes: Mapping[str, int]) -> None:
    for file, expected in sizes.items():
        try:
            size = opened.storage.size(f"{opened.tag}/{file}")
        except FileNotFoundError as error:
            raise PartNotFound(f"{opened.where}/{file} is missing") from error
        if size != expected:
            raise MalformedFile(f"{opened.where}/{file} has {size} bytes, expected {expected}")


def _in_a_sentence(look: Callable[[Storage, str], str | None]) -> Callable[[Storage, str], str | None]:
    """Return ``look`` as a question about a complete tag: how is it damaged? None if it is not known to be.

    TagReplaced, UnreadableFormat, errors of the storage, and exhausted memory are raised.
    """

    @wraps(look)
    def damage(storage: Storage, tag: str) -> str | None:
        try:
            return look(storage, tag)
        except UnreadableFormat:
            raise
        except (CorruptCheckpoint, PartNotFound) as error:
            return str(error)
        except (UnsafePickle, UnsupportedState):  # what is not read may be whole
            return None

    return damage


@_in_a_sentence
def lost_names(storage: Storage, tag: str) -> str | None:
    """Describe files that every load needs, and that a tag lacks; or damage that this process found in it before.

    It reads the manifest and lists the tag, whatever the number of ranks: rank 0 asks this at each save.
    """
    needed = list(_names_of(open_complete_tag(storage, tag)))
    files = TagFiles(storage, tag)
    lost = [file for file in needed if not files.has(file)]
    if lost:
        return f"{files.directory} lost {first_of(lost)}"
    return known_damage(storage, Identity(storage, tag)) if is_noted(storage, tag) else None


@_in_a_sentence
def lost_files(storage: Storage, tag: str) -> str | None:
    """Describe a file that a tag lacks, or that has another size than when it was written; or damage found before.

    It reads the index of each rank, or of NxD's tags the structure of each file, and no tensor.
    """
    opened = open_complete_tag(storage, tag)
    if opened.manifest is not None:
        _require_sizes(opened, _sizes(opened))
    elif lost := _lost_files(opened, ()):
        return lost[0]
    return known_damage(opened.storage, opened.identity)


class Reading(NamedTuple):
    """Result of reading a whole tag: its first damage, or else why parts of it may be damaged nevertheless."""

    damage: str | None
    doubt: str | None = None


def read_whole(storage: Storage, tag: str, progress: bool) -> Reading:
    """Read every byte of a complete tag. ``progress`` shows a bar on a terminal.

    Raises TagReplaced, UnreadableFormat, and errors of the storage.
    """
    try:
        verification = _verified(open_complete_tag(storage, tag), progress)
    except UnreadableFormat:
        raise
    except (UnsafePickle, UnsupportedState) as error:  # what is not read may be whole
        return Reading(None, f"{tag} could not be opened, and was not compared: {error}")
    except (CorruptCheckpoint, PartNotFound) as error:
        return Reading(str(error))
    undigested = f"{verification.undigested:,} bytes of {tag} carry no digest, and were not compared"
    return Reading(next(iter(verification.problems), None), undigested if verification.undigested else None)


def _names_of(opened: OpenTag) -> Iterator[str]:
    """Yield the files that loads open by their names; other names are in these files."""
    topology = opened.topology
    parts = opened.parts
    manifest = opened.manifest
    every = [topology.coordinates_of(rank) for rank in range(topology.world_size)]
    writers = [at for at in every if at.dp_rank < topology.ep]  # see Topology.writer_of
    if manifest is not None:
        yield from map(names.index_file, every)
        yield from manifest.guests
    if manifest is not None and manifest.leaders is not None:
        there = {names.MODEL_DIR: parts.model, names.OPTIMIZER_DIR: parts.optimizer}
        for folder in (folder for folder, has_part in there.items() if has_part):
            yield from (names.structure_file(folder, leader) for leader in manifest.leaders)
        return
    if parts.model:
        yield from (names.model_file(topology, at) for at in writers)
    if parts.optimizer == "zero1_dcp":
        yield names.DCP_METADATA
    elif parts.optimizer is not None:
        holders = every if parts.optimizer == "zero1" else writers
        yield from (names.optimizer_file(topology, at, parts.optimizer) for at in holders)


def _sizes(opened: OpenTag) -> dict[str, int]:
    """Return the size of each file of our tag."""
    ranks = map(opened.topology.coordinates_of, range(opened.topology.world_size))
    files = {file: entry for at in ranks for file, entry in opened.index(at).files.items()}
    guests = {} if opened.manifest is None else opened.manifest.guests
    return {file: entry.nbytes for file, entry in {**files, **guests}.items()}


def files_of(files: TagFiles) -> Iterator[str]:
    """Yield every file of a tag, relative to it, except markers.

    A directory of NxD 0.1 to 0.5 is one itself (``""``), and so may be a single file.
    """
    if files.storage.is_file(files.tag):
        yield ""
        return
    for entry in files.storage.list(files.tag):
        if files.tag == NO_TAG and not _is_legacy(entry.name):
            continue
        if entry.is_dir or entry.name not in _MARKERS:
            yield from _at_or_below(files, entry.name, entry.is_dir)


def guests_in(files: TagFiles) -> list[str]:
    """Return the files of others in a tag, see coordination.guests."""
    return [file for file in files_of(files) if not names.is_own(file)]


def _at_or_below(files: TagFiles, file: str, is_dir: bool) -> Iterator[str]:
    if not is_dir:
        yield file
        return
    if file.count("/") == _DEEPEST:
        raise MalformedFile(f"{files.where(file)}: deeper than any file of a checkpoint; does a link lead back?")
    for entry in files.storage.list(files.key(file)):
        yield from _at_or_below(files, f"{file}/{entry.name}", entry.is_dir)


def _is_legacy(name: str) -> bool:
    payload = name.removesuffix(".tensors").removesuffix(".info.pt")
    return legacy.parse(payload) is not None or legacy.parse_zero1(name) is not None


def _verify_ours(opened: OpenTag, progress: bool) -> Verification:
    problems: list[str] = []
    entries = list(_entries(opened, problems))
    missing: list[FileEntry] = []
    verified = 0
    nbytes = sum(entry.nbytes for _, entry, _ in entries)
    done = Counter()
    logger.info("reading %s of %s", units.size(nbytes), opened.where)
    with watched("verify", nbytes, lambda: done.nbytes, progress):
        for file, entry, tensors in entries:
            key = f"{opened.tag}/{file}"
            memory = _memory(entry.nbytes)
            try:
                verify_file(opened.storage, key, entry, memory, done)
                verified += entry.nbytes
            except DigestMismatch as error:
                of_file = (tensor for tensor in tensors if tensor.file == file)
                read = partial(crc32_of, opened.storage, key, memory=memory, done=Counter())
                changed = changed_tensors(of_file, read)
                problems.append(f"{error}{': ' if changed else ''}{first_of(sorted(changed))}")
            except PartNotFound as error:
                missing.append(entry)
                problems.append(str(error))
            except CheckpointError as error:
                problems.append(str(error))
    nbytes -= sum(entry.nbytes for entry in missing)
    listed = {file for file, _, _ in entries}
    guests = tuple(file for file in guests_in(TagFiles(opened.storage, opened.tag)) if file not in listed)
    return Verification(opened.tag, len(entries) - len(missing), nbytes, tuple(problems), verified, guests=guests)


def problems_of(storage: Storage, folder: str, files: Mapping[str, FileEntry]) -> Iterator[CheckpointError]:
    """Read files in ``folder``; yield a problem for each that is gone or changed."""
    for file, entry in files.items():
        try:
            verify_file(storage, posixpath.join(folder, file), entry, _memory(entry.nbytes), Counter())
        except CheckpointError as error:
            yield error


def _entries(opened: OpenTag, problems: list[str]) -> Iterator[tuple[str, FileEntry, Sequence[TensorEntry]]]:
    """Yield every file that any rank wrote, and that rank's tensors; an untrustworthy index is a problem by itself."""
    for rank in range(opened.topology.world_size):
        try:
            index = opened.index(opened.topology.coordinates_of(rank))
        except UnreadableFormat:
            raise  # nothing says what the files should be
        except CheckpointError as error:
            problems.append(str(error))
            continue
        yield from ((file, entry, index.tensors) for file, entry in index.files.items())
    if opened.manifest is not None:
        yield from ((file, entry, ()) for file, entry in opened.manifest.guests.items())
    yield from ((marker, _marker(opened, marker), ()) for marker in _MARKERS)


def _marker(opened: OpenTag, marker: str) -> FileEntry:
    """Return the expected marker: NxD's ``1``; or ours, which names the attempt: ``done``, and in stores both."""
    data = FOREIGN_MARK
    if opened.manifest is not None:
        order_time = opened.manifest.order_time
        attempt = opened.manifest.attempt
        ours = mark_of(order_time, attempt) if marker == names.DONE else f"1 {attempt}".encode()
        with suppress(OSError, MalformedFile):  # comparing the file with this reports it
            data = ours if opened.storage.size(f"{opened.tag}/{marker}") == len(ours) else data
    return FileEntry(len(data), crc32.crc32(data))


def _memory(nbytes: int) -> memoryview:
    """Return a buffer for reading so many bytes."""
    return memoryview(bytearray(min(_CHUNK, nbytes)))


class Digested(NamedTuple):
    """Bytes of a file with the CRC-32 that it carries, or None: one record of a zip archive."""

    name: str
    offset: int
    nbytes: int
    crc32: int | None


class DigestsInside:
    """Digests in the files of a tag itself: of zip archives, which torch.save writes, and of our safetensors files."""

    def __init__(self, tag_files: TagFiles) -> None:
        self._files = tag_files
        self._storage = tag_files.storage
        self._dcp: dict[str, dict[str, list[tuple[int, int]]]] = {}

    def of(self, file: str, nbytes: int) -> Iterator[Digested]:
        """Yield every record or tensor in the file of that size; none for a file of another kind.

        Raises:
            PartNotFound, MalformedFile: it is damaged, or the file that describes its content is missing.
        """
        if self._holds_safetensors(file):
            for name, stub in self._files.safetensors(file).items():
                yield Digested(name, stub.offset, stub.nbytes, stub.storage.crc32)
        for start, size in self._archives(file, nbytes) or ():
            with closing(self._storage.open(self._files.key(file))) as reader:
                records = read_directory(pread_of(reader, start), size, self._files.where(file))
            for name, record in records.items():
                yield Digested(name, start + record.offset, record.nbytes, record.crc32)

    def has_none(self, file: str) -> bool:
        """Return whether the file is of a kind that carries no digests."""
        return self._archives(file, 0) is None and not self._holds_safetensors(file)

    def _holds_safetensors(self, file: str) -> bool:
        return self._files.key(file).endswith(".safetensors")

    def _archives(self, file: str, size: int) -> list[tuple[int, int]] | None:
        """Return offset and length of every torch file in this one; None for a file of another kind."""
        if file.endswith(".distcp"):
            return self._dcp_archives(file.rpartition("/")[0]).get(file, [])
        payload = file.partition("/")[0]
        is_of_torch = self._files.key(file).endswith(OF_TORCH)
        is_torch_file = is_of_torch or legacy.parse(payload) or legacy.parse_zero1(payload)
        return [(0, size)] if is_torch_file else None

    def _dcp_archives(self, folder: str) -> dict[str, list[tuple[int, int]]]:
        if folder not in self._dcp:
            archives = self._dcp[folder] = {}  # lost or damaged metadata is one problem, not one for each file
            places = DcpFiles(folder)
            if not self._files.has(places.metadata):
                where = self._files.where(places.metadata)
                raise PartNotFound(f"{where} is missing: it says what lies in the .distcp files")
            for chunks in read_metadata(self._files, places).entries.values():
                for chunk in chunks:
                    archives.setdefault(chunk.file, []).append((chunk.start, chunk.nbytes))
        return self._dcp[folder]


def _verify_foreign(opened: OpenTag, progress: bool) -> Verification:
    records = _Records(TagFiles(opened.storage, opened.tag))
    files = list(files_of(records.tag_files))
    problems = records.problems
    if SUMS in files:
        with collect_problems(problems):
            records.sums = read_sums(records.tag_files)
            files = [file for file in dict.fromkeys([*files, *records.sums]) if file != SUMS]
    with watched("verify", None, lambda: records.done.nbytes, progress):
        for file in files:
            records.read(file)
    problems += _lost_files(opened, reported=tuple(problems))
    return Verification(
        opened.tag, len(files), records.nbytes, tuple(problems), records.verified, records.undigested, ours=False
    )


class _Records:
    """Reader of a tag without an index, record by record, with counts."""

    def __init__(self, tag_files: TagFiles) -> None:
        self.tag_files = tag_files
        self._storage = tag_files.storage
        self._inside = DigestsInside(tag_files)
        self.nbytes = 0
        self.verified = 0
        self.undigested = 0
        self.done = Counter()
        self.problems: list[str] = []
        self.sums: Mapping[str, str] = {}

    def read(self, file: str) -> None:
        """Count the file, and verify its content; damage is added to ``problems``."""
        try:
            size = self._storage.size(self.tag_files.key(file))
            self.nbytes += size
            if file in self.sums:
                self._compare(file, size)
                return
            if self._inside.has_none(file):
                self.undigested += size
                return
            for record in self._inside.of(file, size):
                self._verify(file, record)
        except CheckpointError as error:
            self.problems.append(str(error))
        except FileNotFoundError:
            self.problems.append(f"{self.tag_files.where(file)} is missing")
        except EOFError as error:
            self.problems.append(f"{self.tag_files.where(file)} is shorter than its contents need: {error}")

    def _compare(self, file: str, size: int) -> None:
        expected = self.sums[file]
        found = sha256_of(self.tag_files, file, self.done.add)
        if found != expected:
            raise DigestMismatch(f"{self.tag_files.where(file)}: expected SHA-256 {expected}, found {found}")
        self.verified += size

    def _verify(self, file: str, record: Digested) -> None:
        key = self.tag_files.key(file)
        memory = _memory(record.nbytes)
        crc = crc32_of(self._storage, key, record.offset, record.nbytes, memory, self.done)
        if record.crc32 is None:
            self.undigested += record.nbytes
        elif crc == record.crc32:
            self.verified += record.nbytes
        else:
            digests = f"expected CRC-32 {record.crc32:08x}, found {crc:08x}"
            self.problems.append(f"{self.tag_files.where(file)}, record {record.name!r}: {digests}")


def _lost_files(opened: OpenTag, reported: tuple[str, ...]) -> list[str]:
    """Return missing files that the state of the ranks refers to. Damage that was ``reported`` is not repeated."""
    lost: list[str] = []
    try:
        for at, look in _looks(opened):
            try:
                lost += look(opened, at)
            except PartNotFound as error:
                lost.append(str(error))
            except UnsupportedState:
                continue  # what is not read may be whole
    except CheckpointError as error:
        if not reported:
            lost.append(str(error))
    return list(dict.fromkeys(lost))


def _looks(opened: OpenTag) -> Iterator[tuple[Coordinates, Callable[[OpenTag, Coordinates], list[str]]]]:
    """Yield for every state that the tag should hold its rank, and the function that searches its files."""
    topology = opened.topology
    parts = opened.parts
    for at in map(topology.coordinates_of, range(topology.world_size)):
        if parts.model and at == topology.writer_of(at):
            yield at, _lost_of_model
        if parts.optimizer and (parts.optimizer.startswith("zero1") or at == topology.writer_of(at)):
            yield at, _lost_of_optimizer
    if parts.scheduler:
        yield topology.coordinates_of(0), _lost_of_scheduler


def _lost_of_model(opened: OpenTag, at: Coordinates) -> list[str]:
    missing = [leaf for _, leaf in iter_tensors(opened.model_tree(at), MissingTensor)]
    if opened.parts.master_weights:  # they stand for the weights: NxD's avoid_saving_lower_precision_weights
        return []
    return [f"{opened.where}/{leaf.file} is missing: no file holds tensor {leaf.name!r}" for leaf in missing]


def _lost_of_scheduler(opened: OpenTag, at: Coordinates) -> list[str]:
    opened.scheduler()  # raises if it has not the form of one
    return []


def _lost_of_optimizer(opened: OpenTag, at: Coordinates) -> list[str]:
    tree = opened.optimizer_tree(at)
    if opened.manifest is None:
        refuse_numbers(tree, None, opened.where)
    return []
