"""Read plans: the parts of saved tensors that fill a rank's tensor. Everything is overlap of boxes.

`holders` finds the ranks that saved a box (without listing all ranks), `plan_reads` the rectangles to copy, and
`contiguous_runs` their bytes in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Partition, Piece, blocks_in, zero1_pieces, zero1_rows
from nxd_ckpt.errors import IncompatibleState

HolderT = TypeVar("HolderT")


@dataclass(frozen=True)
class Cut:
    """The number of parts in each kind of cut. ``shards`` is the size of ZeRO-1's sharding group, 1 for the model."""

    tp: int = 1
    ep: int = 1
    shards: int = 1


@dataclass(frozen=True, order=True)
class CutIndex:
    """The index of one part of a `Cut`. ``ep_rank`` is 0 for tensors that are not cut over experts."""

    tp_rank: int = 0
    ep_rank: int = 0
    shard: int = 0


@dataclass(frozen=True)
class Read(Generic[HolderT]):
    """A copy of ``source`` in the holder's local tensor to ``target`` in the reading rank's; equal sizes."""

    holder: HolderT
    source: Box
    target: Box


def holders(
    partition: Partition, local_shape: tuple[int, ...], box: Box, cut: Cut, near: CutIndex = CutIndex()
) -> list[tuple[CutIndex, Piece]] | None:
    """Return the holders of ``box`` with their pieces, which cover it, each element once.

    Work is proportional to the answer (and to the number of sections of a strided or fused parameter), not to the
    number of ranks. If several tensor-parallel ranks hold a piece, it is read from the rank at ``near`` if that has it,
    otherwise from one that depends on ``near``, so that readers spread over the files.

    Args:
        partition: cut of the saved parameter.
        local_shape: its shape on each saving rank, before ZeRO-1.
        box: a box of the global tensor.
        cut: sizes of the saving job.
        near: index of the reading rank.

    Returns:
        Whole pieces of the holders, not clipped to ``box``; local offsets count from the first row of the holder's
        ZeRO-1 shard. None if the cut is irregular.
    """
    pieces: list[tuple[CutIndex, Piece]] = []
    for ep_rank in _ep_ranks(partition, local_shape, box, cut.ep):
        layouts = partition.section_layouts(local_shape, cut.tp, ep_rank)
        if layouts is None:
            return None
        for layout in layouts:
            for number in layout.partitions_in(box):
                piece = layout.piece(number)
                tp_rank = _nearest(layout.section.tp_ranks_of(number, cut.tp), near.tp_rank)
                for shard in _shards(piece, local_shape, box, cut.shards):
                    place = CutIndex(tp_rank, ep_rank, shard)
                    pieces += [(place, part) for part in zero1_pieces([piece], local_shape, cut.shards, shard)]
    return pieces


def plan_reads(
    targets: Iterable[Piece], sources: Sequence[tuple[HolderT, Piece]], name: str = "tensor"
) -> list[Read[HolderT]]:
    """Plan the reads that fill the target pieces, each element exactly once, from the first holder that has it.

    Args:
        targets: pieces of the reading rank's local tensor. Elements in no piece (ZeRO-1's padding) are not read.
        sources: pieces of the same global tensor, by holder.
        name: the tensor's name, for the error.

    Raises:
        IncompatibleState: no source has a part of a target piece; the message names it.
    """
    reads: list[Read[HolderT]] = []
    for target in targets:
        missing = [target.box] if target.box.numel else []
        for holder, piece in sources:
            if not missing:
                break
            for common in [part for box in missing if (part := box.intersect(piece.box)) is not None]:
                reads.append(Read(holder, piece.local_of(common), target.local_of(common)))
            missing = [rest for box in missing for rest in box.minus(piece.box)]
        if missing:
            raise IncompatibleState(
                f"{name}: elements {missing[0]} of the whole tensor are in no rank's file; a rank's file is missing, "
                "or the tensor was saved with another shape or partition"
            )
    return reads


def contiguous_runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the elements of ``box`` in a row-major tensor of ``shape`` as runs (first element, number of elements).

    Runs are ascending, disjoint and as long as possible. Together they are the box's elements in row-major order.
    """
    if not box.numel:
        return
    dims = len(shape)
    inner = dims  # from here on the box spans the whole tensor
    while inner > 0 and box.size[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # one run for each index in the dimensions before this one
    strides = [prod(shape[dim + 1 :]) for dim in range(dims)]
    length = prod(box.size[outer:])
    first = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    for run in range(prod(box.size[:outer])):
        start = first
        for dim in reversed(range(outer)):
            run, index = divmod(run, box.size[dim])
            start += index * strides[dim]
        yield start, length


def _ep_ranks(partition: Partition, local_shape: tuple[int, ...], box: Box, ep: int) -> Iterable[int]:
    """Return the expert-parallel ranks whose rows overlap ``box``; 0 if experts are not cut."""
    if not partition.expert or not local_shape:
        return range(1)
    rows = partition.global_shape(local_shape, ep=1)[0]
    return blocks_in(box.offset[0], box.size[0], rows, ep)


def _shards(piece: Piece, local_shape: tuple[int, ...], box: Box, shards: int) -> Iterable[int]:
    """Return the ZeRO-1 shards that hold parts of ``piece`` in the box."""
    common = piece.box.intersect(box)
    if common is None:
        return ()
    if not local_shape:
        return range(1)
    rows = piece.local_of(common)
    return blocks_in(rows.offset[0], rows.size[0], zero1_rows(local_shape[0], shards), shards)


def _nearest(ranks: Sequence[int], own: int) -> int:
    return own if own in ranks else ranks[own % len(ranks)]
