"""A save that torch DCP plans and collects: it decides what each rank writes, and gathers the votes for rank 0.

DCP raises one rank's error on all ranks. The tag is that of a mesh job (core.mesh) whose tensors list the ranks that
wrote parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from nxd_ckpt import effects
from nxd_ckpt.commit.session import Session
from nxd_ckpt.core import names
from nxd_ckpt.core.box import Box
from nxd_ckpt.core.dcp_names import DcpNames, DcpPart, Path
from nxd_ckpt.core.manifest import FileEntry, ParameterSpec, Parts, RankIndex
from nxd_ckpt.core.mesh import MeshGroup, MeshRecord, WholeTensor
from nxd_ckpt.core.partition import Partition, Piece
from nxd_ckpt.core.retention_rules import Metrics, Rule
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.formats import xser
from nxd_ckpt.formats.tensors import Assembly, TensorReference, itemsize, map_tensors
from nxd_ckpt.formats.torch_zip_writer import image_of
from nxd_ckpt.layouts.dcp_directory import DcpTrees
from nxd_ckpt.live import torch_xla
from nxd_ckpt.saving.pending import Helpers
from nxd_ckpt.saving.plan import SavePlan
from nxd_ckpt.saving.planned_file import NamedTensor, PlannedFile
from nxd_ckpt.saving.save_attempt import CollectedSave
from nxd_ckpt.saving.staging import stage_and_write
from nxd_ckpt.saving.writing import WRITERS, FileWriter, write_index, write_small
from nxd_ckpt.storage.arena import Arena

_STAGED = 128 * 2**20
"""Bytes that are staged at a time; more gains nothing, because the caller waits for the whole save."""


@dataclass(frozen=True)
class StagedChunk:
    """A ``box`` of the tensor ``name`` ("model/embed.weight"), of ``dtype``; ``read`` returns it when it is staged."""

    name: str
    dtype: str
    box: Box
    read: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)


@dataclass(frozen=True)
class Contents:
    """The contents with which rank 0 completes the tag.

    Attributes:
        objects: values of small torch files, by key.
        documents: bytes of other small files, by key.
        tensors: whole tensors, in the order of the trees' references.
        parts: parts of the tag.
        parameters: specifications of the model's tensors, for the index.
        optimizer_names: names of the optimizer's parameters, for the index, or None.
    """

    objects: Mapping[str, Any]
    documents: Mapping[str, bytes]
    tensors: Sequence[WholeTensor]
    parts: Parts
    parameters: dict[str, ParameterSpec]
    optimizer_names: tuple[str, ...] | None


class DcpSave(CollectedSave):
    """One attempt on each rank: `begin` on rank 0, `write` on all, then on rank 0 `complete`, and `discard`.

    `close` ends it and releases the directory.
    """

    def __init__(self, session: Session, tag: str, overwrite: bool | None) -> None:
        super().__init__(session, tag, overwrite)
        self._index = RankIndex(session.topology.coordinates, {}, ())
        self._started = effects.monotonic()
        self._thread = effects.current_thread()

    @property
    def is_abandoned(self) -> bool:
        """True if nothing will end it: its thread has ended, or has begun another save."""
        return self._thread is effects.current_thread() or not self._thread.is_alive()

    def write(self, chunks: Sequence[StagedChunk]) -> Vote:
        """Write this rank's chunks, durably; return its vote, on rank 0 without the index, which comes last."""
        started = effects.monotonic()
        rank = self.session.topology.rank
        files = [
            _shard_file(names.shard_file(directory, rank), own)
            for directory, prefix in ((names.MODEL_DIR, "model/"), (names.OPTIMIZER_DIR, "optim/"))
            if (own := [chunk for chunk in chunks if chunk.name.startswith(prefix)])
        ]
        self.session.storage.make_dir(self.publication.folder)
        self._index = self._written(files)
        nbytes = sum(entry.nbytes for entry in self._index.files.values())
        index = None if rank == 0 else self._write_index()
        return Vote(rank, plan={}, replica="", index=index, nbytes=nbytes, seconds=effects.monotonic() - started)

    def complete(
        self, contents: Contents, votes: Sequence[Vote], rules: Sequence[Rule] | None, metrics: Metrics
    ) -> None:
        """Write the remaining files on rank 0, and make the tag visible; then apply retention.

        Errors of `commit.commit` pass, with nothing visible.
        """
        session = self.session
        files = [PlannedFile(key, image_of(value, records=True)) for key, value in contents.objects.items()]
        objects = self._written(files)
        documents = {
            key: write_small(session.storage, self.publication, key, data) for key, data in contents.documents.items()
        }
        self._index = replace(
            self._index,
            files={**self._index.files, **objects.files, **documents},
            trees=objects.trees,
            parameters=contents.parameters,
            optimizer_names=contents.optimizer_names,
            mesh=MeshRecord((), tuple(contents.tensors)),
        )
        index = self._write_index()
        first, *others = sorted(votes, key=lambda vote: vote.rank)
        self.commit(
            session.topology,
            [replace(first, index=index), *others],
            contents.parts,
            rules=rules,
            timings={"stage_seconds": round(effects.monotonic() - self._started, 6)},
            parameters=contents.parameters,
            groups=[MeshGroup(tuple(range(session.topology.world_size)))],
            metrics=metrics,
        )

    def close(self) -> None:
        """Release the directory."""
        self.session.close()

    def _written(self, files: Sequence[PlannedFile]) -> RankIndex:
        """Stage and write the files, wave after wave; return their index."""
        storage = self.session.storage
        folder = self.publication.folder
        threads = Helpers(WRITERS, "nxd_ckpt-helper")
        writer = FileWriter(storage, folder, files, lambda nbytes: None, threads)
        try:
            torch_xla.sync(tensor for planned in files for tensor in planned.image.tensors)
            stage_and_write(files, writer, Arena(_STAGED))
        finally:
            threads.shutdown()
        return writer.index(SavePlan((), (), Parts(), ""), self.session.topology.coordinates)

    def _write_index(self) -> FileEntry:
        at = self.session.topology.coordinates
        return write_index(self.session.storage, self.publication, names.index_file(at), self._index)


