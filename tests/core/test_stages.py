"""Names dealt out anew to another number of pipeline stages."""

from __future__ import annotations

import pytest

from nxd_ckpt.errors import TopologyMismatch
from nxd_ckpt.reshard.target import interleaved, redistribute_layers

LAYERS = [f"model.layers.{number}.{part}" for number in range(5) for part in ("attention.0.weight", "norm.weight")]
NAMES = ["embed.weight", *LAYERS, "norm.weight", "head.weight"]


def test_one_stage_holds_everything() -> None:
    """In the order of the stages, each name once."""
    assert [NAMES] == redistribute_layers([NAMES[:5], [*NAMES[5:], "embed.weight"]], 1)


def test_as_many_stages_stay_as_they_are() -> None:
    """However uneven they are: the tag knows best."""
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
    """A rank of an interleaved pipeline holds every pp-th of them."""
    assert [["a", "c", "d", "g"], ["b", "e", "f"]] == interleaved([["a"], ["b"], ["c", "d"], ["e", "f"], ["g"]], 2)
