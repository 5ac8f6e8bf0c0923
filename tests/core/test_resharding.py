"""What one job saved, another reads: compared with cutting the whole tensor by hand for the other job."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.partition import Partition, Piece, Section
from nxd_ckpt.core.reads import Cut, CutIndex, Read, holders, plan_reads
from nxd_ckpt.errors import IncompatibleState
from tests.core.cuts import PADDING, Array, Job, part_of, two_fused_jobs, two_jobs

BOTH = two_jobs() | two_fused_jobs()
slow_machine = settings(deadline=None, max_examples=60)


def loaded(whole: Array, saved: Job, shape: tuple[int, ...], reads: list[Read[CutIndex]]) -> Array:
    """A local tensor of ``shape`` that the reads have filled; no element may be written twice."""
    target, written = np.full(shape, PADDING), np.zeros(shape, int)
    for read in reads:
        part_of(target, read.target)[...] = part_of(saved.hold(whole, read.holder), read.source)
        part_of(written, read.target)[...] += 1
    assert written.max(initial=0) <= 1
    return target


@slow_machine
@given(jobs=BOTH, data=st.data())
def test_a_rank_reads_what_it_would_have_been_given(jobs: tuple[Array, Job, Job], data: st.DataObject) -> None:
    """Reading the shards of any job gives each rank of any other what cutting the whole tensor gives it."""
    whole, saved, live = jobs
    place = data.draw(st.sampled_from(live.places()))
    held = [(other, piece) for other in saved.places() for piece in saved.pieces(whole, other)]
    reads = plan_reads(live.pieces(whole, place), data.draw(st.permutations(held)))
    expected = live.hold(whole, place)
    np.testing.assert_array_equal(loaded(whole, saved, expected.shape, reads), expected)


@slow_machine
@given(jobs=BOTH, data=st.data())
def test_asking_the_holders_gives_the_same(jobs: tuple[Array, Job, Job], data: st.DataObject) -> None:
    """The holders found by arithmetic are real, hold all that is wanted, each element once, and nothing else."""
    whole, saved, live = jobs
    place = data.draw(st.sampled_from(live.places()))
    wanted = live.pieces(whole, place)
    reads = []
    for want in wanted:
        found = holders(saved.partition, saved.local_shape(whole), want.box, saved.cut, near=place)
        assert found is not None
        assert all(piece in saved.pieces(whole, holder) for holder, piece in found)
        overlaps = [part for _, piece in found if (part := piece.box.intersect(want.box)) is not None]
        assert len(overlaps) == len(found)
        assert want.box.numel == sum(part.numel for part in overlaps)
        reads += plan_reads([want], found)
    expected = live.hold(whole, place)
    np.testing.assert_array_equal(loaded(whole, saved, expected.shape, reads), expected)


@slow_machine
@given(jobs=BOTH)
def test_the_global_shape_is_that_of_the_whole(jobs: tuple[Array, Job, Job]) -> None:
    """The shape of the whole tensor follows from that of any rank's part."""
    whole, job, _ = jobs
    assert whole.shape == job.partition.global_shape(job.local_shape(whole), job.cut.ep)


@slow_machine
@given(jobs=BOTH, data=st.data())
def test_a_missing_rank_is_named_not_read_around(jobs: tuple[Array, Job, Job], data: st.DataObject) -> None:
    """Without the only holder of something wanted, there is no plan; with any replica of it, there is."""
    whole, saved, live = jobs
    lost = data.draw(st.sampled_from(saved.places()))
    held = [(other, piece) for other in saved.places() if other != lost for piece in saved.pieces(whole, other)]
    left = set(np.concatenate([[PADDING], *(saved.hold(whole, other).ravel() for other, _ in held)]).tolist())
    for place in live.places():
        wanted = live.pieces(whole, place)
        if set(live.hold(whole, place).ravel().tolist()) <= left | {PADDING}:
            plan_reads(wanted, held)
        else:
            with pytest.raises(IncompatibleState, match=r"^w: elements \[.*\] of the whole tensor"):
                plan_reads(wanted, held, "w")