class _Deferred(Sequence[Any]):
    """Tensors that are made only when they are staged, since a planner may allocate memory for each."""

    def __init__(self, chunks: Sequence[StagedChunk]) -> None:
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: Any) -> Any:
        return (
            [chunk.read() for chunk in self._chunks[index]] if isinstance(index, slice) else self._chunks[index].read()
        )


def _shard_file(key: str, chunks: Sequence[StagedChunk]) -> PlannedFile:
    tree: dict[str, Assembly] = {}
    tensors = []
    for storage, chunk in enumerate(chunks):
        name = chunk.name.partition("/")[2]
        label = name if name not in tree else f"{name}#{storage}"  # of several parts of a tensor
        tree[label] = Assembly(chunk.dtype, chunk.box.size, ())
        pieces = (Piece(Box.whole(chunk.box.size), chunk.box),)
        tensors.append(NamedTensor(chunk.name, storage, chunk.dtype, chunk.box.size, pieces))
    return PlannedFile(key, image_of(tree).holding(_Deferred(chunks)), tuple(tensors))


class WrittenTensor(NamedTuple):
    """A tensor in files; ``ranks`` wrote parts of it."""

    dtype: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CollectedState:
    """A state dict by DCP's names (see layouts.dcp_directory.Entries).

    ``written`` are tensors in files; ``values`` are other values, also tensors that were sent to rank 0. ``paths`` are
    the keys that lead to each.
    """

    written: Mapping[str, WrittenTensor]
    values: Mapping[str, Any]
    paths: Mapping[str, Path]
    where: str = "the state dict"

    @property
    def names(self) -> list[str]:
        return [name for name in self.paths if name in self.written or name in self.values]

    def recorded(self, name: str) -> Path:
        return self.paths[name]

    def path(self, name: str) -> Path:
        return self.paths[name]

    def form(self, name: str) -> WrittenTensor | torch.Tensor | None:
        value = self.values.get(name)
        return value if isinstance(value, torch.Tensor) else self.written.get(name)

    def entry(self, name: str) -> Any:
        return self.leaves[name] if name in self.leaves else self.values[name]

    @cached_property
    def leaves(self) -> dict[str, Assembly]:
        """Stand-ins for tensors in files."""
        return {name: Assembly(tensor.dtype, tensor.shape, ()) for name, tensor in self.written.items()}


def contents_of(collected: CollectedState, dcp_names: DcpNames) -> Contents:
    """Return the contents that are left to be written.

    Raises KeyMismatch for an optimizer whose parameters are not all in a param group.
    """
    trees = DcpTrees(collected, dcp_names)
    structures = _Structures(collected, dcp_names)
    parameters = trees.parameters if trees.has_optimizer else None
    if trees.model:
        structures.add(names.MODEL_DIR, trees.model_tree())
    if parameters is not None:
        structures.add(names.OPTIMIZER_DIR, trees.optimizer_tree())
    objects = dict(structures.files)
    objects |= {names.SCHEDULER: trees.scheduler()} if trees.has_scheduler else {}
    objects |= {names.USER_CONTENT: trees.content()} if trees.has_content else {}
    written_names = replace(dcp_names, flat_optimizer=trees.has_flat_options, content="")
    return Contents(
        objects=objects,
        documents={names.DCP_NAMES: written_names.to_json()},
        tensors=structures.tensors,
        parts=Parts(
            model=bool(trees.model),
            optimizer=None if parameters is None else "plain",
            scheduler=trees.has_scheduler,
            user_content=trees.has_content,
        ),
        parameters=_parameters(trees, collected, parameters),
        optimizer_names=None if parameters is None else tuple(parameters),
    )


class _Structures:
    """State dicts with references for tensors in files, and these tensors, in the order of the references."""

    def __init__(self, collected: CollectedState, dcp_names: DcpNames) -> None:
        self._collected = collected
        self._dcp_names = dcp_names
        self._names_by_leaf = {id(leaf): name for name, leaf in collected.leaves.items()}
        self.files: dict[str, Any] = {}
        self.tensors: list[WholeTensor] = []

    def add(self, directory: str, tree: Any) -> None:
        first = len(self.tensors)
        part = DcpPart.MODEL if directory == names.MODEL_DIR else DcpPart.STATE

        def refer(leaf: Assembly) -> TensorReference:
            name = self._names_by_leaf[id(leaf)]
            tensor = self._collected.written[name]
            tag_name = self._dcp_names.tag_name(name, part)
            self.tensors.append(WholeTensor(tag_name, tensor.dtype, tensor.shape, None, ranks=tensor.ranks))
            return TensorReference(len(self.tensors) - 1 - first)

        self.files[names.structure_file(directory, 0)] = map_tensors(xser.normalise(tree), refer, Assembly)


def _parameters(trees: DcpTrees, collected: CollectedState, trained: list[str] | None) -> dict[str, ParameterSpec]:
    """Return the model's tensors; tensors that the optimizer lacks count as frozen, or as buffers."""
    specs = {}
    trained_names = None if trained is None else set(trained)
    for parameter, entries in trees.model.items():
        tensor = collected.written.get(entries.get((), ""))
        if tensor is not None:
            trainable = trained_names is None or parameter in trained_names
            specs[parameter] = ParameterSpec(tensor.dtype, tensor.shape, Partition(), trainable)
    return specs
