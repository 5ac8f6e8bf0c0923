"""Hugging Face tensors by the names in a mapping's rules; packed ones (see `packing`) in parts, and packed.

Reads headers only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.name_patterns import NOT_LIVE, Renaming
from nxd_ckpt.core.parameter_names import plain_names
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import IncompatibleState, KeyMismatch, ShapeMismatch, TopologyMismatch, UnsupportedState
from nxd_ckpt.formats.tensors import Assembly, Fragment, ReshapedAssembly, TensorStub, itemsize
from nxd_ckpt.hugging_face.hf_slice import HfTensor, NxdTensor, hf_slices, partition_of
from nxd_ckpt.hugging_face.mapping import Match, ModelMapping
from nxd_ckpt.hugging_face.packing import Packed, PartSlice
from nxd_ckpt.hugging_face.sizes import Sizes

_TEXT_MODELS = (
    ({"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}, "language_model.model."),
    ({"model.language_model.": "model.", "lm_head.": "lm_head."}, "model.language_model."),
)
"""Beginnings of the names of text models in multimodal ones, as transformers wrote them; the second shows which."""


class HuggingFaceTensors(Protocol):
    """A source of a model's tensors by Hugging Face's names: a directory, or a tag."""

    @property
    def where(self) -> str: ...

    @property
    def names(self) -> list[str]: ...

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub | Assembly: ...


class UnpackedTensors:
    """The tensors of ``directory`` by their names in the rules of ``mapping``, with parts instead of packed tensors.

    transformers omits the base model's prefix if it saves that alone, as in openai-community/gpt2, and loads such files
    into the model with the head too. In a multimodal model, the text model has a prefix. ``renaming`` says names in
    files otherwise.

    Raises KeyMismatch if ``renaming`` names nothing in the files.
    """

    def __init__(
        self, directory: HuggingFaceTensors, mapping: ModelMapping, sizes: Sizes, renaming: Renaming | None = None
    ) -> None:
        self._directory = directory
        self._mapping = mapping
        self._sizes = sizes
        self._sliced: dict[str, Mapping[str, PartSlice]] = {}
        self._renaming = renaming or Renaming()
        self._renaming.validate()
        if self._renaming:
            self._refuse_nothing(self._plain)

    @property
    def where(self) -> str:
        return self._directory.where

    @property
    def names(self) -> list[str]:
        in_files = {*self._in_files}.difference(self._packed_by_part.values(), self._prediction)
        return sorted(in_files.union(self._packed_by_part))

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor, or such a part of one."""
        return name in self._packed_by_part or name in self._in_files

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """Tensors in files that NxD's model does not have, by the reason."""
        outside = tuple(sorted({*self._directory.names}.difference(self._in_files.values())))
        reasons = {"for multi-token prediction": self._prediction, "outside of the text model": outside}
        return {reason: names for reason, names in reasons.items() if names}

    @cached_property
    def _prediction(self) -> tuple[str, ...]:
        return tuple(sorted(self._mapping.predicting(self._in_files, self._sizes)))

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub | Assembly:
        packed = self._packed_by_part.get(name)
        if packed is not None:
            whole = self._directory.tensor(self._in_files[packed])
            return _part(whole, self._slices(packed, whole.shape)[name])
        ties = {name: self._in_files.get(kept, kept) for name, kept in (tied or {}).items()}
        return self._directory.tensor(self._in_files.get(name, name), ties)

    @cached_property
    def _in_files(self) -> dict[str, str]:
        """Names in files, by name in the rules."""
        names = self._renamed
        prefix = self._mapping.base_prefix
        if any(name.startswith(prefix) for name in names):
            return names
        return {self._mapping.of_base(name): file for name, file in names.items()}

    @property
    def _renamed(self) -> dict[str, str]:
        """Names in files, by name in the rules, except the prefix of the base model."""
        plain = self._plain
        renaming = self._renaming
        if renaming:
            live = {renaming.live(name): file for name, file in plain.items()}
            return {name: file for name, file in live.items() if not name.startswith(NOT_LIVE)}
        for beginnings, first in _TEXT_MODELS:
            inside = [name for name in plain if name.startswith(first)]
            if inside and not self._mapping.has_tensor(inside[0]):
                return {
                    new + name.removeprefix(old): file
                    for name, file in plain.items()
                    for old, new in beginnings.items()
                    if name.startswith(old)
                }
        return plain

    @cached_property
    def _plain(self) -> dict[str, str]:
        """Names in files, by name without wrappers, such as torch.compile's; those that rules have stay."""
        plain = plain_names(self._directory.names, self.where)
        has = self._mapping.has_tensor
        return {in_file if name != in_file and has(in_file) else name: in_file for name, in_file in plain.items()}

    def _refuse_nothing(self, names: Collection[str]) -> None:
        prefix = self._renaming.prefix
        absent = sorted({*self._renaming.key_mapping.values()}.difference(names))
        if absent:
            raise KeyMismatch(f"{self.where}: key_mapping= names {first_of(absent)}, which it does not hold")
        if prefix and not any(name.startswith(prefix) for name in names):
            raise KeyMismatch(f"{self.where}: no name begins with prefix={prefix!r}; there are {first_of(names)}")

    def assembly(self, match: Match, topology: Topology, dtype: str, shape: tuple[int, ...]) -> Assembly:
        """Assemble the part, of ``shape``, that a rank of a job holds of the NxD tensor ``match``.

        Numbers are cast to ``dtype``; rows that pad the vocabulary are zero.

        Raises:
            ShapeMismatch: the model has another shape on the job's sizes.
            TopologyMismatch: the sizes do not divide it.
            KeyMismatch, PartNotFound, MalformedFile: a tensor is missing, or its file damaged.
        """
        whole = _whole(match, shape, topology)
        partition = partition_of(match, whole, self._sizes, topology.tp)
        pieces = partition.pieces(shape, topology.tp_rank, topology.tp, topology.ep_rank)
        if pieces is None:
            raise TopologyMismatch(f"{match.name} cannot have shape {shape} on each of {topology.tp} ranks")
        fragments: list[Fragment] = []
        for hf_slice in hf_slices(match, whole, self._sizes, _experts(match, pieces)):
            pairs = [(piece, member) for piece in pieces for member in hf_slice.pieces]
            common = [(*pair, box) for pair in pairs if (box := pair[0].box.intersect(pair[1].box)) is not None]
            if not common:  # its elements are other ranks'
                continue
            leaf = self._in_layout(match, hf_slice.name, hf_slice.shape)
            for piece, member, box in common:
                part = leaf.within(member.local_of(box))
                fragments += [fragment.moved(piece.local_of(box).offset) for fragment in part.fragments]
        return Assembly(dtype, shape, tuple(fragments))

    def _in_layout(self, match: Match, name: str, shape: tuple[int, ...]) -> Assembly:
        """Return a tensor in NxD's layout."""
        leaf = Assembly.of(self.tensor(name, self._mapping.ties_of(self._sizes)))
        rule = match.rule
        if leaf.shape != shape:
            raise ShapeMismatch(
                f"{self.where}: {name} has shape {leaf.shape}, expected {shape} in {match.name}; pass the model's own "
                "config.json, or fill a model that is built by it"
            )
        if not rule.transposed and rule.stacked is None:
            return leaf
        fragments = leaf.fragments
        if rule.transposed:
            shape = shape[::-1]
            fragments = tuple(fragment.permuted((1, 0)) for fragment in fragments)
        if rule.stacked is not None:
            shape = (1, *shape)
            fragments = tuple(fragment.with_dim(0) for fragment in fragments)
        return Assembly(leaf.dtype, shape, fragments)

    @cached_property
    def _packed_by_part(self) -> dict[str, str]:
        """The tensor in the files that holds each part, by part."""
        names: dict[str, str] = {}
        for name in sorted(self._in_files):
            packing = self._mapping.packed_as(name)
            if packing is not None:
                names |= dict.fromkeys(packing.names(packing.hf.match(name) or {}, self._sizes), name)
        return names

    def _slices(self, packed: str, shape: tuple[int, ...]) -> Mapping[str, PartSlice]:
        packing = self._mapping.packed_as(packed)
        if packed not in self._sliced and packing is not None:  # cached, because there are hundreds of experts
            self._sliced[packed] = packing.slices(packed, shape, self._sizes)
        return self._sliced[packed]


