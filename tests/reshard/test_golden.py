"""What NxD 0.18 wrote, without any index of ours, loads on other sizes."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import Topology, errors
from tests.golden.checkpoints import saved
from tests.reshard.golden import GoldenModel
from tests.reshard.golden_live import Live, check
from tests.reshard.ranks import fresh, load_rank, save_job
from tests.reshard.transformer import layout_of, topology_of, weights_of
from tests.reshard.whole import expected
from tests.tag.equality import difference

LOST = ["frozen_scale", "pos_scale", "tokens_seen"]
"""Tensors of the configuration without lower-precision weights that no file holds."""

BY_POSITION = [
    *[("a_dp2_zero1_pt", sizes) for sizes in ("dp1", "dp3", "dp4", "tp3")],
    *[("b_dp2_zero1_xser", sizes) for sizes in ("dp1", "dp3", "dp4")],
    *[("c_dp2_tp2_zero1_xser", sizes) for sizes in ("dp4", "tp4", "tp1", "dp3tp2")],
    *[("d_dp4_zero1_xser", sizes) for sizes in ("dp1", "dp2", "dp3", "dp2tp2")],
    *[("e_dp2_tp2_bf16_master_pt", sizes) for sizes in ("dp3", "dp4tp2", "tp4")],
    *[("g_dp2_tp2_nozero1_xser", sizes) for sizes in ("tp1", "dp3", "tp4")],
    *[("h_tp2_pp2_zero1_xser", sizes) for sizes in ("dp2tp2pp2", "dp3tp2pp2")],
    *[("i_dp4_ep2_zero1_pt", sizes) for sizes in ("dp2ep2", "dp6ep2", "dp2ep2tp2")],
    *[("i_dp2_tp2_ep2_nozero1_xser", sizes) for sizes in ("dp1", "tp2", "dp4ep4", "dp2ep2", "dp4ep2tp4")],
    *[("l_dp2_zero1_dcp_async", sizes) for sizes in ("dp1", "dp3", "tp2")],
    *[("s_tp2_stride2_nozero1_pt", sizes) for sizes in ("tp1", "tp4")],
]
BY_NAME = [
    *[("h_tp2_pp2_zero1_xser", sizes) for sizes in ("tp2", "dp2tp2", "dp3tp2")],
    *[("c_dp2_tp2_zero1_xser", sizes) for sizes in ("pp2", "dp3pp2")],
    *[("g_dp2_tp2_nozero1_xser", sizes) for sizes in ("pp2", "tp2pp2")],
    *[("i_dp4_ep2_zero1_pt", sizes) for sizes in ("dp1", "dp2", "dp3ep3", "tp2")],
]


def first_of_each(cases: list[tuple[str, str]]) -> list[Any]:
    """`make test` takes one for each checkpoint, `make soak` the others."""
    first = {name: (name, sizes) for name, sizes in reversed(cases)}
    return [pytest.param(*case, marks=[] if first[case[0]] == case else pytest.mark.soak) for case in cases]


@pytest.mark.parametrize(("name", "sizes"), first_of_each(BY_POSITION))
def test_live_ranks_of_other_sizes_continue_from_it(golden: Path, name: str, sizes: str) -> None:
    """With the same stages and experts, a parameter's position in the param groups tells which entry is its.

    NxD's xser files mark experts, which no live parameter is without expert parallelism: other experts are no matter.
    """
    model = GoldenModel(saved(golden, name))
    topology = topology_of(sizes)
    for rank in range(topology.world_size):
        live = Live(model, topology.at(rank))
        live.load(model)
        check(model, live)


@pytest.mark.parametrize(("name", "sizes"), first_of_each(BY_NAME))
def test_with_other_stages_or_experts_names_are_needed(golden: Path, name: str, sizes: str) -> None:
    """Positions on other stages say nothing: without ``saved_param_names=`` it is refused and nothing changes."""
    model = GoldenModel(saved(golden, name))
    topology = topology_of(sizes)
    for rank in range(topology.world_size):
        live = Live(model, topology.at(rank))
        before = {key: value.clone() for key, value in live.stage.state_dict().items()}
        with pytest.raises(errors.OptimizerMismatch, match="saved_param_names="):
            live.load(model, partitions=model.unmarked_experts(live.at))
        assert None is difference(before, dict(live.stage.state_dict()))
        live.load(model, saved_param_names=model.saved_names, partitions=model.unmarked_experts(live.at))
        check(model, live)


def test_names_must_be_those_that_were_saved(golden: Path) -> None:
    """One stage's names too few, or a name too few in a stage, are refused."""
    model = GoldenModel(saved(golden, "h_tp2_pp2_zero1_xser"))
    live = Live(model, Topology(tp=2, tp_rank=1))
    first, second = model.saved_names
    for names in ([first], [first, second[:1]], [second, first]):
        with pytest.raises(errors.OptimizerMismatch, match="names"):
            live.load(model, saved_param_names=names)
    assert all(not set(entry) - {"master"} for entry in live.entries().values())


@pytest.mark.parametrize("sizes", ["dp1", "dp4", "dp3tp2", "tp4"])
@pytest.mark.one_in(2)
def test_weights_that_were_left_out_come_from_master_weights(golden: Path, sizes: str) -> None:
    """On other sizes as well: a weight is its part of the master weights, cast; what no file holds stays."""
    model = GoldenModel(saved(golden, "f_dp2_tp2_bf16_master_avoid_lp_xser"))
    topology = topology_of(sizes)
    for rank in range(topology.world_size):
        live = Live(model, topology.at(rank))
        fresh = {name: value.clone() for name, value in live.stage.state_dict().items()}
        live.load(model)
        live.wanted["model"] |= {name: fresh[name] for name in LOST}
        check(model, live)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("h_tp2_pp2_zero1_xser", errors.TopologyMismatch, r"norm.*expected to be equal on all ranks.*partitions="),
        ("i_dp4_ep2_zero1_pt", errors.IncompatibleState, r"moe.*partitions="),
    ],
    ids=["norms that differ", "experts without marks"],
)
def test_what_the_tag_does_not_tell_is_refused(golden: Path, name: str, error: type[Exception], message: str) -> None:
    """Norms that differ between tensor-parallel ranks: on other tp, none of them is taken. Experts that NxD did not
    mark, as it had no expert parallelism: ``partitions=`` has to tell."""
    model = GoldenModel(saved(golden, name))
    live = Live(model, Topology())
    before = {key: value.clone() for key, value in live.stage.state_dict().items()}
    with pytest.raises(error, match=message):
        live.load(model, saved_param_names=model.saved_names)
    assert None is difference(before, dict(live.stage.state_dict()))


def test_marks_tell_the_order_of_a_zero1_optimizer_of_experts(tmp_path: Path) -> None:
    """Which keeps experts behind the others; files as NxD's, without what we add."""
    weights = weights_of(experts=True)
    save_job(tmp_path, weights, layout_of("dp4ep2", weights), use_xser=True)
    (tmp_path / "step_1" / "manifest.json").unlink()
    shutil.rmtree(tmp_path / "step_1" / "index")
    layout = layout_of("dp2", weights)
    for at in layout.ranks:
        live = fresh(weights, layout, at)
        load_rank(tmp_path, live)
        assert None is difference(expected(weights, layout, at), live.held())
