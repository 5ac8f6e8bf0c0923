"""Weights that were saved in float32, for jobs of bfloat16 weights beside float32 master weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nxd_ckpt.errors import DtypeMismatch
from tests.reshard.ranks import fresh, load_rank, save_job
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import Weight, expected
from tests.tag.equality import difference

TRAINED = [replace(weight, left_out=True) for weight in weights_of(torch.bfloat16) if weight.kind == "parameter"]
"""Bfloat16 weights, each the rounding of its master weight."""


def in_float32(weights: Sequence[Weight]) -> list[Weight]:
    """The same as float32 weights, without any rounding."""
    return [replace(weight, dtype=torch.float32) for weight in weights]


@pytest.mark.parametrize("saves_masters", [True, False])
@pytest.mark.parametrize("to", ["dp2tp2", "dp3pp2"])
def test_master_weights_take_float32_weights(tmp_path: Path, to: str, saves_masters: bool) -> None:
    """On the sizes of the save and on others: master weights bit for bit, also of a job that saved none of its own,
    weights rounded."""
    before = layout_of("dp2tp2", TRAINED, master_weights=saves_masters)
    save_job(tmp_path, in_float32(TRAINED), before)
    live = layout_of(to, TRAINED)
    for at in live.ranks:
        rank = fresh(TRAINED, live, at)
        load_rank(tmp_path, rank, partitions=live.partitions)
        assert None is difference(expected(TRAINED, live, at), rank.held())


def test_tied_weights_take_one_master_weight(tmp_path: Path) -> None:
    tied = [*TRAINED, replace(TRAINED[0], name="tied_head", alias=TRAINED[0].name)]
    save_job(tmp_path, in_float32(tied), layout_of("dp2tp2", tied, master_weights=False))
    live = layout_of("dp2", tied)
    rank = fresh(tied, live, live.topology.at(1))
    load_rank(tmp_path, rank, partitions=live.partitions)
    assert None is difference(expected(tied, live, live.topology.at(1)), rank.held())


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("no optimizer", "embed"),
        ("an optimizer without master weights", "embed"),
        ("left out", "head"),
        ("a frozen weight", "block0_scale"),
    ],
)
def test_without_master_weights_float32_weights_are_refused(tmp_path: Path, case: str, named: str) -> None:
    """Nothing would hold the values: the load names the weight, and changes nothing."""
    kinds = ("parameter", "frozen") if case == "a frozen weight" else ("parameter",)
    weights = [weight for weight in weights_of(torch.bfloat16) if weight.kind in kinds]
    zero1 = case != "an optimizer without master weights"
    save_job(tmp_path, in_float32(weights), layout_of("dp2", weights, zero1=zero1))
    live = layout_of("dp2", weights, zero1=zero1)
    rank = fresh(weights, live, live.topology)
    before = rank.held()
    if case == "no optimizer":
        rank.optimizer = None
    options = {"ignore_keys": [f"optim/{named}"]} if case == "left out" else {}
    with pytest.raises(DtypeMismatch, match=rf"model/{named}: saved as float32, the live one is bfloat16"):
        load_rank(tmp_path, rank, **options)
    if case != "no optimizer":
        assert None is difference(before, rank.held())
