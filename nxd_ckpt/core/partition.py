"""Cuts of a parameter over ranks: a function from coordinates to pieces of the global tensor.

A `Piece` maps a rectangle of a rank's *local* tensor to a rectangle of the *global* one. Every kind of cut gives a list
of pieces: a plain cut one, a strided or fused one (QKV, gate-up) one per section, a ZeRO-1 shard the parts of these in
its rows. Padding rows of a shard belong to no piece.

The cuts, from outside in (source: neuronx_distributed 0.9 to 0.18; ``trace.trace.shard_children`` does all but the
last at once, training uses ``parallel_layers.layers.create_local_weight``):

1. expert parallel: dimension 0 in equal parts, by ``ep_rank``;
2. tensor parallel: ``partition_dim``, see `Partition`;
3. ZeRO-1: dimension 0 of the rest, padded, by the rank in the sharding group (torch_xla's
   ``ZeroRedundancyOptimizer``).

Pipeline parallelism cuts no tensor; it assigns names to ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json import dumps
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.option_classes import Options
from nxd_ckpt.errors import InvalidArgument, MalformedFile


@dataclass(frozen=True)
class Section(Options):
    """One tensor of a fused parameter. Sections follow each other along ``partition_dim``, and are cut separately.

    The ``size`` elements of the *whole* section along that dimension are cut into ``num_partitions`` equal blocks.
    Rank ``r`` holds block ``rank_ordering[r]``, or ``r`` without one, modulo ``num_partitions``.
    """

    size: int
    num_partitions: int = 1
    rank_ordering: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("size of a section", self.size, 0)
        check_order(self.num_partitions, self.rank_ordering)
        if self.size % self.num_partitions:
            raise InvalidArgument(
                f"partition: a section of {self.size} elements cannot be cut into {self.num_partitions} equal blocks"
            )

    @property
    def block(self) -> int:
        return self.size // self.num_partitions

    def fits(self, tp: int) -> bool:
        """Return whether each of ``tp`` ranks holds one partition, and each partition is held equally often."""
        return tp % self.num_partitions == 0 and (self.rank_ordering is None or len(self.rank_ordering) == tp)

    def partition_of(self, tp_rank: int) -> int:
        """Return the partition that a rank holds."""
        return (tp_rank if self.rank_ordering is None else self.rank_ordering[tp_rank]) % self.num_partitions

    def tp_ranks_of(self, partition: int, tp: int) -> Sequence[int]:
        """Return the ranks that hold a partition, several if ``num_partitions`` is below ``tp``."""
        if self.rank_ordering is None:
            return range(partition, tp, self.num_partitions)
        return [tp_rank for tp_rank in range(tp) if self.partition_of(tp_rank) == partition]


def blocks_in(start: int, length: int, block: int, count: int) -> range:
    """Return the blocks that overlap ``start <= index < start + length``, of ``count`` equal ones from 0 on."""
    if length <= 0 or block <= 0:
        return range(0)
    return range(max(0, start // block), min(count, -(-(start + length) // block)))


def check_count(what: str, value: object, least: int) -> None:
    """Raise InvalidArgument unless ``value`` is an int of at least ``least``."""
    if type(value) is not int or value < least:
        raise InvalidArgument(f"partition: {what} must be an int of at least {least}, found {value!r}")


def check_order(num_partitions: int, rank_ordering: tuple[int, ...] | None) -> None:
    """Raise InvalidArgument unless the ordering, if any, has every one of the partitions."""
    check_count("num_partitions", num_partitions, 1)
    if rank_ordering is None:
        return
    for rank in rank_ordering:
        check_count("each of rank_ordering", rank, 0)
    if {rank % num_partitions for rank in rank_ordering} != set(range(num_partitions)):
        raise InvalidArgument(
            "partition: rank_ordering must give each tensor-parallel rank one partition, and each of the "
            f"{num_partitions} to some rank; found {rank_ordering}"
        )


@dataclass(frozen=True, order=True)
class Piece:
    """A rectangle ``local`` of the rank's tensor that holds the elements ``box`` of the global one; equal sizes."""

    local: Box
    box: Box

    def within(self, window: Box) -> Piece | None:
        """Return the part inside ``window`` of the local tensor, with local offsets counted from the window's."""
        common = self.local.intersect(window)
        if common is None:
            return None
        return Piece(common.shifted(window.offset), _moved(common, self.local, self.box))

    def local_of(self, part: Box) -> Box:
        """Return the place in the local tensor of ``part``, a box of the global tensor inside ``box``."""
        return _moved(part, self.box, self.local)


