"""Plans of reading: which parts of which saved tensors make up what a rank wants. Everything is overlap of boxes.

:func:`holders` asks who saved the wanted part (without listing all ranks), :func:`plan_reads` which rectangles go
where, :func:`contiguous_runs` which bytes of a file those are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Partition, Piece, zero1_pieces, zero1_rows
from nxd_ckpt.core.section import blocks_in
from nxd_ckpt.errors import IncompatibleState

HolderT = TypeVar("HolderT")


@dataclass(frozen=True)
class Cut:
    """Into how many parts each way of cutting cuts. ``shards`` is ZeRO-1's sharding group, 1 for the model's state."""

    tp: int = 1
    ep: int = 1
    shards: int = 1


@dataclass(frozen=True, order=True)
class CutIndex:
    """Which of a :class:`Cut`'s parts. ``ep_rank`` is 0 for tensors that are not cut over experts."""

    tp_rank: int = 0
    ep_rank: int = 0
    shard: int = 0


@dataclass(frozen=True)
class Read(Generic[HolderT]):
    """Copy ``source`` of the holder's local tensor to ``target`` of the wanting rank's local tensor; equal sizes."""

    holder: HolderT
    source: Box
    target: Box


def holders(
    partition: Partition, local_shape: tuple[int, ...], wanted: Box, cut: Cut, near: CutIndex = CutIndex()
) -> list[tuple[CutIndex, Piece]] | None:
    """Who holds the parts of ``wanted``, and which pieces: together they cover it, each element once.

    Work is proportional to the answer (and to the number of sections of a strided or fused parameter), not to the
    number of ranks. Where several tensor-parallel ranks hold the same piece, it is the one of ``near``, the asking
    rank's own place, if that is one of them, and another one for another asker otherwise, so that not everyone reads
    the same file.

    Args:
        partition: how the saved parameter is cut.
        local_shape: its shape on each saving rank, before ZeRO-1.
        wanted: a box of the global tensor.
        cut: the sizes of the saving job.

    Returns:
        Pieces as the holders have them, not clipped to ``wanted``; local offsets count from the first row of the
        holder's ZeRO-1 shard. None where the cut is not one of the regular ones.
    """
    found: list[tuple[CutIndex, Piece]] = []
    for ep_rank in _ep_ranks(partition, local_shape, wanted, cut.ep):
        strips = partition.strips(local_shape, cut.tp, ep_rank)
        if strips is None:
            return None
        for strip in strips:
            for number in strip.partitions_in(wanted):
                piece = strip.piece(number)
                tp_rank = _nearest(strip.section.tp_ranks_of(number, cut.tp), near.tp_rank)
                for shard in _shards(piece, local_shape, wanted, cut.shards):
                    place = CutIndex(tp_rank, ep_rank, shard)
                    found += [(place, part) for part in zero1_pieces([piece], local_shape, cut.shards, shard)]
    return found


def plan_reads(
    wanted: Iterable[Piece], held: Sequence[tuple[HolderT, Piece]], name: str = "tensor"
) -> list[Read[HolderT]]:
    """What to read to fill the wanted pieces, each element exactly once; of several holders the first one is read.

    Args:
        wanted: the pieces of the wanting rank's local tensor. Elements of it that are in no piece (ZeRO-1's padding)
            are not read.
        held: pieces of the same global tensor, by holder.
        name: the tensor's, for the error.

    Raises:
        IncompatibleState: a part of a wanted piece is in no held one; the message names it.
    """
    reads: list[Read[HolderT]] = []
    for want in wanted:
        missing = [want.box] if want.box.numel else []
        for holder, piece in held:
            if not missing:
                break
            for common in [part for box in missing if (part := box.intersect(piece.box)) is not None]:
                reads.append(Read(holder, piece.local_of(common), want.local_of(common)))
            missing = [rest for box in missing for rest in box.minus(piece.box)]
        if missing:
            raise IncompatibleState(
                f"{name}: elements {missing[0]} of the whole tensor are wanted, but no rank of the checkpoint holds "
                "them; is a rank's file missing, or was it saved with another shape or partition?"
            )
    return reads


def contiguous_runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The elements of ``box`` in a row-major tensor of ``shape``, as runs (first element, number of elements).

    Ascending, disjoint, and as long as possible. In the order of the runs, the elements are those of the box in
    row-major order.
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


def _ep_ranks(partition: Partition, local_shape: tuple[int, ...], wanted: Box, ep: int) -> Iterable[int]:
    """The expert-parallel ranks whose rows reach into ``wanted``; 0 where experts are not cut."""
    if not partition.expert or not local_shape:
        return range(1)
    rows = partition.global_shape(local_shape, ep=1)[0]
    return blocks_in(wanted.offset[0], wanted.size[0], rows, ep)


def _shards(piece: Piece, local_shape: tuple[int, ...], wanted: Box, shards: int) -> Iterable[int]:
    """The ZeRO-1 shards that hold parts of ``piece`` that are wanted."""
    common = piece.box.intersect(wanted)
    if common is None:
        return ()
    if not local_shape:
        return range(1)
    rows = piece.local_of(common)
    return blocks_in(rows.offset[0], rows.size[0], zero1_rows(local_shape[0], shards), shards)


def _nearest(ranks: Sequence[int], own: int) -> int:
    return own if own in ranks else ranks[own % len(ranks)]
