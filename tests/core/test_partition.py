"""How NxD cuts, case by case: which rows of the whole parameter a rank holds, in which order."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Partition, Piece, Section, blocks_in, zero1_pieces, zero1_rows
from nxd_ckpt.errors import InvalidArgument, MalformedFile
from tests.core.cuts import Array, Job, two_fused_jobs, two_jobs


def along(pieces: Sequence[Piece] | None, dim: int = 0) -> list[int]:
    """Indices of the whole tensor along ``dim``, in the order in which the rank holds them."""
    assert pieces is not None
    ordered = sorted(pieces, key=lambda piece: piece.local.offset[dim])
    starts = [(piece.box.offset[dim], piece.box.size[dim]) for piece in ordered]
    return [index for start, size in starts for index in range(start, start + size)]


def held(partition: Partition, shape: tuple[int, ...], tp: int, ep_rank: int = 0, dim: int = 0) -> list[list[int]]:
    """The indices that each tensor-parallel rank holds."""
    return [along(partition.pieces(shape, tp_rank, tp, ep_rank), dim) for tp_rank in range(tp)]


def test_a_column_parallel_weight_is_cut_by_rows() -> None:
    """A weight of 6 rows over 3 ranks: two rows each, in order."""
    assert [[0, 1], [2, 3], [4, 5]] == held(Partition(0, num_partitions=3), (2, 5), tp=3)


def test_a_row_parallel_weight_is_cut_by_columns() -> None:
    """Cut along dimension 1, rows stay whole."""
    partition = Partition(1, num_partitions=2)
    assert [[0, 1], [2, 3]] == held(partition, (5, 2), tp=2, dim=1)
    assert [[0, 1, 2, 3, 4]] * 2 == held(partition, (5, 2), tp=2, dim=0)


def test_fused_gate_and_up_are_cut_each_by_itself() -> None:
    """partition_stride 2: the whole is gate then up, and each rank holds its half of gate, then its half of up."""
    assert [[0, 1, 4, 5], [2, 3, 6, 7]] == held(Partition(0, 2, 2), (4, 3), tp=2)


def test_what_has_no_attributes_is_whole_on_every_rank() -> None:
    """Norms and row-parallel biases carry no attributes: every rank holds them whole."""
    assert [[0, 1, 2]] * 4 == held(Partition(), (3,), tp=4)
    assert Partition().replicated_over_tp


def test_one_partition_is_replicated() -> None:
    """A parallel layer whose group has one rank is whole everywhere, also with a stride."""
    partition = Partition(0, 3, 1)
    assert partition.replicated_over_tp
    assert (Piece(Box.whole((6,)), Box.whole((6,))),) == partition.pieces((6,), 1, 2, 0)


def test_rank_ordering_maps_ranks_to_partitions() -> None:
    """Rank r holds partition rank_ordering[r], not the other way round: shown by an ordering that is no involution."""
    partition = Partition(0, num_partitions=3, rank_ordering=(1, 2, 0))
    assert [[2, 3], [4, 5], [0, 1]] == held(partition, (2,), tp=3)


def test_fewer_partitions_than_ranks() -> None:
    """k and v with kv_size_multiplier 2 on Trn1: K0 K1 K0 K1, rank r holds partition r modulo their number."""
    partition = Partition(0, num_partitions=2)
    assert [[0, 1], [2, 3], [0, 1], [2, 3]] == held(partition, (2, 8), tp=4)
    assert (4, 8) == partition.global_shape((2, 8), ep=1)
    assert not partition.replicated_over_tp


def test_adjacent_ranks_share_heads_on_trn2() -> None:
    """k and v with kv_size_multiplier 2 on Trn2: K0 K0 K1 K1."""
    partition = Partition(0, num_partitions=2, rank_ordering=(0, 0, 1, 1))
    assert [[0, 1], [0, 1], [2, 3], [2, 3]] == held(partition, (2, 8), tp=4)


def test_fused_qkv_of_unequal_sizes_is_cut_in_three() -> None:
    """8 rows of q in the order of Trn1's heads, 4 of k and 4 of v, both held twice: one parameter, three cuts."""
    partition = Partition(0, fused=(Section(8, 4, (0, 2, 1, 3)), Section(4, 2), Section(4, 2)))
    expected = [
        [0, 1, 8, 9, 12, 13],
        [4, 5, 10, 11, 14, 15],
        [2, 3, 8, 9, 12, 13],
        [6, 7, 10, 11, 14, 15],
    ]
    assert expected == held(partition, (6, 3), tp=4)
    assert (16, 3) == partition.global_shape((6, 3), ep=1)


