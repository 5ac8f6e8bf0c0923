"""The open input of a conversion in a worker: a tag, or a directory of Hugging Face or torch DCP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from nxd_ckpt.conversion.file_passthrough import FilePassthrough, PassedFiles
from nxd_ckpt.conversion.job import DcpTarget, HuggingFaceTarget, Job
from nxd_ckpt.core.dcp_names import DcpNames
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag
from nxd_ckpt.hugging_face.imported_model import ImportedModel, ImportTarget
from nxd_ckpt.live.save_state import SaveState
from nxd_ckpt.load.attempt import unwrapped
from nxd_ckpt.output.locations import Location
from nxd_ckpt.output.source import open_any
from nxd_ckpt.reshard.target import Target, target_state
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.directory import require_directory
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.dcp_directory import DcpDirectory, entries_of
from nxd_ckpt.tag.foreign.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.tag.foreign.weight_files import WeightFiles
from nxd_ckpt.tag.opened import OpenTag, open_complete_tag
from nxd_ckpt.tag.reading import LeafReader


class WholeModelFile(HuggingFaceDirectory):
    """The model in ``file`` of ``storage``; torch.save wrote it unless the name ends in .safetensors.

    From a pickle only plain data is read. ``model_key`` is the key of the state dict, if the file holds more than that.

    Raises:
        MalformedFile: it is neither.
        UnsafePickle: it holds more than plain data.
    """

    def __init__(self, storage: Storage, file: str, model_key: str = "model") -> None:
        self._file = file
        super().__init__(storage, model_key=model_key)

    @property
    def where(self) -> str:
        return self.files.where(self._file)

    def _find(self) -> WeightFiles:
        return WeightFiles(dict.fromkeys(self._read(self._file), self._file), "its header")


class Input(Protocol):
    """The open input: states of the result's ranks, and files that pass through unchanged."""

    def state(self, topology: Topology) -> SaveState:
        """Return the state that the rank of ``topology`` would save, with leaves that stand for tensors on disk."""

    def reader(self) -> LeafReader:
        """Return a reader of those leaves, which verifies them if there are digests."""

    def pass_files(self, topology: Topology, folder: str, progress: Callable[[int], None]) -> PassedFiles:
        """Link or copy the rank's unchanged files below ``folder``."""

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context for reading. Raises TagReplaced if the input is no longer the save that was opened."""


def open_model(place: Location, model_key: str) -> HuggingFaceDirectory:
    """Open a Hugging Face directory, or a file with a whole model. Raises the errors of opening it."""
    storage = place.open()
    if storage.is_file(place.name):
        return WholeModelFile(storage, place.name, model_key)
    require_directory(storage, place.name, "input")
    return HuggingFaceDirectory(storage, place.name, model_key)


def open_imported(place: Location, what: ImportTarget) -> HuggingFaceDirectory:
    """Open the input of an import, with plain numbers of quantized weights. Raises the errors of opening it."""
    directory = open_model(place, what.model_key)
    directory.dequantize(what.quantization)
    return directory


def open_input(job: Job, storage: Storage) -> Input:
    """Open the input of ``job``, whose result is written to ``storage``."""
    if isinstance(job.what, ImportTarget):
        return _Directory(open_imported(job.source, job.what), job.what)
    if isinstance(job.what, DcpTarget):
        return _Anew(open_dcp(job.source, job.what.names), job.what)
    if isinstance(job.what, HuggingFaceTarget) and job.what.terms is not None:
        opened = open_any(job.source)
        opened.require_save(job.save)
        with opened.guarded():
            opened = unwrapped(opened, job.what.terms.mapping)
        return _Anew(HuggingFaceTag(opened, job.what.terms), job.what)
    return _Tag(job, job.what, storage)


def open_dcp(place: Location, names: DcpNames) -> OpenTag:
    """Open a directory of torch DCP or torch_checkpointing as a tag of one rank. Raises the errors of opening it."""
    storage = place.open()
    files = TagFiles(storage, place.name)
    return OpenTag(storage, place.name, DcpDirectory(files, entries_of(files), names), None)


class _Verified:
    """An input whose tensors are a tag's."""

    def __init__(self, opened: OpenTag) -> None:
        self._opened = opened

    def guarded(self) -> AbstractContextManager[None]:
        return self._opened.guarded()

    def reader(self) -> LeafReader:
        return self._opened.reader()


class _Tag(_Verified):
    def __init__(self, job: Job, target: Target, storage: Storage) -> None:
        super().__init__(open_complete_tag(job.source.open(), job.source.name))
        self._opened.require_save(job.save)
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

    def pass_files(self, topology: Topology, folder: str, progress: Callable[[int], None]) -> PassedFiles:
        return PassedFiles()


class _Directory:
    """A Hugging Face directory. Its files have no digests, so only headers can be checked."""

    def __init__(self, directory: HuggingFaceDirectory, target: ImportTarget) -> None:
        self._files, self._model = directory.files, ImportedModel(directory, target)

    def guarded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self, topology: Topology) -> SaveState:
        return self._model.state(topology)

    def reader(self) -> LeafReader:
        return LeafReader(self._files, {})

    def pass_files(self, topology: Topology, folder: str, progress: Callable[[int], None]) -> PassedFiles:
        return PassedFiles()
