"""One tag that a conversion makes: its description, equal in each of its processes, and the states of its ranks.

Files of a tag that do not change pass through. Files of ours are hard-linked if possible, because they are never
modified in place. neuronx_distributed does write into files of a tag that it saves again, so its files are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_ckpt.core import names
from nxd_ckpt.core.data_position import Position
from nxd_ckpt.core.manifest import FileEntry, ParameterSpec, Parts, RankIndex, TensorEntry
from nxd_ckpt.core.retention_rules import Metrics
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import DigestMismatch, UnsupportedState
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.state import SaveState, StateTensor
from nxd_ckpt.formats.tensors import TensorStub, iter_tensors
from nxd_ckpt.hugging_face.hugging_face_tag import HuggingFaceTag, HuggingFaceTerms
from nxd_ckpt.hugging_face.imported_model import ImportTarget
from nxd_ckpt.loading.load_attempt import unwrapped
from nxd_ckpt.options.conversion import ConvertOptions
from nxd_ckpt.output.locations import Location
from nxd_ckpt.output.source import Source, open_as_tag
from nxd_ckpt.reshard.resharded_state import recorded_parameters
from nxd_ckpt.reshard.target import Target, target_state
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.transfer import Progress, StoredFile, copy, link_or_copy
from nxd_ckpt.tag.opened import OpenTag


@dataclass(frozen=True)
class Job:
    """The conversion of ``source`` to the tag ``target``. Plain data, because it is sent to worker processes.

    Attributes:
        source: the input.
        target: the result.
        what: the form of each rank of the result; the rank of its ``topology`` does not matter.
        parts: parts of the result, for its manifest.
        imported: how a Hugging Face directory becomes NxD's layers; None for other inputs.
        terms: how the input is translated to Hugging Face's names; None if it is not.
        keeps_model: True if the model's files pass through unchanged, from equal ranks of the input.
        durable: True to fsync everything before the result becomes visible.
        overwrite: True to replace an existing checkpoint, even one completed after the target was checked.
        save: identity of the tag's save (see tag.identity), because workers open the tag again; None for other inputs.
        metrics: metrics of the tag's save, which the result keeps.
        positions: data positions for each rank of a result whose ranks differ from the input's.
        left_out: descriptions of parts of the source that the result lacks.
    """

    source: Source
    target: Location
    what: Target
    parts: Parts
    imported: ImportTarget | None = None
    terms: HuggingFaceTerms | None = None
    keeps_model: bool = False
    durable: bool = True
    overwrite: bool = False
    save: str | None = None
    metrics: Metrics = field(default_factory=dict)
    positions: Mapping[Any, Position] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def topology(self) -> Topology:
        return self.what.topology

    def of(self, opened: OpenTag | None, chosen: ConvertOptions) -> Job:
        """Return the job with what it takes of the ``opened`` input, and of the options."""
        save, manifest = (None, None) if opened is None else (opened.save, opened.manifest)
        metrics = {} if manifest is None else manifest.metrics
        return replace(self, durable=chosen.durable, overwrite=chosen.overwrite, save=save, metrics=metrics)


class Input:
    """The open input of ``job``, whose result is written to ``storage``."""

    def __init__(self, job: Job, storage: Storage) -> None:
        self._job = job
        self._storage = storage
        self._model = None
        if job.imported is None:
            self.opened: OpenTag = job.source.open()
        else:
            self.opened, self._model = open_as_tag(job.source.place, job.imported)
        self.opened.require_save(job.save)
        if job.terms is not None:
            with self.opened.guarded():
                self.opened = HuggingFaceTag(unwrapped(self.opened, job.terms.mapping), job.terms)
        self._passes_files = job.source.is_tag and job.terms is None

    def state(self, topology: Topology) -> SaveState:
        """Return the state that the rank of ``topology`` would save, with leaves that stand for tensors on disk."""
        job, opened = self._job, self.opened
        if self._model is not None and job.terms is None:
            return self._model.state(topology)
        state = target_state(opened, replace(job.what, topology=topology))
        if self._passes_files:
            return replace(state, rank_content=dict(job.positions)) if job.positions else state
        return replace(
            state,
            scheduler=opened.scheduler() if opened.parts.scheduler else None,
            user_content=opened.user_content() if opened.parts.user_content else None,
        )

    def pass_files(self, index: RankIndex, topology: Topology, folder: str, progress: Progress) -> RankIndex:
        """Link or copy the rank's unchanged files, durably, below ``folder``; return its ``index`` with them.

        All model files of a replica group go into the index of its first rank, because the other ranks may not exist in
        the result. ``progress`` is called with the bytes of each chunk that had to be copied.

        Raises:
            CorruptCheckpoint, PartNotFound: a file is missing, or differs from the input's index or its own digests.
        """
        if not self._passes_files:
            return index
        opened, at = self.opened, topology.coordinates
        listed, tensors, parameters = dict(self._objects(topology)), index.tensors, index.parameters
        files: dict[str, FileEntry] = {}
        passes_model = self._job.keeps_model and topology.writer_of(at) == at
        if passes_model and opened.manifest is None:
            files, copied, parameters = self._copy_foreign_model(topology, folder, progress)
            tensors += copied
        elif passes_model:
            replicas = opened.topology.replicas(at, expert=opened.topology.ep > 1)
            group = [opened.index(opened.topology.coordinates_of(rank)) for rank in replicas]
            listed |= {file: entry for own in group for file, entry in own.files.items() if _is_model(file)}
            tensors += tuple(tensor for own in group for tensor in own.tensors if _is_model(tensor.file))
            # From the manifest, since the commit knew more than each index.
            recorded = recorded_parameters(opened, {})
            parameters = {**parameters, **{name: recorded[name] for name in group[0].parameters}}
        for file, entry in listed.items():
            source = StoredFile(opened.storage, f"{opened.tag}/{file}")
            files[file] = link_or_copy(source, StoredFile(self._storage, f"{folder}/{file}"), entry, progress)
        for directory in names.tensors_dirs(files):
            self._storage.make_dir(f"{folder}/{directory}")
        for directory in names.folders_of(files) if files else ():
            self._storage.sync_dir(f"{folder}/{directory}".rstrip("/"))
        return replace(index, files={**index.files, **files}, tensors=tensors, parameters=parameters)

    def _copy_foreign_model(
        self, topology: Topology, folder: str, progress: Progress
    ) -> tuple[dict[str, FileEntry], tuple[TensorEntry, ...], dict[str, ParameterSpec]]:
        """Copy the model of NxD's rank; return entries for its files, tensors and parameters, as an index has them.

        Cuts are recorded only where they are certain: NxD's files do not tell them. A load of the result uses the live
        parameters' cuts then, as for NxD's own tag.
        """
        opened, at = self.opened, topology.coordinates
        sizes = opened.topology
        recorded = recorded_parameters(opened, {}) if (sizes.tp, sizes.ep) == (1, 1) else {}
        tree = opened.model_tree(at)
        leaves = [(".".join(map(str, path)), stub) for path, stub in iter_tensors(tree, TensorStub)]
        files: dict[str, FileEntry] = {}
        tensors: list[TensorEntry] = []
        for file in self._foreign_files(names.model_file(topology, at)):
            own = [(name, stub) for name, stub in leaves if stub.file == file]
            source = StoredFile(opened.storage, f"{opened.tag}/{file}")
            records = {stub.storage.offset: stub.storage.nbytes for _, stub in own}
            files[file], blocks = copy(source, StoredFile(self._storage, f"{folder}/{file}"), records, progress)
            for name, stub in own:
                self._compare(name, stub, blocks[stub.storage.offset])
                about = StateTensor(f"model/{name}", recorded.get(name))
                tensors.append(
                    TensorEntry(
                        about.name,
                        file,
                        stub.storage.offset,
                        stub.storage.nbytes,
                        stub.dtype,
                        stub.shape,
                        tuple(blocks[stub.storage.offset]),
                        about.pieces(topology, stub.shape),
                    )
                )
        parameters = {name: recorded[name] for name in tree if at.tp_rank == 0 and name in recorded}
        return files, tuple(tensors), parameters

    def _foreign_files(self, file: str) -> Iterator[str]:
        storage, tag = self.opened.storage, self.opened.tag
        yield file
        if storage.is_file(f"{tag}/{names.info_file(file)}"):
            yield names.info_file(file)
        folder = names.tensors_dir(file)
        yield from (f"{folder}/{entry.name}" for entry in storage.list(f"{tag}/{folder}"))

    def _compare(self, name: str, stub: TensorStub, blocks: Sequence[int]) -> None:
        """Compare what was copied with the digest in NxD's file."""
        where, storage = f"{self.opened.where}/{stub.file}, tensor {name!r}", stub.storage
        if stub.nbytes != storage.nbytes or not stub.is_contiguous or storage.crc32 is None:
            raise UnsupportedState(
                f"{where}: it is a view of a larger one, or its file records no digest, so the file cannot be passed "
                "through. Convert the optimizer alone (optim_only=True), or save the checkpoint again with nxd_ckpt"
            )
        crc = crc32.combine_blocks(blocks, storage.nbytes)
        if crc != storage.crc32:
            raise DigestMismatch(f"{where}: expected CRC-32 {storage.crc32:08x}, found {crc:08x}: its bytes changed")

    def _objects(self, topology: Topology) -> Iterator[tuple[str, FileEntry | None]]:
        """Yield the files of other parts with their entries in the input's index, if it has any.

        These are scheduler and user content for rank 0, and each rank's own content if ranks stayed the same.
        """
        parts, opened = self._job.parts, self.opened
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


def _is_model(file: str) -> bool:
    return file.startswith(f"{names.MODEL_DIR}/")