@dataclass(frozen=True)
class SectionLayout:
    """One section on the ranks: the ``local`` rectangle of partition i holds ``first``, moved by i blocks."""

    section: Section
    local: Box
    first: Box
    dim: int | None

    def piece(self, partition: int) -> Piece:
        if self.dim is None:
            return Piece(self.local, self.first)
        block = self.section.block
        return Piece(self.local, Box(self.first.narrowed(self.dim, partition * block, block).offset, self.local.size))

    def partitions_in(self, box: Box) -> range:
        """Return the partitions whose pieces overlap ``box`` along the dimension that is cut."""
        if self.dim is None:
            return range(1)
        return blocks_in(
            box.offset[self.dim] - self.first.offset[self.dim],
            box.size[self.dim],
            self.section.block,
            self.section.num_partitions,
        )


@dataclass(frozen=True)
class Partition(Options):
    """The cut of one parameter, in the terms of NxD's parameter attributes of the same names.

    ``partition_dim`` is cut into ``num_partitions * partition_stride`` equal blocks; partition ``i`` holds the blocks
    ``i, i + num_partitions, ...`` (source: ``create_local_weight``). Rank ``r`` holds partition ``rank_ordering[r]``,
    or ``r`` without one, modulo ``num_partitions`` (source: ``shard_children``). So with fewer partitions than ranks,
    several ranks hold each. ``expert`` tensors are first cut along dimension 0 over the expert-parallel ranks.

    ``fused`` describes a parameter that holds several tensors, each cut by itself, which those attributes cannot
    describe. NxD's ``GQAQKVColumnParallelLinear`` with ``fuse_qkv`` makes one parameter of q, k and v, without
    attributes. With ``kv_size_multiplier = m`` its k and v, fused or not, are ``m`` copies of a tensor in ``tp / m``
    partitions, although their attributes say ``tp``: rank ``r`` holds ``r % (tp / m)`` on Trn1, ``r // m`` on Trn2
    (source: ``modules.qkv_linear`` and ``scripts/checkpoint_converter.py``). For tp = 4, m = 2 on Trn1, unfused:

        Partition(0, num_partitions=2)        # on Trn2, with rank_ordering=(0, 0, 1, 1)

    and fused, with q's heads kept beside their k and v heads:

        Partition(0, fused=(Section(64, 4, (0, 2, 1, 3)), Section(16, 2), Section(16, 2)))

    ``known`` is False if the saved values contradict the live parameter's attributes (the commit compares replicas);
    such a tensor is read by its own rank only.

    Raises:
        InvalidArgument: a count below 1, an ordering without one of the partitions, or ``fused`` together with the
            attributes that it replaces.
    """

    partition_dim: int | None = None
    partition_stride: int = 1
    num_partitions: int = 1
    rank_ordering: tuple[int, ...] | None = None
    expert: bool = False
    known: bool = True
    fused: tuple[Section, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partition_dim is not None:
            check_count("partition_dim, counted from the front,", self.partition_dim, 0)
        check_count("partition_stride", self.partition_stride, 1)
        check_order(self.num_partitions, self.rank_ordering)
        instead = (self.partition_stride, self.num_partitions, self.rank_ordering) != (1, 1, None)
        if self.fused and (instead or self.partition_dim is None):
            raise InvalidArgument(
                "partition: fused needs partition_dim, and no partition_stride, num_partitions or rank_ordering: each "
                "section has its own"
            )

    def __str__(self) -> str:
        """Return the JSON by which a caller describes it."""
        return dumps(self.to_json())

    @property
    def replicated_over_tp(self) -> bool:
        if self.partition_dim is None:
            return True
        return all(section.num_partitions == 1 for section in self.fused or (self,))

    def check_shape(self, name: str, local_shape: Sequence[int]) -> None:
        """Raise InvalidArgument if a tensor ``name`` of this shape lacks a dimension that is cut."""
        dim = 0 if self.partition_dim is None and self.expert else self.partition_dim
        if dim is not None and dim >= len(local_shape):
            raise InvalidArgument(
                f"{name}: its partition cuts dimension {dim}, counted from 0, but it has {len(local_shape)} dimensions "
                f"(shape {tuple(local_shape)})"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from a replicated parameter's, so that manifests stay small."""
        plain = {"partition_stride": 1, "num_partitions": 1, "expert": False, "known": True, "fused": []}
        return {key: value for key, value in self._fields().items() if value != plain.get(key)}

    def _fields(self) -> dict[str, Any]:
        return {
            "partition_dim": self.partition_dim,
            "partition_stride": self.partition_stride,
            "num_partitions": self.num_partitions,
            "rank_ordering": _as_list(self.rank_ordering),
            "expert": self.expert,
            "known": self.known,
            "fused": [[part.size, part.num_partitions, _as_list(part.rank_ordering)] for part in self.fused],
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Partition:
        try:
            fused = tuple(Section(size, count, order) for size, count, order in fields.get("fused", ()))
            made = Partition(**{**fields, "fused": fused})
            if made._fields() != {**made._fields(), **fields}:
                raise ValueError("a value of another type")  # such as "2": an argument may be it, a file not
            return made
        except (TypeError, ValueError) as error:
            raise MalformedFile(f"partition {fields!r} is invalid, or of a newer version: {error}") from error

    def global_shape(self, local_shape: Iterable[int], ep: int) -> tuple[int, ...]:
        """Return the shape of the whole parameter, from its shape on each rank."""
        shape = list(local_shape)
        if self.fused and self.partition_dim is not None:
            shape[self.partition_dim] = sum(section.size for section in self.fused)
        elif self.partition_dim is not None:
            shape[self.partition_dim] *= self.num_partitions
        if self.expert:
            shape[0] *= ep
        return tuple(shape)

    def pieces(self, local_shape: tuple[int, ...], tp_rank: int, tp: int, ep_rank: int) -> tuple[Piece, ...] | None:
        """Return the pieces of the rank at these coordinates; None if the cut is irregular."""
        return _pieces(self, local_shape, tp_rank, tp, ep_rank)

    def section_layouts(self, local_shape: tuple[int, ...], tp: int, ep_rank: int) -> list[SectionLayout] | None:
        """Return the sections over the ``tp`` ranks of this ``ep_rank``; None if the cut is irregular."""
        sections = self._sections(local_shape)
        if sections is None or not all(section.fits(tp) for section in sections):
            return None
        local = Box.whole(local_shape)
        dim = None if self.replicated_over_tp else self.partition_dim
        whole = Box.whole(self.global_shape(local_shape, ep=1))
        if self.expert:
            whole = whole.narrowed(0, ep_rank * whole.size[0], whole.size[0])
        if dim is None:
            return [SectionLayout(sections[0], local, whole, None)]
        return list(_side_by_side(sections, local, whole, dim))

    def _sections(self, local_shape: tuple[int, ...]) -> list[Section] | None:
        """Return the sections, which follow each other and are cut separately; None if the shape does not fit."""
        dim = self.partition_dim
        if not self.known or (self.expert and not local_shape) or (dim is not None and dim >= len(local_shape)):
            return None
        if self.fused and dim is not None:
            return list(self.fused) if sum(part.block for part in self.fused) == local_shape[dim] else None
        if dim is None or self.num_partitions == 1:
            return [Section(0)]
        block, rest = divmod(local_shape[dim], self.partition_stride)
        section = Section(block * self.num_partitions, self.num_partitions, self.rank_ordering)
        return None if rest else [section] * self.partition_stride


@lru_cache(maxsize=4096)  # a model has many tensors, but few shapes
def _pieces(
    cut: Partition, local_shape: tuple[int, ...], tp_rank: int, tp: int, ep_rank: int
) -> tuple[Piece, ...] | None:
    layouts = cut.section_layouts(local_shape, tp, ep_rank)
    if layouts is None:
        return None
    return tuple(layout.piece(layout.section.partition_of(tp_rank)) for layout in layouts)


def zero1_rows(rows: int, dp: int) -> int:
    """Return the rows of a ZeRO-1 shard: dimension 0 padded with zeros to a multiple of ``dp``, in equal shards."""
    return -(-rows // dp)


def zero1_shape(local_shape: tuple[int, ...], dp: int) -> tuple[int, ...]:
    """Return the shape of a ZeRO-1 shard. A 0-dimensional parameter has no rows: every shard is all of it."""
    return (zero1_rows(local_shape[0], dp), *local_shape[1:]) if local_shape else ()


def zero1_pieces(pieces: Iterable[Piece], local_shape: tuple[int, ...], dp: int, dp_rank: int) -> list[Piece]:
    """Return the pieces in the ZeRO-1 shard ``dp_rank`` of ``dp``; local offsets count from the shard's first row.

    A 0-dimensional parameter has no rows to cut: every shard is all of it.
    """
    if not local_shape:
        return list(pieces)
    rows = zero1_rows(local_shape[0], dp)
    start = min(dp_rank * rows, local_shape[0])
    window = Box.whole(local_shape).narrowed(0, start, min(rows, local_shape[0] - start))
    return [part for piece in pieces if (part := piece.within(window)) is not None]


def _side_by_side(sections: Iterable[Section], local: Box, whole: Box, dim: int) -> Iterator[SectionLayout]:
    local_start = 0
    whole_start = 0
    for section in sections:
        yield SectionLayout(
            section,
            local.narrowed(dim, local_start, section.block),
            whole.narrowed(dim, whole_start, section.block),
            dim,
        )
        local_start += section.block
        whole_start += section.size


def _moved(part: Box, start: Box, end: Box) -> Box:
    """Return the part of ``end`` that corresponds to ``part`` of the equally large rectangle ``start``."""
    return Box(tuple(c + a - b for a, b, c in zip(part.offset, start.offset, end.offset, strict=True)), part.size)


def _as_list(ordering: tuple[int, ...] | None) -> list[int] | None:
    return None if ordering is None else list(ordering)