def test_more_ranks_than_saved_spread_over_the_replicas() -> None:
    """Eight loading ranks of a tensor that two ranks hold: four read each."""
    near = [CutIndex(tp_rank=asking) for asking in range(8)]
    read = [holders(Partition(), (2,), Box.whole((2,)), Cut(tp=2), near=own) for own in near]
    assert [0, 1] * 4 == [found[0][0].tp_rank for found in read if found]


def test_replicated_kv_heads_are_read_from_one_of_their_ranks() -> None:
    """k in 2 partitions on 4 ranks: its second half is on ranks 1 and 3, and a rank that has it reads its own."""
    kv = Partition(0, num_partitions=2)
    second = Box((4, 0), (4, 3))
    found = [holders(kv, (4, 3), second, Cut(tp=4), near=CutIndex(tp_rank=asking)) for asking in range(4)]
    assert [1, 1, 1, 3] == [places[0][0].tp_rank for places in found if places]


def test_holders_of_a_small_part_are_found_without_listing_ranks() -> None:
    """Of 64 x 16 x 64 ranks, one row of one expert's slice is on one: found without listing them."""
    partition = Partition(partition_dim=1, num_partitions=64, expert=True)
    wanted = Box((33, 700, 5), (1, 1, 1))
    [(place, piece)] = holders(partition, (8, 64, 10), wanted, Cut(tp=64, ep=16, shards=64)) or []
    # Expert 33 is the second of ep rank 4; column 700 the 61st of tp rank 10; each of 8 rows a shard of its own.
    assert CutIndex(tp_rank=10, ep_rank=4, shard=1) == place
    assert Piece(Box.whole((1, 64, 10)), Box((33, 640, 0), (1, 64, 10))) == piece


@pytest.mark.parametrize(
    ("partition", "shape", "cut"),
    [
        pytest.param(Partition(0, num_partitions=4), (2,), Cut(tp=2), id="more-partitions-than-ranks"),
        pytest.param(Partition(0, num_partitions=2), (2,), Cut(tp=3), id="partitions-do-not-divide-tp"),
        pytest.param(Partition(0, 2, 2), (3,), Cut(tp=2), id="stride-does-not-divide"),
        pytest.param(Partition(1, num_partitions=2), (2,), Cut(tp=2), id="no-such-dimension"),
        pytest.param(Partition(0, 1, 2, (1, 0)), (2,), Cut(tp=4), id="ordering-of-another-tp"),
        pytest.param(Partition(0, fused=(Section(4, 2), Section(2, 2))), (4,), Cut(tp=2), id="other-sections"),
        pytest.param(Partition(expert=True), (), Cut(ep=2), id="scalar-expert"),
        pytest.param(Partition(0, num_partitions=2, known=False), (2,), Cut(tp=2), id="unknown"),
    ],
)
def test_irregular_cuts_are_not_guessed(partition: Partition, shape: tuple[int, ...], cut: Cut) -> None:
    """Where the shape cannot have come from the cut, nothing is said of who holds what."""
    assert partition.pieces(shape, 0, cut.tp, 0) is None
    assert holders(partition, shape, Box.whole(shape), cut) is None


def test_of_two_holders_the_first_is_read() -> None:
    """Replicas are no conflict: what the first holder has is taken from it, the rest from the next."""
    held = [("left", Piece(Box.whole((3,)), Box((0,), (3,)))), ("whole", Piece(Box.whole((5,)), Box((0,), (5,))))]
    wanted = [Piece(Box((1,), (5,)), Box((0,), (5,)))]
    expected = [Read("left", Box((0,), (3,)), Box((1,), (3,))), Read("whole", Box((3,), (2,)), Box((4,), (2,)))]
    assert expected == plan_reads(wanted, held)