def _whole(match: Match, local: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    shape = list(local)
    rule = match.rule
    if rule.dim is not None and rule.dim < len(shape):
        shape[rule.dim] *= topology.tp
    if rule.stacked is not None and shape:
        shape[0] *= topology.ep
    return tuple(shape)


def _experts(match: Match, pieces: Sequence[Piece]) -> slice:
    """Return the part of a stack that the pieces cover. Hundreds of experts may be stacked, most on other ranks."""
    if match.rule.stacked is None or not pieces:
        return slice(None)
    return slice(
        min(piece.box.offset[0] for piece in pieces), max(piece.box.offset[0] + piece.box.size[0] for piece in pieces)
    )


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of Hugging Face's files, and its ``parts``, each with its slice; elements in no part are zero.

    With ``entry`` it is the optimizer's state of that name for the tensor.
    """

    weight: str
    shape: tuple[int, ...]
    parts: tuple[tuple[HfTensor, PartSlice], ...]
    entry: str | None = None

    @property
    def name(self) -> str:
        return self.weight if self.entry is None else f"{self.weight}/{self.entry}"

    @property
    def dtype(self) -> str:
        return self.parts[0][0].dtype

    @property
    def source(self) -> NxdTensor:
        """The first of the tag's tensors that hold its parts."""
        return self.parts[0][0].source

    @property
    def source_name(self) -> str:
        return ", ".join(dict.fromkeys(part.source_name for part, _ in self.parts))

    @property
    def layout(self) -> Assembly:
        """The tensor without its elements. Where parts alternate, its base has their number as one more dimension."""
        first = self.parts[0][1]
        if first.step == 1:
            return Assembly(self.dtype, self.shape, ())
        dim = first.dim
        split = (*self.shape[:dim], self.shape[dim] // first.step, first.step, *self.shape[dim + 1 :])
        return ReshapedAssembly(self.shape, Assembly(self.dtype, split, ()))

    def assembly(self, parts: Sequence[Assembly]) -> Assembly:
        """Assemble it from its parts, as `layout` has it."""
        fragments: list[Fragment] = []
        for (_, piece), assembly in zip(self.parts, parts, strict=True):
            start = piece.start
            at = piece.dim + 1
            if piece.step > 1:
                start = (*start[: at - 1], 0, start[at - 1], *start[at:])
            for fragment in assembly.fragments:
                if piece.indexed:
                    fragment = fragment.with_dim(0)
                if piece.step > 1:
                    fragment = fragment.with_dim(at)
                fragments.append(fragment.moved(start))
        return self.layout.holding(tuple(fragments))


def packed(
    tensors: Sequence[HfTensor], mapping: ModelMapping, sizes: Sizes, idle: Mapping[str, tuple[int, ...]]
) -> list[HfTensor | PackedTensor]:
    """Pack ``tensors`` as files have them, in their order; a packed tensor that lacks parts is left out.

    Of the optimizer's state, ``idle`` parts, given with their shapes, may be missing: their elements are zero.

    Raises:
        ShapeMismatch: a part's shape does not fit the other parts.
        IncompatibleState: parts have different dtypes, or only some have a state of the optimizer.
    """
    groups: dict[tuple[str, str | None], dict[str, HfTensor]] = {}
    for tensor in tensors:
        (name,) = mapping.in_files([tensor.weight])
        groups.setdefault((name, tensor.entry), {})[tensor.weight] = tensor
    tensors_in_files: list[HfTensor | PackedTensor] = []
    for (name, entry), parts in groups.items():
        packing = mapping.packed_as(name)
        if packing is None or name in parts:
            tensors_in_files += parts.values()
            continue
        part_names = packing.names(packing.hf.match(name) or {}, sizes)
        absent = [part for part in part_names if part not in parts]
        lacking = [part for part in absent if entry is None or part not in idle]
        if not lacking:
            shapes = [parts[part].shape if part in parts else idle[part] for part in part_names]
            in_order = [parts[part] for part in part_names if part in parts]
            tensors_in_files.append(_packed(packing, name, in_order, packing.shape(shapes), sizes))
        elif entry is not None:
            raise IncompatibleState(
                f"the optimizer has {entry} for {next(iter(parts))}, but not for {lacking[0]}, which is in the same "
                f"Hugging Face tensor, {name}"
            )
    return tensors_in_files


def _packed(
    packing: Packed, name: str, parts: Sequence[HfTensor], shape: tuple[int, ...], sizes: Sizes
) -> PackedTensor:
    slices = packing.slices(name, shape, sizes)
    for part in parts:
        if part.shape != slices[part.weight].shape:
            raise ShapeMismatch(
                f"{name}: its part {part.weight} has shape {part.shape}, but with the other parts it should have "
                f"{slices[part.weight].shape}; pass the model's own config.json"
            )
        if part.dtype != parts[0].dtype:
            raise IncompatibleState(
                f"{name}: its part {part.weight} was saved as {part.dtype}, but {parts[0].weight} as {parts[0].dtype}"
            )
    return PackedTensor(name, shape, tuple((part, slices[part.weight]) for part in parts), parts[0].entry)


def _part(whole: TensorStub | Assembly, piece: PartSlice) -> Assembly:
    """Return a part of the tensor."""
    if piece.step > 1:
        return Assembly.of(_spaced(whole, piece))
    part = Assembly.of(whole).within(Box(piece.start, piece.size))
    fragments = [fragment.without(0) if piece.indexed else fragment for fragment in part.fragments]
    return Assembly(part.dtype, piece.shape, tuple(fragments))


def _spaced(whole: TensorStub | Assembly, piece: PartSlice) -> TensorStub:
    if isinstance(whole, Assembly):
        raise UnsupportedState("alternating parts can only be read from files")
    offset = sum(start * stride for start, stride in zip(piece.start, whole.stride, strict=True))
    stride = tuple(each * (piece.step if dim == piece.dim else 1) for dim, each in enumerate(whole.stride))
    return TensorStub(
        whole.file,
        whole.offset + offset * itemsize(whole.dtype),
        whole.dtype,
        piece.shape,
        stride[1:] if piece.indexed else stride,
        whole.storage,
    )
