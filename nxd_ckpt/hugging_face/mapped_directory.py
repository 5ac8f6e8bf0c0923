"""A Hugging Face directory as tensors of an NxD job: each rank's tensors as parts of its files. Reads headers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from nxd_ckpt.core.mapping import Match, ModelMapping
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.reads import plan_reads
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import ShapeMismatch, TopologyMismatch
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub
from nxd_ckpt.hugging_face.hf_slice import hf_slices, partition_of


class HuggingFaceTensors(Protocol):
    """A source of a model's tensors by Hugging Face's names: a directory, or a tag."""

    @property
    def where(self) -> str: ...

    @property
    def names(self) -> list[str]: ...

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub | Assembly: ...


class MappedDirectory:
    """The model of ``directory`` by ``mapping``, on one rank of a job."""

    def __init__(
        self, directory: HuggingFaceTensors, mapping: ModelMapping, sizes: Sizes, topology: Topology
    ) -> None:
        self._directory, self._mapping, self._sizes, self._topology = directory, mapping, sizes, topology

    def assembly(self, match: Match, dtype: str, shape: tuple[int, ...]) -> Assembly:
        """Assemble this rank's part, of ``shape``, of the NxD tensor ``match`` from slices of files.

        Numbers are cast to ``dtype``; rows that pad the vocabulary are zero.

        Raises:
            ShapeMismatch: the directory's model has another shape on this job's sizes.
            TopologyMismatch: the sizes do not divide it.
            KeyMismatch, PartNotFound, MalformedFile: the directory lacks a tensor, or is damaged.
        """
        whole = self._whole(match, shape)
        partition = partition_of(match, whole, self._sizes, self._topology.tp)
        pieces = partition.pieces(shape, self._topology.tp_rank, self._topology.tp, self._topology.ep_rank)
        if pieces is None:
            raise TopologyMismatch(f"{match.name} cannot have shape {shape} on each of {self._topology.tp} ranks")
        fragments: list[Fragment] = []
        for hf_slice in hf_slices(match, whole, self._sizes, _experts(match, pieces)):
            targets = [part for piece in pieces for part in _covered(piece, hf_slice.pieces)]
            if not targets:
                continue
            stub = self._stub(match, hf_slice.name, hf_slice.shape)
            for read in plan_reads(targets, [(stub, member) for member in hf_slice.pieces], match.name):
                part = Assembly.of(read.holder).within(read.source)
                fragments += [fragment.moved(read.target.offset) for fragment in part.fragments]
        return Assembly(dtype, shape, tuple(fragments))

    def _stub(self, match: Match, name: str, shape: tuple[int, ...]) -> TensorStub | Assembly:
        """Return a tensor of the directory in NxD's layout."""
        stub = self._directory.tensor(name, self._mapping.ties_of(self._sizes))
        if stub.shape != shape:
            raise ShapeMismatch(
                f"{self._directory.where}: {name} has shape {stub.shape}, expected {shape} in {match.name}; pass the "
                "model's own config.json, or fill a model that is built by it"
            )
        rule = match.rule
        if not rule.transposed and rule.stacked is None:
            return stub
        fragments = Assembly.of(stub).fragments
        if rule.transposed:
            shape, fragments = shape[::-1], tuple(fragment.permuted((1, 0)) for fragment in fragments)
        if rule.stacked is not None:
            shape, fragments = (1, *shape), tuple(fragment.with_dim(0) for fragment in fragments)
        return Assembly(stub.dtype, shape, fragments)

    def _whole(self, match: Match, local: tuple[int, ...]) -> tuple[int, ...]:
        shape, rule = list(local), match.rule
        if rule.dim is not None and rule.dim < len(shape):
            shape[rule.dim] *= self._topology.tp
        if rule.stacked is not None and shape:
            shape[0] *= self._topology.ep
        return tuple(shape)


def _experts(match: Match, pieces: Sequence[Piece]) -> slice:
    """Return the part of a stack that the pieces cover. Hundreds of experts may be stacked, most on other ranks."""
    if match.rule.stacked is None or not pieces:
        return slice(None)
    return slice(
        min(piece.box.offset[0] for piece in pieces), max(piece.box.offset[0] + piece.box.size[0] for piece in pieces)
    )


def _covered(piece: Piece, members: Iterable[Piece]) -> list[Piece]:
    """Return the parts of ``piece`` that are in one Hugging Face tensor; other parts are elsewhere, or padding."""
    overlaps = [(member, piece.box.intersect(member.box)) for member in members]
    return [Piece(piece.local_of(common), common) for _, common in overlaps if common is not None]
