"""The input of a conversion, as a worker has it open: a tag, or a directory of Hugging Face's or of torch DCP."""

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
from nxd_ckpt.output.locations import Location
from nxd_ckpt.output.source import open_any
from nxd_ckpt.reshard.target import Target, target_state
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.directory import require_directory
from nxd_ckpt.tag.files import TagFiles
from nxd_ckpt.tag.foreign.dcp_directory import DcpDirectory
from nxd_ckpt.tag.foreign.hugging_face_directory import HuggingFaceDirectory
from nxd_ckpt.tag.model_file import WholeModelFile
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.opening import open_complete_tag
from nxd_ckpt.tag.reading import LeafReader


class Input(Protocol):
    """What the ranks of the result hold, and what is taken over as it is."""

    def state(self, topology: Topology) -> SaveState:
        """What the rank that ``topology`` is seen from would save, with leaves that stand for tensors on disk."""

    def reader(self) -> LeafReader:
        """Reads those leaves, verified as far as that is possible."""

    def bring(self, topology: Topology, folder: str, progress: Callable[[int], None]) -> PassedFiles:
        """Take over what belongs to the rank, below ``folder``; see :class:`.FilePassthrough`."""

    def guarded(self) -> AbstractContextManager[None]:
        """The input is read within. Raises TagReplaced if it is no longer the save that was opened."""


def open_model(place: Location, model_key: str) -> HuggingFaceDirectory:
    """The Hugging Face directory, or the file with a whole model; raises what opening it raises.

    UnsupportedState too for quantized weights that cannot be dequantized.
    """
    storage = place.open()
    if storage.is_file(place.name):
        directory: HuggingFaceDirectory = WholeModelFile(storage, place.name, model_key)
    else:
        require_directory(storage, place.name, "input")
        directory = HuggingFaceDirectory(storage, place.name)
    directory.refuse_quantized()
    return directory


def open_input(job: Job, storage: Storage) -> Input:
    """The input of ``job``, whose result is written to ``storage``."""
    if isinstance(job.what, ImportTarget):
        return _Directory(open_model(job.source, job.what.model_key), job.what)
    if isinstance(job.what, DcpTarget):
        return _Anew(open_dcp(job.source, job.what.names), job.what)
    if isinstance(job.what, HuggingFaceTarget) and job.what.terms is not None:
        opened = open_any(job.source)
        opened.require_save(job.save)
        return _Anew(HuggingFaceTag(opened, job.what.terms), job.what)
    return _Tag(job, job.what, storage)


def open_dcp(place: Location, names: DcpNames) -> OpenTag:
    """The torch DCP directory as a tag of one rank; raises what opening it raises."""
    storage = place.open()
    return OpenTag(storage, place.name, DcpDirectory(TagFiles(storage, place.name), names), None)


class _Verified:
    """The tensors of a tag."""

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
        self.bring = FilePassthrough(job, self._opened, storage).bring

    def state(self, topology: Topology) -> SaveState:
        state = target_state(self._opened, replace(self._target, topology=topology))
        return replace(state, rank_content=dict(self._positions)) if self._positions else state


class _Anew(_Verified):
    """Of what is seen as a tag of one rank nothing is taken over as it is: scheduler and user content are written
    anew."""

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

    def bring(self, topology: Topology, folder: str, progress: Callable[[int], None]) -> PassedFiles:
        return PassedFiles()


class _Directory:
    """Its files have no digests: only their headers can be checked."""

    def __init__(self, directory: HuggingFaceDirectory, target: ImportTarget) -> None:
        self._files, self._model = directory.files, ImportedModel(directory, target)

    def guarded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self, topology: Topology) -> SaveState:
        return self._model.state(topology)

    def reader(self) -> LeafReader:
        return LeafReader(self._files, {})

    def bring(self, topology: Topology, folder: str, progress: Callable[[int], None]) -> PassedFiles:
        return PassedFiles()
