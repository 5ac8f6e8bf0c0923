"""The open input of a conversion in a worker: a tag, or a directory of Hugging Face or torch DCP; its unchanged files.

Files of ours that pass through are hard-linked if possible, because they are never modified in place.
neuronx_distributed does write into files of a tag that it saves again, so its files are copied and digested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from nxd_ckpt.conversion.job import HuggingFaceTarget, Job
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry, ParameterSpec, TensorEntry
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import DigestMismatch, UnsupportedState
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.state import SaveState, StateTensor
from nxd_ckpt.formats.tensors import TensorStub, iter_tensors
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag
from nxd_ckpt.hugging_face.imported_model import ImportedFiles, ImportedModel, ImportTarget
from nxd_ckpt.loading.load_attempt import unwrapped
from nxd_ckpt.output.locations import Location
from nxd_ckpt.reshard.resharded_state import recorded_parameters
from nxd_ckpt.reshard.target import Target, target_state
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.transfer import Progress, StoredFile, copy, link_or_copy
from nxd_ckpt.tag.foreign.hugging_face_directory import HuggingFaceDirectory, open_weights
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import LeafReader


@dataclass(frozen=True)
class PassedFiles:
    """Entries in the index of one rank of the result for files that were passed through."""

    files: Mapping[str, FileEntry] = field(default_factory=dict)
    tensors: tuple[TensorEntry, ...] = ()
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files.values())


class FilePassthrough:
    """The transfer of unchanged files of the tag ``opened`` to ranks of the result of ``job``.

    All model files of a replica group go into the index of its first rank, because the other ranks may not exist in the
    result.
    """

    def __init__(self, job: Job, opened: OpenTag, storage: Storage) -> None:
        self._job = job
        self._opened = opened
        self._storage = storage

    def pass_files(self, topology: Topology, folder: str, progress: Progress) -> PassedFiles:
        """Link or copy the unchanged files of the rank of ``topology``, durably, below ``folder``.

        ``progress`` is called with the bytes of each chunk that had to be copied.

        Raises:
            CorruptCheckpoint, PartNotFound: a file is missing, or differs from the input's index or its own digests.
        """
        model = PassedFiles()
        if self._job.keeps_model and topology.writer_of(topology.coordinates) == topology.coordinates:
            pass_model = self._foreign_model if self._opened.manifest is None else self._model
            model = pass_model(topology, folder, progress)
        files = {file: self._file(file, entry, folder, progress) for file, entry in self._objects(topology)}
        files = {**model.files, **files}
        for directory in names.tensors_dirs(files):
            self._storage.make_dir(f"{folder}/{directory}")
        for directory in sorted({file.rpartition("/")[0] for file in files}, reverse=True):
            self._storage.sync_dir(f"{folder}/{directory}" if directory else folder)
        return PassedFiles(files, model.tensors, model.parameters)

    def _model(self, topology: Topology, folder: str, progress: Progress) -> PassedFiles:
        """Pass model files of a tag of ours, by the indexes of all ranks that shared the writing."""
        at, saved = topology.coordinates, self._opened.topology
        group = [self._opened.index(saved.coordinates_of(rank)) for rank in saved.replicas(at, expert=saved.ep > 1)]
        listed = {file: entry for index in group for file, entry in index.files.items() if _is_model(file)}
        files = {file: self._file(file, entry, folder, progress) for file, entry in listed.items()}
        tensors = tuple(tensor for index in group for tensor in index.tensors if _is_model(tensor.file))
        # From the manifest, since the commit knew more than each index.
        return PassedFiles(files, tensors, {name: self._recorded[name] for name in group[0].parameters})

    def _foreign_model(self, topology: Topology, folder: str, progress: Progress) -> PassedFiles:
        """NxD's: what its files hold, and the digests of what was copied."""
        opened, at = self._opened, topology.coordinates
        tree = opened.model_tree(at)
        files: dict[str, FileEntry] = {}
        tensors: list[TensorEntry] = []
        for file in self._model_files(topology):
            stubs = [(path, stub) for path, stub in iter_tensors(tree, TensorStub) if stub.file == file]
            records = {stub.storage.offset: stub.storage.nbytes for _, stub in stubs}
            files[file], blocks = copy(*self._source_and_target(file, folder), records, progress)
            for path, stub in stubs:
                name = ".".join(map(str, path))
                tensors.append(self._entry(name, stub, tuple(blocks[stub.storage.offset]), topology))
        names_written = tree if at.tp_rank == 0 else {}
        parameters = {name: self._recorded[name] for name in names_written if name in self._recorded}
        return PassedFiles(files, tuple(tensors), parameters)

    def _model_files(self, topology: Topology) -> Iterator[str]:
        file = names.model_file(topology, topology.coordinates)
        yield file
        if self._opened.storage.is_file(self._key(names.info_file(file))):
            yield names.info_file(file)
        folder = names.tensors_dir(file)
        yield from (f"{folder}/{entry.name}" for entry in self._opened.storage.list(self._key(folder)))

    def _entry(self, name: str, stub: TensorStub, blocks: tuple[int, ...], topology: Topology) -> TensorEntry:
        where, storage = f"{self._opened.where}/{stub.file}, tensor {name!r}", stub.storage
        if stub.nbytes != storage.nbytes or not stub.is_contiguous or storage.crc32 is None:
            raise UnsupportedState(
                f"{where}: it is a view of a larger one, or its file records no digest, so the file cannot be passed "
                "through. Convert the optimizer alone (optim_only=True), or save the checkpoint again with nxd_ckpt"
            )
        crc = crc32.combine_blocks(blocks, storage.nbytes)
        if crc != storage.crc32:
            raise DigestMismatch(f"{where}: expected CRC-32 {storage.crc32:08x}, found {crc:08x}: its bytes changed")
        about = StateTensor(f"model/{name}", self._recorded.get(name))
        pieces = about.pieces(topology, stub.shape)
        return TensorEntry(
            about.name, stub.file, storage.offset, storage.nbytes, stub.dtype, stub.shape, blocks, pieces
        )

    def _objects(self, topology: Topology) -> Iterator[tuple[str, FileEntry | None]]:
        """Yield the other files with their entries in the input's index, if it has any.

        These are scheduler and user content for rank 0, and each rank's own content if ranks stayed the same.
        """
        parts, opened = self._job.parts, self._opened
        chosen = {
            names.SCHEDULER: parts.scheduler and topology.rank == 0,
            names.USER_CONTENT: parts.user_content and topology.rank == 0,
            names.rank_content_file(topology.rank): parts.rank_content and not self._job.positions,
        }
        for file in (file for file, is_needed in chosen.items() if is_needed):
            if opened.manifest is None:
                yield file, None
                continue
            written = opened.index(opened.topology.coordinates_of(topology.rank)).files
            if file in written:
                yield file, written[file]

    def _file(self, file: str, entry: FileEntry | None, folder: str, progress: Progress) -> FileEntry:
        return link_or_copy(*self._source_and_target(file, folder), entry, progress)

    def _source_and_target(self, file: str, folder: str) -> tuple[StoredFile, StoredFile]:
        source = StoredFile(self._opened.storage, self._key(file))
        return source, StoredFile(self._storage, f"{folder}/{file}")

    def _key(self, file: str) -> str:
        return f"{self._opened.tag}/{file}"

    @cached_property
    def _recorded(self) -> dict[str, ParameterSpec]:
        """Cuts of parameters, as far as they are certain.

        With tensor or expert parallelism NxD's files do not record them. Then nothing is recorded, and a load of the
        result uses the live parameters' cuts, as for NxD's own tag.
        """
        sizes = self._opened.topology
        if self._opened.manifest is None and (sizes.tp, sizes.ep) != (1, 1):
            return {}
        return recorded_parameters(self._opened, {})


