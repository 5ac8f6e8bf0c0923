"""A Hugging Face directory as tensors of an NxD job: what a rank holds, as parts of its files. Reads headers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """What holds a model's tensors by Hugging Face's names: a directory, or a tag that is seen so."""

    @property
    def where(self) -> str: ...

    @property
    def names(self) -> list[str]: ...

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub | Assembly: ...


class MappedDirectory:
    """The model of ``directory`` by ``mapping``, for the rank of a job that ``topology`` is seen from."""

    def __init__(
        self, directory: HuggingFaceTensors, mapping: ModelMapping, sizes: Sizes, topology: Topology
    ) -> None:
        self._directory, self._mapping, self._sizes, self._topology = directory, mapping, sizes, topology

    def assembly(self, match: Match, dtype: str, shape: tuple[int, ...]) -> Assembly:
        """The NxD tensor that ``match`` names, of ``shape`` on each rank: only this rank's slices of files.

        Numbers are cast to ``dtype``; rows that pad the vocabulary are zero.

        Raises:
            ShapeMismatch: it is not that of the directory's model, on this job's sizes.
            TopologyMismatch: the sizes do not divide it.
            KeyMismatch, PartNotFound, MalformedFile: the directory lacks a tensor, or is damaged.
        """
        whole = self._whole(match, shape)
        partition = partition_of(match, whole, self._sizes, self._topology.tp)
        pieces = partition.pieces(shape, self._topology.tp_rank, self._topology.tp, self._topology.ep_rank)
        if pieces is None:
            raise TopologyMismatch(f"{match.name}: shape {shape} on each of {self._topology.tp} ranks cannot be")
        fragments: list[Fragment] = []
        for one in hf_slices(match, whole, self._sizes):  # one by one: hundreds of experts may be stacked
            wanted = [part for piece in pieces for part in _covered(piece, one.pieces)]
            if not wanted:
                continue
            stub = self._stub(match, one.name, one.shape)
            for read in plan_reads(wanted, [(stub, member) for member in one.pieces], match.name):
                part = Assembly.of(read.holder).within(read.source)
                fragments += [fragment.moved(read.target.offset) for fragment in part.fragments]
        return Assembly(dtype, shape, tuple(fragments))

    def _stub(self, match: Match, name: str, shape: tuple[int, ...]) -> TensorStub | Assembly:
        """A tensor of the directory as it lies in NxD's."""
        tied = self._mapping.tied if self._mapping.are_tied(self._sizes) else {}
        stub = self._directory.tensor(name, tied)
        if stub.shape != shape:
            raise ShapeMismatch(
                f"{self._directory.where}: {name} has shape {stub.shape}, expected {shape} by the live {match.name}"
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


def _covered(piece: Piece, members: Iterable[Piece]) -> list[Piece]:
    """The parts of ``piece`` that are in a Hugging Face tensor: others are in other tensors, or padding."""
    found = [(member, piece.box.intersect(member.box)) for member in members]
    return [Piece(piece.local_of(common), common) for _, common in found if common is not None]
