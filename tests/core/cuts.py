"""A slow, obviously right way to cut a tensor: with NumPy, as NxD and torch-xla do it with torch.

Upstream splits the whole tensor and concatenates what a rank holds; nothing here knows of boxes or pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Partition, Piece, Section, zero1_pieces
from nxd_ckpt.core.reads import Cut, CutIndex

PADDING = -1
Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Job:
    """How one job cuts one parameter."""

    partition: Partition
    cut: Cut

    def places(self) -> list[CutIndex]:
        experts = self.cut.ep if self.partition.expert else 1
        return [
            CutIndex(tp_rank, ep_rank, shard)
            for tp_rank in range(self.cut.tp)
            for ep_rank in range(experts)
            for shard in range(self.cut.shards)
        ]

    def local_shape(self, whole: Array) -> tuple[int, ...]:
        """Before ZeRO-1."""
        return replace(self, cut=replace(self.cut, shards=1)).hold(whole, CutIndex()).shape

    def hold(self, whole: Array, place: CutIndex, padding: int = PADDING) -> Array:
        """What the rank at ``place`` holds."""
        part = whole
        if self.partition.expert:
            part = np.split(part, self.cut.ep, axis=0)[place.ep_rank]
        part = _cut_over_tp(part, self.partition, place.tp_rank)
        if self.cut.shards == 1 or part.ndim == 0:
            return part
        extra = -part.shape[0] % self.cut.shards
        more = np.full((extra, *part.shape[1:]), padding, dtype=part.dtype)
        return np.split(np.concatenate([part, more]), self.cut.shards)[place.shard]

    def pieces(self, whole: Array, place: CutIndex) -> Sequence[Piece]:
        """The same by the library."""
        shape = self.local_shape(whole)
        pieces = self.partition.pieces(shape, place.tp_rank, self.cut.tp, place.ep_rank)
        assert pieces is not None
        return pieces if self.cut.shards == 1 else zero1_pieces(pieces, shape, self.cut.shards, place.shard)


def part_of(array: Array, box: Box) -> Array:
    """A view of a box of an array."""
    slices = [slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True)]
    index: tuple[Any, ...] = (*slices, ...)  # without the dots, a scalar would come out as a number, not as a view
    return array[index]


def numbered(shape: tuple[int, ...]) -> Array:
    """A tensor in which every element is another number."""
    return np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)


def _cut_over_tp(part: Array, partition: Partition, tp_rank: int) -> Array:
    dim = partition.partition_dim
    if dim is None:
        return part
    if partition.fused:
        ends = np.cumsum([section.size for section in partition.fused])[:-1]
        sections = np.split(part, ends, axis=dim)
        held = [_block(section, about, dim, tp_rank) for section, about in zip(sections, partition.fused, strict=True)]
        return np.concatenate(held, axis=dim)
    count = partition.num_partitions
    blocks = np.split(part, count * partition.partition_stride, axis=dim)
    first = tp_rank if partition.rank_ordering is None else partition.rank_ordering[tp_rank]
    return np.concatenate(blocks[first % count :: count], axis=dim)


def _block(part: Array, section: Section, dim: int, tp_rank: int) -> Array:
    first = tp_rank if section.rank_ordering is None else section.rank_ordering[tp_rank]
    return np.split(part, section.num_partitions, axis=dim)[first % section.num_partitions]


def _orderings(tp: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    return st.none() | st.permutations(range(tp)).map(tuple)


def _divisors(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([value for value in range(1, number + 1) if number % value == 0])


@st.composite
def _strided(draw: st.DrawFn, dims: int, expert: bool) -> Job:
    cut = draw(st.builds(Cut, tp=st.integers(1, 4), ep=st.integers(1, 2), shards=st.integers(1, 4)))
    dim = draw(st.none() | st.integers(0, dims - 1)) if dims else None
    if dim is None:
        return Job(Partition(expert=expert), cut)
    count = draw(_divisors(cut.tp))
    partition = Partition(dim, draw(st.integers(1, 3)), count, draw(_orderings(cut.tp)), expert)
    return Job(partition, cut)


def _multiple(job: Job, dim: int) -> int:
    """What the size of the dimension must be a multiple of."""
    partition = job.partition
    experts = job.cut.ep if partition.expert and dim == 0 else 1
    blocks = partition.num_partitions * partition.partition_stride if partition.partition_dim == dim else 1
    return experts * blocks


@st.composite
def two_jobs(draw: st.DrawFn) -> tuple[Array, Job, Job]:
    """A whole tensor, and two jobs that each cut it in a way of its own; tensors may be empty, scalars, or tiny."""
    dims = draw(st.integers(0, 3))
    expert = dims > 0 and draw(st.booleans())
    one, other = draw(_strided(dims, expert)), draw(_strided(dims, expert))
    shape = tuple(draw(st.integers(0, 2)) * lcm(_multiple(one, dim), _multiple(other, dim)) for dim in range(dims))
    return numbered(shape), one, other


@st.composite
def two_fused_jobs(draw: st.DrawFn) -> tuple[Array, Job, Job]:
    """The same for a fused parameter: sections of sizes of their own, each cut by itself."""
    cuts = [Cut(tp=draw(st.integers(1, 4)), shards=draw(st.integers(1, 3))) for _ in range(2)]
    sections: list[list[Section]] = [[], []]
    for _ in range(draw(st.integers(1, 3))):
        counts = [draw(_divisors(cut.tp)) for cut in cuts]
        size = draw(st.integers(0, 2)) * lcm(*counts)
        for side, cut in enumerate(cuts):
            sections[side].append(Section(size, counts[side], draw(_orderings(cut.tp))))
    dim = draw(st.integers(0, 1))
    along = sum(section.size for section in sections[0])
    shape = (along, draw(st.integers(1, 3))) if dim == 0 else (draw(st.integers(1, 5)), along)
    one, other = (Job(Partition(dim, fused=tuple(sections[side])), cuts[side]) for side in range(2))
    return numbered(shape), one, other
