"""The order of attention heads in NxD's tensors, as runs of rows of a Hugging Face tensor. Pure.

With more tensor-parallel ranks than key-value heads, NxD's ``GQAQKVColumnParallelLinear`` keeps ``m`` =
``kv_size_multiplier`` copies of k and v, so that all ranks together have ``kv_heads * m`` *places* for key-value heads.
Each place has the block of ``heads / (kv_heads * m)`` query heads that attend to it. The head at each place depends on
the hardware (source: NxD's ``modules.qkv_linear`` and ``scripts/checkpoint_converter.py``)::

    4 query heads, 2 key-value heads, m = 2        k and v          q, and the columns of o_proj
    trn1: copies are interleaved                   K0 K1 K0 K1      Q0 Q2 Q1 Q3
    trn2: copies are neighbours                    K0 K0 K1 K1      Q0 Q1 Q2 Q3

NxD uses both orders for any number of ranks; each rank holds an equal part of the places.

NxD's converter repeats k and v for trn2 as for trn1 (K0 K1 K0 K1), but leaves query heads in their order. This third
order, *converted*, is one that no layer of NxD computes with.

If the ranks do not divide the query heads, a job may pad them (``pad_attn_heads``): the blocks at the last places are
then zero, equally many for each key-value head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from nxd_ckpt.core.limits import HEADS
from nxd_ckpt.errors import InvalidArgument

Hardware = Literal["trn1", "trn2"]
HARDWARE: tuple[Hardware, ...] = get_args(Hardware)


class HeadRun(NamedTuple):
    """``length`` elements along one dimension, from ``nxd`` on in NxD's tensor and ``hf`` on in Hugging Face's."""

    nxd: int
    hf: int
    length: int


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer, of ``head_dim`` elements each, with NxD's ``copies`` of each key-value head.

    ``padded`` is NxD's number of query heads, if the last ones are padding.

    Raises:
        InvalidArgument: counts that do not divide.
    """

    heads: int
    kv_heads: int
    head_dim: int
    copies: int = 1
    hardware: str = "trn1"
    converted: bool = False
    padded: int | None = None

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_dim, self.copies) < 1:
            raise InvalidArgument(f"heads, kv_heads, head_dim and kv_size_multiplier must be at least 1, found {self}")
        if self.kv_heads * self.copies > HEADS:
            raise InvalidArgument(f"{self.kv_heads} key-value heads, {self.copies} times each; at most {HEADS} allowed")
        if self.hardware not in HARDWARE:
            raise InvalidArgument(f"hardware must be one of {', '.join(HARDWARE)}, found {self.hardware!r}")
        if self._kept > self.heads and self.hardware == "trn2":
            raise InvalidArgument(
                "pad_attn_heads is not supported for trn2, because NxD's own converter cannot remove the padding again"
            )
        if self._kept % (self.kv_heads * self.copies) or self.heads % (self.kv_heads * max(self._block, 1)):
            padded = "" if self._kept == self.heads else f", padded to {self.padded},"
            raise InvalidArgument(
                f"{self.heads} query heads{padded} cannot be divided equally among {self.kv_heads} key-value heads "
                f"that are each kept {self.copies} times (kv_size_multiplier={self.copies})"
            )

    def runs(self, kind: str) -> list[HeadRun]:
        """Return the rows of q ("query"; also the columns of o_proj) or of k and v ("kv"), in NxD's order."""
        places = range(self.kv_heads * self.copies)
        if kind == "kv":
            return _runs((self._kv_head(place) for place in places), self.head_dim)
        return _runs(map(self._query_block, places[: self.heads // self._block]), self._block * self.head_dim)

    def length(self, kind: str) -> int:
        """Return the number of rows of q, or of k or v, in NxD's tensor, padding included."""
        return self.head_dim * (self.kv_heads * self.copies if kind == "kv" else self._kept)

    @property
    def _kept(self) -> int:
        return self.heads if self.padded is None else self.padded

    @property
    def _block(self) -> int:
        """Query heads at each place."""
        return self._kept // (self.kv_heads * self.copies)

    def _kv_head(self, place: int) -> int:
        interleaved = self.hardware == "trn1" or self.converted
        return place % self.kv_heads if interleaved else place // self.copies

    def _query_block(self, place: int) -> int:
        """Return the block of query heads at ``place``; query heads of one key-value head are neighbours."""
        if self.hardware == "trn2":
            return place
        copy, head = divmod(place, self.kv_heads)
        return head * (self.heads // self._block // self.kv_heads) + copy


def _runs(blocks: Iterable[int], size: int) -> list[HeadRun]:
    """Return the runs of blocks in NxD's order; blocks that are neighbours on both sides are in one run.

    On Hugging Face's side two runs are equal or disjoint: a block's first copy is never in one run with a later copy.
    """
    runs: list[HeadRun] = []
    seen: set[int] = set()
    is_copy = False
    for place, block in enumerate(blocks):
        follows = bool(runs) and runs[-1].hf + runs[-1].length == block * size
        if follows and is_copy == (block in seen):
            runs[-1] = runs[-1]._replace(length=runs[-1].length + size)
        else:
            runs.append(HeadRun(place * size, block * size, size))
        is_copy = block in seen
        seen.add(block)
    return runs
