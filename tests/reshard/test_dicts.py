"""Empty dicts are filled with what a rank of any other size would hold: looking at a checkpoint without its model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from tests.live.doubles import ShardedOptimizer
from tests.reshard.ranks import save_job
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import OPTIONS, Layout, expected
from tests.tag.equality import difference

WEIGHTS = weights_of()
PAIRS = [("dp2tp2", "dp4"), ("tp4", "dp3tp2"), ("dp2", "tp2"), ("dp3pp2", "dp2pp2"), ("pp2", "dp2tp2"), ("dp4", "dp1")]


def by_name(optimizer: dict[str, Any], names: list[str], zero1: bool) -> dict[str, dict[str, Any]]:
    """A filled state dict's entries, as ``whole.expected`` has them but for the options."""
    state, masters = optimizer["base_state" if zero1 else "state"], optimizer.get("sharded_master_weights", {})
    found = {}
    for index, name in enumerate(names):
        shard = {"shard": masters[index]} if index in masters else {}
        found[name] = {**state.get(index, {}), **shard}
    return dict(sorted(found.items()))


def listed(layout: Layout, stages: Iterable[int]) -> list[str]:
    """The optimizer's parameters in the order of their groups; in each group, in the order of the stages."""
    groups = [[name for stage in stages for name in group if stage in layout.stages[name]] for group in layout.groups]
    return list(dict.fromkeys(name for group in groups for name in group))


@pytest.mark.parametrize("use_xser", [False, True], ids=["pt", "xser"])
@pytest.mark.parametrize("zero1", [True, False], ids=["zero1", "plain"])
@pytest.mark.parametrize(("on", "to"), PAIRS)
@pytest.mark.one_in(5)
def test_any_rank_s_state_without_live_objects(tmp_path: Path, on: str, to: str, zero1: bool, use_xser: bool) -> None:
    """Names, parameters' parts, moments, master weights and groups as a rank of that size would have them."""
    saved, target = layout_of(on, WEIGHTS, zero1=zero1), layout_of(to, WEIGHTS, zero1=zero1)
    save_job(tmp_path, WEIGHTS, saved, use_xser=use_xser)
    for at in target.ranks:
        model: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        assert {"saved": 1} == load_checkpoint(tmp_path, model=model, optimizer=optimizer, topology=at)
        wanted = expected(WEIGHTS, target, at)
        assert None is difference(wanted["model"], dict(sorted(model.items())))
        entries = {
            name: {key: value for key, value in entry.items() if key != "options"}
            for name, entry in wanted["optimizer"].items()
        }
        stages = [at.pp_rank] if at.pp > 1 else range(saved.topology.pp)
        found = by_name(optimizer, listed(saved, stages), zero1)
        assert None is difference(entries, found)
        assert [OPTIONS[0]["lr"], OPTIONS[1]["lr"]] == [group["lr"] for group in optimizer["param_groups"]]


@pytest.mark.parametrize("live", [Topology(dp=2), Topology(), Topology(dp=4)], ids=["same", "fewer", "more"])
def test_dicts_are_filled_with_weights_that_master_weights_stand_for(tmp_path: Path, live: Topology) -> None:
    """Model and optimizer, or the model alone: what ``read()`` reads."""
    model = torch.nn.Linear(3, 4).to(torch.bfloat16)
    optimizers = [
        ShardedOptimizer(model.parameters(), rank, [[0, 1]], lr=0.1, save_master_weights=True) for rank in range(2)
    ]
    for rank, optimizer in enumerate(optimizers):
        save_checkpoint(
            tmp_path, "t", model, optimizer, topology=Topology(dp=2, rank=rank), run_id="x", async_save=True,
            use_xser=True, avoid_saving_lower_precision_weights=True,
        )  # fmt: skip
    close_checkpointers()
    expected = open_checkpoint(tmp_path).read("model/weight")
    empty: dict[str, Any] = {}
    for optimizer_dict in (empty, None):
        state: dict[str, Any] = {}
        load_checkpoint(tmp_path, model=state, optimizer=optimizer_dict, topology=live)
        assert torch.equal(expected, state["weight"])
        assert torch.bfloat16 == state["bias"].dtype
