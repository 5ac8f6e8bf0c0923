"""Hugging Face tensors that hold several parts (:mod:`nxd_ckpt.core.packing`): the parts as tensors of their own, and
put together again. Reads headers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.mapping import ModelMapping
from nxd_ckpt.core.packing import Packed, PartSlice
from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.errors import IncompatibleState, ShapeMismatch, UnsupportedState
from nxd_ckpt.formats.tensors import Assembly, Fragment, TensorStub, itemsize
from nxd_ckpt.hugging_face.base_model import HeadedTensors
from nxd_ckpt.hugging_face.mapped_directory import HuggingFaceTensors
from nxd_ckpt.hugging_face.mapped_tensors import HfTensor, NxdTensor


class UnpackedTensors:
    """The tensors of ``directory``, parts of packed ones in place of these."""

    def __init__(self, directory: HuggingFaceTensors, mapping: ModelMapping, sizes: Sizes) -> None:
        self._directory, self._mapping, self._sizes = HeadedTensors(directory, mapping), mapping, sizes
        self._sliced: dict[str, Mapping[str, PartSlice]] = {}

    @property
    def where(self) -> str:
        return self._directory.where

    @property
    def names(self) -> list[str]:
        return sorted({*self._directory.names}.difference(self._held.values()).union(self._held))

    def tensor(self, name: str, tied: Mapping[str, str] | None = None) -> TensorStub | Assembly:
        held = self._held.get(name)
        if held is None:
            return self._directory.tensor(name, tied)
        whole = self._directory.tensor(held)
        return _part(whole, self._slices(held, whole.shape)[name])

    @cached_property
    def _held(self) -> dict[str, str]:
        """By part, the tensor of the files that holds it."""
        found: dict[str, str] = {}
        for name in self._directory.names:
            packed = self._mapping.packed_as(name)
            if packed is not None:
                found |= dict.fromkeys(packed.names(packed.hf.match(name) or {}, self._sizes), name)
        return found

    def _slices(self, held: str, shape: tuple[int, ...]) -> Mapping[str, PartSlice]:
        packed = self._mapping.packed_as(held)
        if held not in self._sliced and packed is not None:  # experts are hundreds: once for all of them
            self._sliced[held] = packed.slices(held, shape, self._sizes)
        return self._sliced[held]


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of Hugging Face's files, and its ``parts``, each with its slice; with ``entry``, that state of the
    optimizer's for it."""

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
    def alternates(self) -> bool:
        """Whether its parts take turns, element by element."""
        return self.parts[0][1].step > 1

    def assembly(self, parts: Sequence[Assembly]) -> Assembly:
        """It, made of its parts. Where these alternate, that dimension is two: as long as a part, and their number."""
        first = self.parts[0][1]
        shape, at = self.shape, first.dim + 1  # the new dimension
        if self.alternates:
            shape = (*shape[: at - 1], shape[at - 1] // first.step, first.step, *shape[at:])
        fragments: list[Fragment] = []
        for (part, piece), assembly in zip(self.parts, parts, strict=True):
            start = piece.start
            if self.alternates:
                start = (*start[: at - 1], 0, start[at - 1], *start[at:])
            for fragment in assembly.fragments:
                if len(fragment.target.size) > len(part.shape):
                    fragment = fragment.without(0)
                if piece.indexed:
                    fragment = fragment.with_dim(0)
                if self.alternates:
                    fragment = fragment.with_dim(at)
                fragments.append(fragment.moved(start))
        return Assembly(self.dtype, shape, tuple(fragments))


def packed(tensors: Sequence[HfTensor], mapping: ModelMapping, sizes: Sizes) -> list[HfTensor | PackedTensor]:
    """``tensors`` as files have them, in their order; one that lacks parts is left out.

    Raises:
        ShapeMismatch: parts of other shapes than the others.
        IncompatibleState: parts of other dtypes, or state of the optimizer's for some parts only.
    """
    groups: dict[tuple[str, str | None], dict[str, HfTensor]] = {}
    for tensor in tensors:
        (held,) = mapping.in_files([tensor.weight])
        groups.setdefault((held, tensor.entry), {})[tensor.weight] = tensor
    found: list[HfTensor | PackedTensor] = []
    for (held, entry), parts in groups.items():
        how = mapping.packed_as(held)
        if how is None or held in parts:
            found += parts.values()
            continue
        names = how.names(how.hf.match(held) or {}, sizes)
        absent = [name for name in names if name not in parts]
        if not absent:
            found.append(_put_together(how, held, [parts[name] for name in names], sizes))
        elif entry is not None:
            raise IncompatibleState(
                f"the optimizer has {entry} for {next(iter(parts))}, and not for {absent[0]}, which is in the same "
                f"Hugging Face tensor, {held}"
            )
    return found


def _put_together(how: Packed, held: str, parts: Sequence[HfTensor], sizes: Sizes) -> PackedTensor:
    shape = how.shape([part.shape for part in parts])
    slices = how.slices(held, shape, sizes)
    for part in parts:
        if part.shape != slices[part.weight].shape:
            raise ShapeMismatch(
                f"{held}: its part {part.weight} has shape {part.shape}, beside the other parts it should have "
                f"{slices[part.weight].shape}; is this the model's config.json?"
            )
        if part.dtype != parts[0].dtype:
            raise IncompatibleState(
                f"{held}: its part {part.weight} was saved as {part.dtype}, {parts[0].weight} as {parts[0].dtype}"
            )
    return PackedTensor(held, shape, tuple((part, slices[part.weight]) for part in parts), parts[0].entry)


def _part(held: TensorStub | Assembly, piece: PartSlice) -> Assembly:
    """The part of the tensor."""
    if piece.step > 1:
        return Assembly.of(_spaced(held, piece))
    part = Assembly.of(held).within(Box(piece.start, piece.size))
    fragments = [fragment.without(0) if piece.indexed else fragment for fragment in part.fragments]
    return Assembly(part.dtype, piece.shape, tuple(fragments))


def _spaced(held: TensorStub | Assembly, piece: PartSlice) -> TensorStub:
    if isinstance(held, Assembly):
        raise UnsupportedState("parts that alternate are read from files only")
    offset = sum(start * stride for start, stride in zip(piece.start, held.stride, strict=True))
    stride = tuple(each * (piece.step if dim == piece.dim else 1) for dim, each in enumerate(held.stride))
    return TensorStub(
        held.file,
        held.offset + offset * itemsize(held.dtype),
        held.dtype,
        piece.shape,
        stride[1:] if piece.indexed else stride,
        held.storage,
    )
