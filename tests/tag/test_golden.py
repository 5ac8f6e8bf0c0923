"""What NxD 0.18 wrote is read back bit for bit, for every configuration and rank."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.formats.optimizer_trees import restore_types
from nxd_ckpt.formats.tensors import TensorStub, iter_tensors, map_tensors
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.files import MissingTensor
from nxd_ckpt.tag.nxd_tag import TagLayout
from nxd_ckpt.tag.verify import lost_files, lost_names
from tests.tag.equality import difference
from tests.tag.layouts import open_tag

CONFIGURATIONS = [
    "a_dp2_zero1_pt",
    "b_dp2_zero1_xser",
    "c_dp2_tp2_zero1_xser",
    "d_dp4_zero1_xser",
    "e_dp2_tp2_bf16_master_pt",
    "f_dp2_tp2_bf16_master_avoid_lp_xser",
    "g_dp2_tp2_nozero1_xser",
    "h_tp2_pp2_zero1_xser",
    "i_dp2_tp2_ep2_nozero1_xser",
    "i_dp4_ep2_zero1_pt",
    "j_dp2_zero1_xser_async_kept2",
    "l_dp2_zero1_dcp_async",
    "s_tp2_stride2_nozero1_pt",
]


def whole(tag: TagLayout, tree: Any) -> Any:
    """The tree with its tensors read."""
    return map_tensors(tree, tag.files.read, TensorStub)


def ranks(directory: Path, config: dict[str, Any], tag: str) -> Iterator[tuple[Coordinates, dict[str, Any]]]:
    """Every rank's coordinates, and what it held when the tag was saved."""
    for rank in config["rank_coords"]:
        name = f"rank_{rank['rank']:04d}.pt"
        tagged = directory / "expected" / f"{tag}.{name}"
        expected = torch.load(tagged if tagged.exists() else directory / "expected" / name, weights_only=False)
        yield Coordinates(rank["pp"], rank["dp"], rank["tp"]), expected


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_rank_reads_what_it_held(golden: Path, name: str) -> None:
    """Model, optimizer, scheduler and user content of every rank are equal to what was live, types included."""
    directory = golden / name
    config = json.loads((directory / "config.json").read_text())
    for path in sorted((directory / "ckpt").iterdir()):
        tag = open_tag(LocalStorage(directory / "ckpt"), path.name)
        for at, held in ranks(directory, config, path.name):
            if not config["avoid_lp"]:
                assert difference(held["model"], whole(tag, tag.model_tree(at))) is None
            assert difference(held["optimizer"], whole(tag, tag.optimizer_tree(at))) is None
            assert difference(held["scheduler"], tag.scheduler()) is None
            assert difference(held["user_content"], tag.user_content()) is None


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_sizes_and_parts_come_from_the_files(golden: Path, name: str) -> None:
    """Without a manifest, the topology and what was saved are worked out; dp only where something tells it."""
    directory = golden / name
    config = json.loads((directory / "config.json").read_text())
    tag = open_tag(LocalStorage(directory / "ckpt"), config["tags"][-1])
    dp = config["dp"] if config["zero1"] else config["ep"]
    assert {"dp": dp, **{key: config[key] for key in ("tp", "pp", "ep")}} == tag.topology().sizes
    parts = tag.parts()
    kind = "zero1_dcp" if config["dcp"] else "zero1" if config["zero1"] else "plain"
    assert (True, kind, True, True) == (
        parts.model,
        parts.optimizer,
        parts.scheduler,
        parts.user_content,
    )
    assert config["use_xser"] == parts.use_xser
    assert config["master_in_ckpt"] == parts.master_weights
    assert config["avoid_lp"] == (not parts.lower_precision_weights)
    assert (None, None) == (lost_names(tag.files.storage, tag.files.tag), lost_files(tag.files.storage, tag.files.tag))


def test_tensors_that_were_not_saved_are_marked(golden: Path) -> None:
    """``avoid_saving_lower_precision_weights``: every model tensor is a marker with its dtype and shape."""
    directory = golden / "f_dp2_tp2_bf16_master_avoid_lp_xser"
    config = json.loads((directory / "config.json").read_text())
    tag = open_tag(LocalStorage(directory / "ckpt"), "step_3")
    for at, held in ranks(directory, config, "step_3"):
        tree = tag.model_tree(at)
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
    directory = golden / "l_dp2_zero1_dcp_async"
    config = json.loads((directory / "config.json").read_text())
    tag = open_tag(LocalStorage(directory / "ckpt"), "step_3")
    [names] = config["optimizer_param_names_rank0"]
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
