"""What the files that NxD 0.18 wrote tell of themselves; tests/golden loads them, for every configuration and rank."""

from pathlib import Path

import pytest
import torch

from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.formats.optimizer_trees import restore_types
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.layouts.files import MissingTensor
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import lost_files, lost_names
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.tag.equality import difference
from tests.tag.layouts import open_tag, whole


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_sizes_and_parts_come_from_the_files(golden: Path, name: str) -> None:
    """Without a manifest, the topology and what was saved are worked out; dp only where something tells it."""
    golden_one = saved(golden, name)
    config = golden_one.config
    tag = open_tag(LocalStorage(golden_one.directory), config["tags"][-1])
    dp = config["dp"] if config["zero1"] else config["ep"]
    assert {"dp": dp, **{key: config[key] for key in ("tp", "pp", "ep")}} == tag.topology().sizes
    parts = tag.parts()
    kind = "zero1_dcp" if config["dcp"] else "zero1" if config["zero1"] else "plain"
    assert (True, kind, True, True) == (parts.model, parts.optimizer, parts.scheduler, parts.user_content)
    assert config["use_xser"] == parts.use_xser
    assert config["master_in_ckpt"] == parts.master_weights
    assert config["avoid_lp"] == (not parts.lower_precision_weights)
    assert (None, None) == (lost_names(tag.files.storage, tag.files.tag), lost_files(tag.files.storage, tag.files.tag))


def test_tensors_that_were_not_saved_are_marked(golden: Path) -> None:
    """``avoid_saving_lower_precision_weights``: every model tensor is a marker with its dtype and shape."""
    golden_one = saved(golden, "f_dp2_tp2_bf16_master_avoid_lp_xser")
    tag = open_tag(LocalStorage(golden_one.directory), "step_3")
    for rank, topology in enumerate(golden_one.topologies):
        held, tree = golden_one.held("step_3", rank), tag.model_tree(topology.coordinates)
        assert list(held["model"]) == list(tree)
        for name, tensor in held["model"].items():
            leaf = tree[name]
            assert isinstance(leaf, MissingTensor)
            found = (leaf.name, f"torch.{leaf.dtype}", leaf.shape)
            assert (name, str(tensor.dtype), tuple(tensor.shape)) == found


def test_expert_parallel_ranks_share_what_is_no_experts(golden: Path) -> None:
    """xser: ep rank 1 finds its experts in its own folder, and everything else in that of ep rank 0."""
    tag = open_tag(LocalStorage(golden / "i_dp2_tp2_ep2_nozero1_xser" / "ckpt"), "step_3")
    for tree in (tag.model_tree(Coordinates(dp_rank=1)), tag.optimizer_tree(Coordinates(dp_rank=1))):
        folders = {"ep_rank_01" in leaf.file for _, leaf in iter_tensors(tree)}
        assert {True, False} == folders
    model = tag.model_tree(Coordinates(dp_rank=1))
    assert "ep_rank_01" in model["moe.up.weight"].file
    assert "ep_rank_00" in model["embed.weight"].file


def test_dcp_optimizers_name_their_parameters(golden: Path) -> None:
    """``use_zero1_dcp`` keeps names; they come in the order of the optimizer's indices."""
    golden_one = saved(golden, "l_dp2_zero1_dcp_async")
    tag = open_tag(LocalStorage(golden_one.directory), "step_3")
    [names] = golden_one.config["optimizer_param_names_rank0"]
    assert names == tag.optimizer_names(Coordinates())
    assert tag.optimizer_tree(Coordinates()) == tag.optimizer_tree(Coordinates(), names)


@pytest.mark.parametrize("form", ["pt", "xser"])
@pytest.mark.parametrize(("output", "dp"), [("full_to_dp4", 4), ("sharded_to_dp3", 3)])
def test_the_converters_shards_are_read(golden: Path, form: str, output: str, dp: int) -> None:
    """What the converter sharded anew reads as any optimizer: inline tensors, no info, an empty ``.tensors``."""
    tag = open_tag(LocalStorage(golden / "k_convert" / form), output)
    assert {"dp": dp, "tp": 1, "pp": 1, "ep": 1} == tag.topology().sizes
    for rank in range(dp):
        file = golden / "k_convert" / form / output / f"optim/dp_rank_{rank:02d}_tp_rank_00_pp_rank_00.pt"
        expected = restore_types(torch.load(file, weights_only=True))
        assert difference(expected, whole(tag, tag.optimizer_tree(Coordinates(dp_rank=rank)))) is None
