"""What NxD 0.18 wrote loads into live modules and optimizers, as every rank held it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, convert, load_checkpoint
from nxd_ckpt.errors import PartNotFound
from tests.golden.checkpoints import groups_like, module_like, saved, sharded
from tests.live.doubles import ExpertShardedOptimizer
from tests.tag.equality import difference

pytestmark = pytest.mark.both

SHARDED = [
    "a_dp2_zero1_pt",
    "c_dp2_tp2_zero1_xser",
    "d_dp4_zero1_xser",
    "e_dp2_tp2_bf16_master_pt",
    "h_tp2_pp2_zero1_xser",
    "l_dp2_zero1_dcp_async",
]
LOST = ["frozen_scale", "pos_scale", "tokens_seen"]
"""Tensors of f_... that no file holds."""


def options_differ(held: list[dict[str, Any]], live: list[dict[str, Any]]) -> str | None:
    """Where saved param groups and live ones differ, but for options that only the live optimizer knows."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in held]
    found = [{key: group.get(key) for key in known} for known, group in zip(options, live, strict=True)]
    return difference(options, found)


@pytest.mark.parametrize("name", SHARDED)
def test_live_zero1_ranks_continue_from_it(golden: Path, name: str) -> None:
    """Parameters, buffers, moments, steps, options and master weights of every rank are those that were held."""
    golden_one = saved(golden, name)
    for rank, topology in enumerate(golden_one.topologies):
        held = golden_one.held("step_3", rank)
        model = module_like(held)
        optimizer = sharded(golden_one, rank, held, model)
        load_checkpoint(golden_one.directory, "step_3", model, optimizer, topology=topology)
        state = optimizer.state_dict()
        assert None is difference(held["model"], dict(model.state_dict()))
        assert None is difference(held["optimizer"]["base_state"], state["base_state"])
        assert None is difference(held["optimizer"]["shape_info"], state["shape_info"])
        assert None is difference(held["optimizer"].get("sharded_master_weights"), state.get("sharded_master_weights"))
        assert None is options_differ(held["optimizer"]["param_groups"], optimizer.param_groups)
        assert None is options_differ(held["optimizer"]["param_groups"], optimizer.base_optimizer.param_groups)


def test_live_expert_parallel_ranks_continue_from_it(golden: Path) -> None:
    """The two optimizers behind NxD's expert-parallel one get their own entries, experts cut over their replicas."""
    golden_one = saved(golden, "i_dp4_ep2_zero1_pt")
    groups = golden_one.config["dp_groups"], golden_one.config["edp_groups"]
    for rank, topology in enumerate(golden_one.topologies):
        held = golden_one.held("step_3", rank)
        model = module_like(held)
        optimizer = ExpertShardedOptimizer(groups_like(held, model), rank, *groups, lr=0.5)
        load_checkpoint(golden_one.directory, "step_3", model, optimizer, topology=topology)
        assert None is difference(held["model"], dict(model.state_dict()))
        assert None is difference(held["optimizer"]["base_state"], optimizer.state_dict()["base_state"])


@pytest.mark.parametrize("sizes", [(4, 2), (2, 2)], ids=["same sizes", "other sizes"])
@pytest.mark.parametrize("converted", [False, True], ids=["as saved", "converted"])
def test_expert_parallel_ranks_step_with_the_rates_that_the_scheduler_had_set(
    golden: Path, tmp_path: Path, sizes: tuple[int, int], converted: bool
) -> None:
    """NxD's file has the learning rate of the last step, 0.008; the scheduler had brought it to 0.007 at the save."""
    golden_one, (dp, ep) = saved(golden, "i_dp4_ep2_zero1_pt"), sizes
    directory = golden_one.directory
    if converted:
        convert(directory / "step_3", tmp_path / "out" / "step_3", to="tag", tp=1, pp=1, dp=dp, ep=ep, durable=False)
        directory = tmp_path / "out"
    held, at = golden_one.held("step_3", 0), Topology(dp=dp, ep=ep)
    model = module_like(held)
    optimizer = ExpertShardedOptimizer(
        groups_like(held, model), 0, [at.replicas(at.coordinates)], [at.replicas(at.coordinates, expert=True)], lr=0.5
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    load_checkpoint(directory, "step_3", model, optimizer, scheduler, topology=at)
    inner = optimizer.non_ep_zero_optimizer, optimizer.ep_zero_optimizer
    rates = [group["lr"] for each in (optimizer, *inner) for group in each.param_groups]
    assert [held["scheduler"]["_last_lr"][0]] * 6 == rates


@pytest.mark.parametrize("name", ["g_dp2_tp2_nozero1_xser", "i_dp2_tp2_ep2_nozero1_xser", "s_tp2_stride2_nozero1_pt"])
def test_live_plain_optimizers_continue_from_it(golden: Path, name: str) -> None:
    """``torch.optim.AdamW``'s whole state dict is as torch would load what was held, expert parameters included."""
    golden_one = saved(golden, name)
    for rank, topology in enumerate(golden_one.topologies):
        held = golden_one.held("step_3", rank)
        model = module_like(held)
        optimizer = torch.optim.AdamW(groups_like(held, model), lr=0.5)
        load_checkpoint(golden_one.directory, "step_3", model, optimizer, topology=topology)
        assert None is difference(held["model"], dict(model.state_dict()))
        expected = torch.optim.AdamW(groups_like(held, module_like(held)))
        expected.load_state_dict(held["optimizer"])
        assert None is difference(expected.state_dict()["state"], optimizer.state_dict()["state"])
        assert None is options_differ(held["optimizer"]["param_groups"], optimizer.param_groups)


@pytest.mark.parametrize("strict", [True, False])
def test_weights_that_were_left_out_are_restored(
    golden: Path, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    """A live model gets its weights from the master weights; frozen ones and buffers stay, with a warning."""
    golden_one = saved(golden, "f_dp2_tp2_bf16_master_avoid_lp_xser")
    for rank, topology in enumerate(golden_one.topologies):
        held = golden_one.held("step_3", rank)
        model = module_like(held)
        optimizer = sharded(golden_one, rank, held, model)
        fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        load_checkpoint(golden_one.directory, "step_3", model, optimizer, strict=strict, topology=topology)
        expected = {name: fresh[name] if name in LOST else tensor for name, tensor in held["model"].items()}
        state = optimizer.state_dict()
        assert None is difference(expected, dict(model.state_dict()))
        assert None is difference(held["optimizer"]["base_state"], state["base_state"])
        assert None is difference(held["optimizer"]["sharded_master_weights"], state["sharded_master_weights"])
    names = ", ".join(LOST)
    assert 1 == sum(names in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_weights_that_nothing_stands_for_are_refused(golden: Path) -> None:
    """Without the optimizer's names nobody knows which master weights are a parameter's."""
    golden_one = saved(golden, "f_dp2_tp2_bf16_master_avoid_lp_xser")
    model = module_like(golden_one.held("step_3", 0))
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(PartNotFound, match=r"no master weights replace them\. Pass the live model and optimizer"):
        load_checkpoint(golden_one.directory, "step_3", model, topology=golden_one.topologies[0])
    assert None is difference(fresh, dict(model.state_dict()))
