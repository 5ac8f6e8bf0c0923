"""A tag as Hugging Face tensors, each assembled from parts of saved tensors. Reads trees only, no tensor.

The cut of a parameter comes from the mapping, not from the tag's record: attributes get lost, and those of replicated
heads are incomplete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition, Piece
from nxd_ckpt.core.reads import CutIndex
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import (
    IncompatibleState,
    KeyMismatch,
    MalformedFile,
    OptimizerMismatch,
    PartNotFound,
    ShapeMismatch,
    TopologyMismatch,
)
from nxd_ckpt.formats.tensors import Assembly, TensorStub, digest_of, is_tensor
from nxd_ckpt.hugging_face.hf_slice import ALL_RANKS, HfTensor, NxdTensor, hf_slices, partition_of
from nxd_ckpt.hugging_face.mapping import Match, ModelMapping
from nxd_ckpt.hugging_face.packed_tensors import PackedTensor, packed
from nxd_ckpt.hugging_face.sizes import Sizes
from nxd_ckpt.layouts.quantization import refuse_quantized_dtype
from nxd_ckpt.reshard.resharded_model import ReshardedModel
from nxd_ckpt.reshard.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.reshard.resharded_state import ReshardedState, recorded_state
from nxd_ckpt.reshard.saved_optimizer import SavedSlot, is_number
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import refuse_per_rank
from nxd_ckpt.tag.side_by_side import are_equal

_MULTIPLES = tuple(2**power for power in range(11))
"""Multiples to which frameworks round a vocabulary (Megatron's ``make_vocab_size_divisible_by`` is 128)."""


def padding_of(match: Match, shape: tuple[int, ...], sizes: Sizes) -> list[Box]:
    """Return the parts of the NxD tensor of whole ``shape`` that no Hugging Face tensor has.

    Raises ShapeMismatch or InvalidArgument like `hf_slices`.
    """
    padding = [] if match.rule.dim is None else [Box.whole(shape)]
    for hf_slice in hf_slices(match, shape, sizes) if padding else ():
        for piece in hf_slice.pieces:
            padding = [rest for box in padding for rest in box.minus(piece.box)]
    return [box for box in padding if box.numel]


def is_rounded(length: int, rows: int, tp: int) -> bool:
    """Return whether ``length`` is ``rows`` rounded up to a multiple of a power of two, or of that times ``tp``."""
    multiples = {size for power in _MULTIPLES for size in (power, power * tp)}
    return any(length == rows + -rows % size for size in multiples)


def _rows_text(box: Box, dim: int) -> str:
    return f"rows {box.offset[dim]} to {box.offset[dim] + box.size[dim] - 1}"


_SHOWN = 8


class MappedTag:
    """The model of the tag ``opened`` as Hugging Face tensors, by ``mapping``.

    Args:
        opened: the tag.
        mapping: mapping of the model.
        sizes: sizes of the model, and the number of copies of its key-value heads.
        master_weights: True to prefer the optimizer's master weights, in float32, if it has them.
        param_names: the optimizer's parameter names as saved, by stage and group, where the tag has none.
    """

    def __init__(
        self,
        opened: OpenTag,
        mapping: ModelMapping,
        sizes: Sizes,
        *,
        master_weights: bool = False,
        param_names: Sequence[Sequence[Sequence[str]]] | None = None,
    ) -> None:
        refuse_per_rank(opened, "model")
        self._opened = opened
        self._mapping = mapping
        self.sizes = sizes
        self._prefers_masters = master_weights
        may_be_gathered = opened.manifest is None and opened.topology.tp > 1 and opened.parts.model
        gathered = mapping.whole_lengths(opened.model_names(), sizes) if may_be_gathered else {}
        self._recorded = recorded_state(opened, Topology(), saved_names=param_names, gathered=gathered)
        self._latest: tuple[tuple[str, str | None], Assembly] | None = None

    @cached_property
    def _model(self) -> ReshardedModel:
        """The model of the saving ranks."""
        if not self._opened.parts.model:
            raise PartNotFound(f"{self._opened.where} was saved without a model")
        return self._recorded.model

    @cached_property
    def _state(self) -> ReshardedState:
        """The tag as whole tensors, cut as the mapping says."""
        sources = {tensor.source.name: tensor.source for tensor in self._mapped.values()}
        return self._recorded.cut_as({name: source.partition for name, source in sources.items()})

    @cached_property
    def unknown(self) -> list[str]:
        """Names in the tag that no rule maps."""
        return self._mapping.split(self._model.stages)[1]

    @cached_property
    def tensors(self) -> list[HfTensor]:
        """Hugging Face tensors of all mapped names, in the tag's order, without tied ones that files leave out.

        Raises:
            ShapeMismatch, TopologyMismatch, InvalidArgument: shapes and sizes do not fit; the message names them.
            IncompatibleState: two tensors of the tag are the same Hugging Face tensor, or tied ones differ.
        """
        return [tensor for name, tensor in self._mapped.items() if name not in self._tied]

    @property
    def file_tensors(self) -> list[HfTensor | PackedTensor]:
        """Hugging Face tensors as files have them, with parts packed. Raises the errors of `packed` too."""
        return self.packed(self.tensors)

    def packed(
        self, tensors: Sequence[HfTensor], idle: Mapping[str, tuple[int, ...]] | None = None
    ) -> list[HfTensor | PackedTensor]:
        """Pack ``tensors``, or the optimizer's state for them, as files have them. Raises the errors of `packed`."""
        return packed(tensors, self._mapping, self.sizes, idle or {})

    def in_file(self, name: str) -> str:
        """Return the name in files of the tensor that rules call ``name``."""
        return self._mapping.in_files([name])[0]

    @property
    def ties(self) -> Mapping[str, str]:
        """Pairs of tied tensors: the one that files leave out, and the one that they hold."""
        return self._mapping.tied if self._mapping.are_tied(self.sizes) else {}

    @property
    def left_out(self) -> set[str]:
        """Tensors of the tag that files leave out, because they are tied to others."""
        return {tensor.source.name for tensor in self._tied.values()}

    @property
    def missing(self) -> list[str]:
        """Hugging Face tensors that every such model has, but the tag does not."""
        names = {tensor.name for tensor in self.tensors}
        absent = self._mapping.in_files(name for name in self._mapping.required(self.sizes) if name not in names)
        return [name for name in absent if name not in names]

    def require_all(self) -> None:
        """Check by names and digests that this is the tag of such a model; of tensors, only padding is read.

        Raises:
            KeyMismatch: names are not mapped, or tensors are missing, or config.json says that there are none.
            MalformedFile: a rank lacks a tensor that others have.
            ShapeMismatch: rows or heads that are not padding would be left out.
            TopologyMismatch: ranks that should hold equal values hold different ones.
            OptimizerMismatch: master weights are to be used, but their parameters have no names.
        """
        if self._prefers_masters and self._opened.parts.master_weights:
            self.named_optimizer()
        if self.unknown:
            self._mapping.matches(self.unknown)
        if self.missing:
            raise KeyMismatch(
                f"{self._opened.where} lacks {', '.join(self.missing[:_SHOWN])} ({len(self.missing)} tensors), which "
                f"every model of mapping {self._mapping.name!r} has with this config.json; pass the model's own"
            )
        names = dict.fromkeys(tensor.name for tensor in self.tensors)
        self._mapping.refuse_misplaced(names, self.sizes)
        self._mapping.refuse_options(names, self.sizes, self._opened.where)
        for source in {tensor.source.name: tensor.source for tensor in self.tensors}.values():
            self._refuse_other_copies(source)
        self.refuse_lost_values(self.tensors)

    def refuse_lost_values(self, tensors: Sequence[HfTensor]) -> None:
        """Check that the removed parts of ``tensors`` are padding: explained by the sizes, and zero. Bounded memory.

        Raises:
            ShapeMismatch: they may be trained rows or heads; the message has them, config.json's size, and the remedy.
        """
        sources = {tensor.source.name: tensor for tensor in tensors}
        cut: list[str] = []
        with self._opened.reader() as reader:
            for name, tensor in sources.items():
                rule = tensor.source.match.rule
                rows = rule.members[0].rows
                for box in padding_of(tensor.source.match, tensor.source.shape, self.sizes):
                    length = tensor.source.shape[rule.dim or 0]
                    if rows is not None and not is_rounded(length, self.sizes.get(rows), self._opened.topology.tp):
                        why = "No rounding of the vocabulary gives so many rows, so they may be trained"
                        raise self._lost_values(tensor, box, why)
                    nonzero: list[int] = []

                    def note_nonzero(number: int, parts: list[torch.Tensor], nonzero: list[int] = nonzero) -> None:
                        if any(bool((part != 0).any()) for part in parts):
                            nonzero.append(number)

                    reader.visit(self._leaf(tensor).within(box), name, note_nonzero)
                    reader.finish()
                    if nonzero:
                        why = "They are not zero, so they are not padding, and would be lost"
                        raise self._lost_values(tensor, box, why)
                    cut.append(f"{name} {_rows_text(box, rule.dim or 0)}")
        if cut:
            logger.info("%s: padding of zeros is left out: %s", self._opened.where, "; ".join(cut[:5]))

    def _lost_values(self, tensor: HfTensor, box: Box, why: str) -> ShapeMismatch:
        rule = tensor.source.match.rule
        rows = rule.members[0].rows
        dim = rule.dim or 0
        length = tensor.source.shape[dim]
        key = self.sizes.key(rows or "heads")
        remedy = (
            f"pass a config.json with {key} {length}, which keeps all rows"
            if rows
            else f"pass the config.json of the model that was trained, with all of its {key}"
        )
        return ShapeMismatch(
            f"{self._opened.where}: {tensor.source.name} has {length} rows along dimension {dim}, but config.json has "
            f"{key} {self.sizes.get(rows or 'heads')}: {_rows_text(box, dim)} are in no tensor of the result. {why}; "
            f"{remedy}"
        )

    def named_optimizer(self) -> ReshardedOptimizer:
        """Return the optimizer. Raises PartNotFound without one, OptimizerMismatch if its parameters have no names."""
        optimizer = self._recorded.optimizer
        if self._opened.parts.optimizer is None:
            raise PartNotFound(f"{self._opened.where} was saved without an optimizer")
        if any(map(is_number, optimizer.slots)):
            raise OptimizerMismatch(
                f"{self._opened.where} does not name the parameters of its optimizer; pass saved_param_names=: for "
                "each pipeline stage, for each param group (experts' last), the names in order"
            )
        return optimizer

    def slot(self, source: NxdTensor) -> SavedSlot | None:
        """Return the optimizer's slot for a tensor, of the first rank that has it; None if there is none.

        Raises IncompatibleState if other ranks saved more, or less.
        """
        return self._state.optimizer.slot(source.name, source.spec)

    def assembly(self, tensor: HfTensor | PackedTensor) -> Assembly:
        """Assemble a Hugging Face tensor, row-major as in its file.

        Raises:
            PartNotFound: a tensor is in no file.
        """
        if isinstance(tensor, PackedTensor):
            return tensor.assembly([self.assembly(part) for part, _ in tensor.parts])
        rule = tensor.source.match.rule
        leaf = self._leaf(tensor)
        parts = [(piece, leaf.within(piece.box)) for piece in tensor.hf_slice.once]
        fragments = [fragment.moved(piece.local.offset) for piece, part in parts for fragment in part.fragments]
        if rule.stacked is not None:
            fragments = [fragment.without(0) for fragment in fragments]
        if rule.transposed:
            dims = len(tensor.shape)
            order = (*range(dims - 2), dims - 1, dims - 2)
            fragments = [fragment.permuted(order) for fragment in fragments]
        return Assembly(tensor.dtype, tensor.shape, tuple(fragments))

    @cached_property
    def _mapped(self) -> dict[str, HfTensor]:
        """All Hugging Face tensors of mapped names, by name."""
        tensors: dict[str, HfTensor] = {}
        for match in self._mapping.split(self._model.stages)[0]:
            source = self._source(match)
            slices = hf_slices(match, source.shape, self.sizes)
            forms = [(hf_slice.name, hf_slice.shape) for hf_slice in slices]
            self._mapping.refuse_shapes(match.rule, forms, self.sizes, self._opened.where, ALL_RANKS)
            for hf_slice in slices:
                if hf_slice.name in tensors:
                    first = tensors[hf_slice.name].source.name
                    raise IncompatibleState(
                        f"{self._opened.where}: {hf_slice.name} would come from {first} and from {match.name}; the "
                        "mapping must choose one"
                    )
                tensors[hf_slice.name] = HfTensor(hf_slice, source.dtype, source)
        return tensors

    def _source(self, match: Match) -> NxdTensor:
        leaf = self._model.value(match.name)
        form = self._model.form(match.name)
        if form is None:
            raise MalformedFile(f"{self._opened.where}: {match.name} is {type(leaf).__name__}, expected a tensor")
        dtype, shape = form
        tp = self._opened.topology.tp
        whole = self._whole(match, shape, tp)
        # If every rank holds the whole tensor, it was never cut.
        partition = partition_of(match, whole, self.sizes, 1 if whole == shape else tp)
        source = NxdTensor(match, self._model.stages[match.name][0], dtype, shape, whole, partition)
        if self._prefers_masters and self._recorded.has_master(match.name):
            return replace(source, dtype="float32")
        refuse_quantized_dtype(match.name, dtype, self._opened.where)
        return source

    def _whole(self, match: Match, local: tuple[int, ...], tp: int) -> tuple[int, ...]:
        rule = match.rule
        shape = list(local)
        if rule.dim is not None and rule.dim < len(shape) and not self._holds_copies:
            rows = rule.members[0].rows
            if rows is None or shape[rule.dim] < self.sizes.get(rows):
                shape[rule.dim] *= tp
        if rule.stacked is not None and shape:
            shape[0] *= self._opened.topology.ep
        return tuple(shape)

    @cached_property
    def _holds_copies(self) -> bool:
        """True if by the tag's record every rank holds each tensor whole, and all have the shapes of config.json.

        The record alone is no proof: of tensors whose attributes got lost, ranks may hold equal parts, such as zeros.
        """
        recorded = self._recorded.context.recorded
        matches = [match for match in self._mapping.split(self._model.stages)[0] if match.rule.dim is not None]
        return all(self._is_whole(match, recorded.get(match.name)) for match in matches)

    def _is_whole(self, match: Match, recorded: ParameterSpec | None) -> bool:
        if recorded is None or recorded.partition != Partition():
            return False
        try:
            slices = hf_slices(match, recorded.shape, self.sizes)
            forms = [(hf_slice.name, hf_slice.shape) for hf_slice in slices]
            self._mapping.refuse_shapes(match.rule, forms, self.sizes, self._opened.where)
        except ShapeMismatch:
            return False
        return True

    @cached_property
    def _tied(self) -> dict[str, HfTensor]:
        """Tensors that are tied to others, which files hold instead, by name."""
        tied = {name: self._mapped[name] for name, kept in self.ties.items() if {name, kept} <= self._mapped.keys()}
        for tensor in tied.values():
            self._refuse_untied(tensor, self._mapped[self.ties[tensor.name]])
        return tied

    def _refuse_untied(self, tensor: HfTensor, kept: HfTensor) -> None:
        """Raise IncompatibleState unless every tensor-parallel rank saved the same values for both."""
        for tp_rank in range(self._opened.topology.tp):
            pair = (
                self._model.saved_by(each.source.pp_rank, CutIndex(tp_rank)).get(each.source.name)
                for each in (kept, tensor)
            )
            first, second = pair
            if not isinstance(first, (TensorStub, Assembly)) or not isinstance(second, (TensorStub, Assembly)):
                continue  # of a rank that lacks one: `require_all` refuses that
            if not are_equal(first, second, tensor.source.name, self._opened.reader):
                raise IncompatibleState(
                    f"{self._opened.where}: config.json ties {tensor.name} to {kept.name}, but it holds different "
                    "values for them; set tie_word_embeddings to false in this model's config.json"
                )

    def _leaf(self, tensor: HfTensor) -> Assembly:
        """Return the whole tensor that has it, from model or optimizer."""
        key = tensor.source.name, tensor.entry
        if self._latest is None or self._latest[0] != key:  # those of a stack of experts are asked for in turn
            leaf = self._weight(tensor.source) if tensor.entry is None else self.entry(tensor.source, tensor.entry)
            if not isinstance(leaf, (TensorStub, Assembly)):
                what = f"optim/{tensor.source_name}" if tensor.entry else f"model/{key[0]}, nor its master weights"
                raise PartNotFound(f"{self._opened.where}: no file holds {what}")
            self._latest = key, Assembly.of(leaf)
        return self._latest[1]

    def entry(self, source: NxdTensor, entry: str) -> Any:
        """Return state of the optimizer for a tensor. Raises IncompatibleState if ranks saved other values."""
        return self._state.optimizer.value(source.name, entry, source.spec)

    def _weight(self, source: NxdTensor) -> Any:
        master = self._state.master_weight(source.name, source.spec) if self._prefers_masters else None
        if master is not None:
            return master
        return self._state.weight(source.name, self._state.model.leaf(source.name, source.spec), source.spec)

    def _refuse_other_copies(self, source: NxdTensor) -> None:
        """Raise TopologyMismatch if ranks that by the mapping hold the same part saved different bytes.

        This detects a wrong kv_size_multiplier, hardware or mapping, by digests, if the files have any. Raises
        MalformedFile if a tensor-parallel rank lacks the tensor, even if only the first rank's is read.
        """
        tp = self._opened.topology.tp
        first: dict[Any, tuple[int, Any]] = {}
        slices = hf_slices(source.match, source.shape, self.sizes) if tp > 1 else ()
        members = [(hf_slice.name, piece) for hf_slice in slices for piece in hf_slice.pieces]
        for tp_rank in range(tp):
            leaf = self._model.saved_by(source.pp_rank, CutIndex(tp_rank)).get(source.name)
            if not is_tensor(leaf):
                raise MalformedFile(
                    f"{self._opened.where}: tensor-parallel rank {tp_rank} of pipeline stage {source.pp_rank} has no "
                    f"tensor {source.name}, but the first rank has it; the tag mixes files of two saves"
                )
            digest = digest_of(leaf)
            parts = tuple(self._parts(source, members, tp_rank))
            if digest is None or not parts:  # padding
                continue
            first_rank, expected = first.setdefault(parts, (tp_rank, digest))
            if digest != expected:
                raise TopologyMismatch(
                    f"{self._opened.where}: by the mapping, tensor-parallel ranks {first_rank} and {tp_rank} hold the "
                    f"same part of {source.name}, but they saved different values; pass the mapping, "
                    "kv_size_multiplier and hardware of the job that saved it (now kv_size_multiplier="
                    f"{self.sizes.kv_size_multiplier}, hardware={self.sizes.hardware!r})"
                )

    def _parts(
        self, source: NxdTensor, members: Sequence[tuple[str, Piece]], tp_rank: int
    ) -> Iterator[tuple[Box, str, Box]]:
        """Yield a rank's parts of Hugging Face's tensors: (its box, name, their box); equal for equal parts."""
        for piece in source.partition.pieces(source.local_shape, tp_rank, self._opened.topology.tp, 0) or ():
            for name, member in members:
                common = piece.box.intersect(member.box)
                if common is not None:
                    yield piece.local_of(common), name, member.local_of(common)
