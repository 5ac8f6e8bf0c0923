"""A tag as global tensors: those that ranks were given parts of, or the reason why they cannot be put together."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import open_checkpoint
from nxd_ckpt.errors import OptimizerMismatch, TopologyMismatch
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.opened import open_complete_tag
from tests.cli.checkpoints import CUTS, save_examples, whole
from tests.conversion.tags import unsharded
from tests.golden.checkpoints import saved
from tests.reshard.whole_tensors import read


def test_every_cut_is_undone(tmp_path: Path) -> None:
    """Of every known cut, over tensor- and expert-parallel ranks, the whole tensor comes back."""
    save_examples(tmp_path)
    opened = open_complete_tag(open_storage(tmp_path), "cut")
    tag = WholeTag(opened)

    assert [f"model/{name}" for name in CUTS] == list(tag.tensors)
    for name in CUTS.keys() - {"lost"}:
        assert torch.equal(whole(name), read(opened, tag, f"model/{name}")), name

    assert tag.tensors["model/lost"].shape is None
    with pytest.raises(TopologyMismatch, match="lost: its cut over"):
        tag.leaf("model/lost")


def test_zero1_shards_are_joined_under_the_names_of_their_parameters(tmp_path: Path) -> None:
    """Moments, master weights and steps of two ranks; options of each param group with the names in it."""
    save_examples(tmp_path)
    opened = open_complete_tag(open_storage(tmp_path), "zero1")
    tag = WholeTag(opened)
    checkpoint = open_checkpoint(tmp_path, "zero1")
    expected = unsharded([checkpoint.optimizer_state(rank) for rank in range(2)])

    [group] = tag.param_groups
    assert ["up.weight", "up.bias", "down.weight"] == group["params"]
    assert expected["param_groups"][0]["lr"] == group["lr"]
    for index, name in enumerate(group["params"]):
        entries = {**expected["base_state"][index], "master_weights": expected["sharded_master_weights"][index]}
        for key, value in entries.items():
            assert torch.equal(value, read(opened, tag, f"optim/{name}/{key}")), (name, key)


def test_tags_of_nxd_name_everything_and_say_what_they_do_not_tell(golden: Path) -> None:
    """Without tensor parallelism all of it can be put together; with it, names and what is missing are told."""
    alone = saved(golden, "a_dp2_zero1_pt")
    opened = open_complete_tag(open_storage(alone.directory), "step_3")
    tag = WholeTag(opened)
    held: dict[str, Any] = alone.held("step_3", 0)["model"]
    assert all(torch.equal(held[name], read(opened, tag, f"model/{name}")) for name in held)
    assert read(opened, tag, "optim/#0/exp_avg").shape == tag.tensors["optim/#0/exp_avg"].shape
    assert {3} == {value for name, value in tag.values.items() if name.endswith("/step")}

    cut = WholeTag(open_complete_tag(open_storage(saved(golden, "h_tp2_pp2_zero1_xser").directory), "step_3"))
    assert {"optim/#0.0/exp_avg", "optim/#1.0/exp_avg"} <= cut.tensors.keys()
    with pytest.raises(OptimizerMismatch, match="saved_param_names="):
        cut.leaf("optim/#1.0/exp_avg")