def _is_model(file: str) -> bool:
    return file.startswith(f"{names.MODEL_DIR}/")


class Input(Protocol):
    """The open input: states of the result's ranks, and files that pass through unchanged."""

    def state(self, topology: Topology) -> SaveState:
        """Return the state that the rank of ``topology`` would save, with leaves that stand for tensors on disk."""

    def reader(self) -> LeafReader:
        """Return a reader of those leaves, which verifies them if there are digests."""

    def pass_files(self, topology: Topology, folder: str, progress: Progress) -> PassedFiles:
        """Link or copy the rank's unchanged files below ``folder``."""

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for reading. Raises TagReplaced if the input is no longer the save that was opened."""


def open_imported(place: Location, what: ImportTarget) -> HuggingFaceDirectory:
    """Open the input of an import, with plain numbers of quantized weights. Raises the errors of opening it."""
    directory = open_weights(place.open(), place.name, what.model_key)
    directory.dequantize(what.quantization)
    return directory


def open_as_tag(place: Location, what: ImportTarget) -> tuple[OpenTag, ImportedModel]:
    """Open a Hugging Face directory as the tag that its import on one rank would be. Raises the errors of both."""
    layout = ImportedFiles(open_imported(place, what), what)
    return OpenTag(layout.files.storage, place.name, layout, None), layout.model


def open_input(job: Job, storage: Storage) -> Input:
    """Open the input of ``job``, whose result is written to ``storage``."""
    what, source = job.what, job.source
    if isinstance(what, ImportTarget):
        return _Directory(open_imported(source.place, what), what)
    if isinstance(what, HuggingFaceTarget) and what.terms is not None:
        opened = source.open() if what.imported is None else open_as_tag(source.place, what.imported)[0]
        opened.require_save(job.save)
        with opened.guarded():
            opened = unwrapped(opened, what.terms.mapping)
        return _Anew(HuggingFaceTag(opened, what.terms), what)
    opened = source.open()
    opened.require_save(job.save)
    return _Tag(job, opened, what, storage) if source.is_tag else _Anew(opened, what)


class _Verified:
    """An input whose tensors are a tag's."""

    def __init__(self, opened: OpenTag) -> None:
        self._opened = opened

    def guarded(self) -> AbstractContextManager[None]:
        return self._opened.guarded()

    def reader(self) -> LeafReader:
        return self._opened.reader()


