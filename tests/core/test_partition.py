"""How NxD cuts, case by case: which rows of the whole parameter a rank holds, in which order."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from nxd_ckpt.core.partition import Partition, Piece, Section, blocks_in
from nxd_ckpt.errors import InvalidArgument, MalformedFile
from tests.core.cuts import Array, Job, two_fused_jobs, two_jobs


def rows_of(pieces: Sequence[Piece] | None) -> list[int]:
    """Rows of the whole tensor, in the order in which the rank holds them."""
    assert pieces is not None
    ordered = sorted(pieces, key=lambda piece: piece.local.offset[0])
    starts = [(piece.box.offset[0], piece.box.size[0]) for piece in ordered]
    return [index for start, size in starts for index in range(start, start + size)]


def held(partition: Partition, shape: tuple[int, ...], tp: int, ep_rank: int = 0) -> list[list[int]]:
    """The rows that each tensor-parallel rank holds."""
    return [rows_of(partition.pieces(shape, tp_rank, tp, ep_rank)) for tp_rank in range(tp)]


FUSED = Partition(0, fused=(Section(8, 4, (0, 2, 1, 3)), Section(4, 2), Section(4, 2)))
QKV = [[0, 1, 8, 9, 12, 13], [4, 5, 10, 11, 14, 15], [2, 3, 8, 9, 12, 13], [6, 7, 10, 11, 14, 15]]


@pytest.mark.parametrize(
    ("partition", "rows", "expected"),
    [
        (Partition(0, 2, 2), 4, [[0, 1, 4, 5], [2, 3, 6, 7]]),  # gate, then up
        (Partition(0, num_partitions=3, rank_ordering=(1, 2, 0)), 2, [[2, 3], [4, 5], [0, 1]]),  # no involution
        (Partition(0, num_partitions=2), 2, [[0, 1], [2, 3], [0, 1], [2, 3]]),  # key-value heads on Trn1
        (Partition(0, num_partitions=2, rank_ordering=(0, 0, 1, 1)), 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),  # on Trn2
        (FUSED, 6, QKV),
    ],
)
def test_a_parameter_is_cut_as_nxd_does(partition: Partition, rows: int, expected: list[list[int]]) -> None:
    """Rank r holds partition ``rank_ordering[r]``, not the other way round. All other cuts are in test_resharding."""
    assert expected == held(partition, (rows, 3), tp=len(expected))


def test_experts_are_cut_before_tensor_parallel() -> None:
    assert [[4, 5], [6, 7]] == held(Partition(0, num_partitions=2, expert=True), (2,), tp=2, ep_rank=1)


def test_what_has_one_partition_is_replicated() -> None:
    """Also with a stride: a parallel layer whose group has one rank."""
    assert [True, True, False] == [
        partition.replicated_over_tp for partition in (Partition(), Partition(0, 3, 1), Partition(0, num_partitions=2))
    ]


def test_blocks_that_an_interval_overlaps() -> None:
    """It starts inside one of 3 and ends inside another; or lies outside, or is empty."""
    intervals = [(4, 4), (4, 0), (-5, 6), (30, 5)]
    assert [[1, 2], [], [0], []] == [list(blocks_in(start, length, 3, 10)) for start, length in intervals]


@given(jobs=two_jobs() | two_fused_jobs())
def test_json_gives_the_same_partition_back(jobs: tuple[Array, Job, Job]) -> None:
    partition = jobs[1].partition
    assert partition == Partition.from_json(json.loads(json.dumps(partition.to_json())))
    assert {} == Partition().to_json(), "the manifest stays small"


@pytest.mark.parametrize(
    "fields",
    [
        {"partition_dim": "0"},
        {"partition_dim": -1},
        {"partition_dim": 0, "num_partitions": 0},
        {"partition_dim": 0, "num_partitions": 2, "rank_ordering": [0, 0]},
        {"partition_dim": 0, "num_partitions": 2, "rank_ordering": 3},
        {"partition_dim": 0, "num_partitions": 2.5},
        {"fused": [[4, 2]]},
        {"fused": [[4, 2, None]]},
        {"partition_dim": 0, "fused": [[5, 2, None]]},
        {"partition_dim": 0, "num_partitions": 2, "fused": [[4, 2, None]]},
        {"stride": 2},
    ],
)
def test_json_that_means_nothing_is_refused(fields: dict[str, Any]) -> None:
    """A damaged or newer partition is an error that shows it, never a guess."""
    with pytest.raises(MalformedFile, match="partition"):
        Partition.from_json(fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partition_dim": -1}, "partition_dim, counted from the front, must be an int of at least 0, found -1"),
        ({"partition_dim": 0, "partition_stride": 0}, "partition_stride must be an int of at least 1, found 0"),
        ({"partition_dim": 0, "num_partitions": True}, "num_partitions must be a whole number, found True"),
        ({"partition_dim": 0, "num_partitions": 3, "rank_ordering": (0, 1)}, "each of the 3 to some rank"),
        ({"fused": (Section(4, 2),)}, "fused needs partition_dim"),
        ({"partition_dim": 0, "partition_stride": 2, "fused": (Section(4, 2),)}, "each section has its own"),
    ],
)
def test_arguments_that_no_rank_could_honour_are_refused(arguments: dict[str, Any], message: str) -> None:
    """``partitions=`` comes from users: what cannot be is said at once."""
    with pytest.raises(InvalidArgument, match=message):
        Partition(**arguments)


def test_a_section_must_divide() -> None:
    with pytest.raises(InvalidArgument, match="a section of 5 elements cannot be cut into 2 equal blocks"):
        Section(5, 2)
