"""Sections, which are cut into equal blocks over tensor-parallel ranks. A fused parameter has several of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nxd_ckpt.errors import InvalidArgument


@dataclass(frozen=True)
class Section:
    """One tensor of a fused parameter. Sections follow each other along ``partition_dim``, and are cut separately.

    The ``size`` elements of the *whole* section along that dimension are cut into ``num_partitions`` equal blocks.
    Rank ``r`` holds block ``rank_ordering[r]``, or ``r`` without one, modulo ``num_partitions``.
    """

    size: int
    num_partitions: int = 1
    rank_ordering: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
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