class _Tag(_Verified):
    def __init__(self, job: Job, opened: OpenTag, target: Target, storage: Storage) -> None:
        super().__init__(opened)
        self._target, self._positions = target, job.positions
        self.pass_files = FilePassthrough(job, self._opened, storage).pass_files

    def state(self, topology: Topology) -> SaveState:
        state = target_state(self._opened, replace(self._target, topology=topology))
        return replace(state, rank_content=dict(self._positions)) if self._positions else state


class _Anew(_Verified):
    """An input that is read as a tag of one rank. No file passes through: scheduler and user content are rewritten."""

    def __init__(self, opened: OpenTag, target: Target) -> None:
        super().__init__(opened)
        self._target = target

    def state(self, topology: Topology) -> SaveState:
        state, parts = target_state(self._opened, replace(self._target, topology=topology)), self._opened.parts
        return replace(
            state,
            scheduler=self._opened.scheduler() if parts.scheduler else None,
            user_content=self._opened.user_content() if parts.user_content else None,
        )

    def pass_files(self, topology: Topology, folder: str, progress: Progress) -> PassedFiles:
        return PassedFiles()


class _Directory:
    """A Hugging Face directory. Its files may have no digests, so only headers can be checked beforehand."""

    def __init__(self, directory: HuggingFaceDirectory, target: ImportTarget) -> None:
        self._files, self._model = directory.files, ImportedModel(directory, target)

    def guarded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self, topology: Topology) -> SaveState:
        return self._model.state(topology)

    def reader(self) -> LeafReader:
        return LeafReader(self._files, {})

    def pass_files(self, topology: Topology, folder: str, progress: Progress) -> PassedFiles:
        return PassedFiles()
