"""On other sizes, where no live model says it: how a parameter is cut, and which stage has which names."""

import pytest

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition, Section
from nxd_ckpt.core.reads import Cut
from nxd_ckpt.errors import TopologyMismatch
from nxd_ckpt.reshard.resharding import derived, rescaled, respecified
from nxd_ckpt.reshard.target import interleaved, redistribute_layers


def spec(*shape: int, **partition: object) -> ParameterSpec:
    return ParameterSpec("float32", shape, Partition(**partition))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("partition", "tp", "new_tp", "expected"),
    [
        (Partition(), 2, 4, Partition()),
        (Partition(0, num_partitions=2), 2, 4, Partition(0, num_partitions=4)),
        (Partition(0, num_partitions=2), 4, 8, Partition(0, num_partitions=2)),
        (Partition(0, num_partitions=4), 8, 2, Partition(0, num_partitions=2)),
        (Partition(1, partition_stride=3, num_partitions=2), 2, 1, Partition(1, partition_stride=3)),
        (
            Partition(0, fused=(Section(16, 4), Section(8, 2))),
            4,
            8,
            Partition(0, fused=(Section(16, 8), Section(8, 2))),
        ),
    ],
    ids=["replicated", "all ranks", "fewer stay", "fewer than those", "strided", "fused"],
)
def test_partitions_are_rescaled(partition: Partition, tp: int, new_tp: int, expected: Partition) -> None:
    """As many partitions as ranks stay as many as ranks, fewer stay as many as they are."""
    assert expected == rescaled("w", partition, tp, new_tp)


@pytest.mark.parametrize(
    ("partition", "new_tp"),
    [
        (Partition(0, num_partitions=4, rank_ordering=(0, 2, 1, 3)), 2),
        (Partition(0, num_partitions=2), 3),
        (Partition(0, fused=(Section(12, 4), Section(6, 2))), 3),
    ],
    ids=["ordering", "two for three", "fused"],
)
def test_no_convention_says(partition: Partition, new_tp: int) -> None:
    """Then nothing is guessed: the parameter is named, and the keyword that says it."""
    with pytest.raises(TopologyMismatch, match=r"^w: .*partitions="):
        rescaled("w", partition, 4, new_tp)


def test_local_shapes_on_other_sizes() -> None:
    columns = spec(3, 8, partition_dim=1, num_partitions=2)
    assert (3, 4) == respecified("w", columns, Cut(tp=2), Cut(tp=4)).shape
    strided = spec(12, 2, partition_dim=0, partition_stride=3, num_partitions=2)
    assert (24, 2) == respecified("w", strided, Cut(tp=2), Cut(tp=1)).shape
    experts = spec(4, 8, 6, partition_dim=2, num_partitions=2, expert=True)
    assert (2, 8, 12) == respecified("w", experts, Cut(tp=2, ep=2), Cut(tp=1, ep=4)).shape


@pytest.mark.parametrize(
    ("given", "new", "match"),
    [
        (spec(5, 2, partition_dim=0, num_partitions=2), Cut(tp=4), "10 elements of dimension 0, over tp=4"),
        (spec(2, 8, 6, expert=True), Cut(tp=2, ep=8), "4 experts, over ep=8"),
        (spec(5, 2, known=False), Cut(tp=4), "not known"),
    ],
    ids=["tp", "experts", "unknown"],
)
def test_sizes_that_do_not_divide_it(given: ParameterSpec, new: Cut, match: str) -> None:
    with pytest.raises(TopologyMismatch, match=f"^w: .*{match}"):
        respecified("w", given, Cut(tp=2, ep=2), new)


def test_an_unrecorded_cut_follows_the_live_one_and_the_shapes() -> None:
    """Two key-value heads on four saving ranks: the shapes tell that there were two partitions, not four."""
    live = spec(4, 8, partition_dim=0, num_partitions=2)
    assert Partition(0, num_partitions=2) == derived("w", (4, 8), Cut(tp=4), live, Cut(tp=2)).partition
    assert Partition(0, num_partitions=4) == derived("w", (2, 8), Cut(tp=4), live, Cut(tp=2)).partition


LAYERS = [f"model.layers.{number}.{part}" for number in range(5) for part in ("attention.0.weight", "norm.weight")]
NAMES = ["embed.weight", *LAYERS, "norm.weight", "head.weight"]


def test_as_many_stages_stay_as_they_are() -> None:
    """However uneven they are: the tag knows best. One stage holds everything, in their order, each name once."""
    assert [NAMES] == redistribute_layers([NAMES[:5], [*NAMES[5:], "embed.weight"]], 1)
    stages = [NAMES[:1], NAMES[1:]]
    assert stages == redistribute_layers(stages, 2)


def test_layers_are_spread_evenly() -> None:
    """As NxD does, later stages have one more; what is before the layers goes first, what is after them last."""
    expected = [["embed.weight", *LAYERS[:2]], LAYERS[2:6], [*LAYERS[6:], "norm.weight", "head.weight"]]
    found = redistribute_layers([NAMES], 3)
    assert sorted(NAMES) == sorted(name for stage in found for name in stage)
    assert [expected[0][0], expected[2][-2:]] == [found[0][0], found[2][-2:]]
    assert [[0], [1, 2], [3, 4]] == [
        sorted({int(name.split(".")[2]) for name in stage if name in LAYERS}) for stage in found
    ]


def test_what_several_stages_held_goes_to_the_first_and_the_last() -> None:
    """A tied embedding is on the stage that embeds and on the one that predicts."""
    found = redistribute_layers([NAMES[:4], NAMES[4:8], [*NAMES[8:], "embed.weight"]], 2)
    assert ["embed.weight" in stage for stage in found] == [True, True]


def test_each_stage_needs_a_layer() -> None:
    """Five layers for six stages: the error says how many there are."""
    with pytest.raises(TopologyMismatch, match="6 pipeline stages for 5 repeated layers"):
        redistribute_layers([NAMES], 6)


def test_chunks_are_dealt_out_in_turn() -> None:
    assert [["a", "c", "d", "g"], ["b", "e", "f"]] == interleaved([["a"], ["b"], ["c", "d"], ["e", "f"], ["g"]], 2)