@pytest.mark.parametrize("dim", [1, 2])
def test_experts_are_cut_over_ep_and_tp(dim: int) -> None:
    """Expert weights: experts over ep on dimension 0, and columns or rows over tp on another."""
    partition = Partition(dim, num_partitions=2, expert=True)
    shape = (3, 4, 4)
    assert [[3, 4, 5]] * 2 == held(partition, shape, tp=2, ep_rank=1, dim=0)
    assert [[0, 1, 2, 3], [4, 5, 6, 7]] == held(partition, shape, tp=2, ep_rank=1, dim=dim)
    assert (6, *(8 if other == dim else 4 for other in (1, 2))) == partition.global_shape(shape, ep=2)


def test_experts_and_tensor_parallel_on_the_same_dimension() -> None:
    """The cut over experts is the outer one: an ep rank's rows are contiguous, and tp cuts those."""
    partition = Partition(0, num_partitions=2, expert=True)
    assert [[4, 5], [6, 7]] == held(partition, (2,), tp=2, ep_rank=1)
    assert (8,) == partition.global_shape((2,), ep=2)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (5, [[0, 1], [2, 3], [4], []]),
        (3, [[0], [1], [2], []]),
        (1, [[0], [], [], []]),
        (0, [[], [], [], []]),
    ],
)
def test_zero1_pads_at_the_end(rows: int, expected: list[list[int]]) -> None:
    """Shards of equal size; only the last ones are padded, and shards of nothing but padding hold nothing."""
    pieces = [Piece(Box.whole((rows,)), Box.whole((rows,)))]
    assert expected == [along(zero1_pieces(pieces, (rows,), 4, shard)) for shard in range(4)]
    assert all(len(part) <= zero1_rows(rows, 4) for part in expected)


def test_zero1_cuts_what_tensor_parallel_left() -> None:
    """The second of two shards of rank 1's gate and up: the up half alone, counted from the shard's first row."""
    pieces = Partition(0, 2, 2).pieces((4, 3), 1, 2, 0)
    assert pieces is not None
    assert [Piece(Box.whole((2, 3)), Box((6, 0), (2, 3)))] == zero1_pieces(pieces, (4, 3), 2, 1)


def test_zero1_keeps_scalars_whole() -> None:
    """A 0-dimensional parameter has no rows: every shard is all of it."""
    scalar = [Piece(Box.whole(()), Box.whole(()))]
    assert [scalar, scalar] == [zero1_pieces(scalar, (), 2, shard) for shard in range(2)]


def test_blocks_in_counts_only_what_is_touched() -> None:
    """Blocks of 3: an interval that starts inside one and ends inside another, and ones that lie outside."""
    assert range(1, 3) == blocks_in(4, 4, 3, 10)
    assert [] == list(blocks_in(4, 0, 3, 10))
    assert [0] == list(blocks_in(-5, 6, 3, 10))
    assert [] == list(blocks_in(30, 5, 3, 10))


@given(jobs=two_jobs() | two_fused_jobs())
def test_json_gives_the_same_partition_back(jobs: tuple[Array, Job, Job]) -> None:
    """What is written to the manifest is what was meant."""
    partition = jobs[1].partition
    assert partition == Partition.from_json(json.loads(json.dumps(partition.to_json())))


def test_json_of_a_replicated_parameter_is_empty() -> None:
    """The manifest stays small: only what differs from the default is written."""
    assert {} == Partition().to_json()
    assert {"partition_dim": 0, "num_partitions": 2} == Partition(0, num_partitions=2).to_json()


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
    """5 rows cannot be cut into 2 equal blocks."""
    with pytest.raises(InvalidArgument, match="a section of 5 elements cannot be cut into 2 equal blocks"):
        Section(5, 2)
