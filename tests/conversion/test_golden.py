"""Checkpoints that NxD wrote, converted: equal to what NxD's converter made of them, and right where that is wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import convert, open_checkpoint
from tests.conversion.tags import contents, optimizers, plainly
from tests.golden.checkpoints import saved
from tests.tag.equality import difference

SOURCES = {"pt": "a_dp2_zero1_pt", "xser": "b_dp2_zero1_xser"}
ZERO1 = [
    "a_dp2_zero1_pt",
    "b_dp2_zero1_xser",
    "c_dp2_tp2_zero1_xser",
    "d_dp4_zero1_xser",
    "e_dp2_tp2_bf16_master_pt",
    "f_dp2_tp2_bf16_master_avoid_lp_xser",
    "h_tp2_pp2_zero1_xser",
    "i_dp4_ep2_zero1_pt",
    "l_dp2_zero1_dcp_async",
]


def converted_by_nxd(golden: Path, form: str, name: str) -> list[Any]:
    """What is in each rank's file, in order of rank."""
    files = sorted((golden / "k_convert" / form / name / "optim").glob("*.pt"))
    return [torch.load(file, weights_only=True) for file in files if file.is_file()]


@pytest.mark.parametrize("form", SOURCES)
def test_the_output_is_that_of_nxds_converter(golden: Path, tmp_path: Path, form: str) -> None:
    """Unsharded, sharded again from there, and from one number of ranks to another: the same content."""
    tag = saved(golden, SOURCES[form]).directory / "step_3"
    full = golden / "k_convert" / form / "full"

    convert(tag, tmp_path / "full", to="tag", optimizer_form="zero1_full", durable=False)
    convert(full, tmp_path / "full_to_dp4", to="tag", optimizer_form="zero1", dp=4, durable=False)
    convert(tag, tmp_path / "sharded_to_dp3", to="tag", optimizer_form="zero1", dp=3, durable=False)

    for name in ("full", "full_to_dp4", "sharded_to_dp3"):
        expected = converted_by_nxd(golden, form, name)
        assert None is difference(plainly(expected), plainly(optimizers(tmp_path / name)), name)
        names = {path.name for path in (golden / "k_convert" / form / name / "optim").iterdir()}
        assert names <= {path.name for path in (tmp_path / name / "optim").iterdir()}


@pytest.mark.parametrize("name", ["b_dp2_zero1_xser", "e_dp2_tp2_bf16_master_pt", *ZERO1[-3:]])
@pytest.mark.one_in(2)
def test_there_and_back_again_is_what_nxd_saved(golden: Path, tmp_path: Path, name: str) -> None:
    """Over full files, or another number of ranks, to the first number: everything is as NxD saved it."""
    source = saved(golden, name)
    checkpoint = open_checkpoint(source.directory, "step_3")
    dp, ep = checkpoint.topology.dp, checkpoint.topology.ep

    convert(source.directory / "step_3", tmp_path / "full", to="tag", optimizer_form="zero1_full", durable=False)
    other = tmp_path / "other"
    convert(source.directory / "step_3", other, to="tag", optimizer_form="zero1", dp=3 * ep, durable=False)
    for start in ("full", "other"):
        back = tmp_path / f"back_from_{start}"
        convert(tmp_path / start, back, to="tag", optimizer_form="zero1", dp=dp, durable=False)

        for rank, found in enumerate(optimizers(back)):
            expected = checkpoint.optimizer_state(rank)
            if checkpoint.parts.optimizer == "zero1_dcp":  # which stores no padding
                expected = {**expected, "base_state": _padded(expected["base_state"], found["base_state"])}
            assert None is difference(plainly(expected), plainly(found), f"rank {rank}")


def test_weights_that_nxd_left_out_stay_left_out(golden: Path, tmp_path: Path) -> None:
    """Which master weights stand for them only a live model tells: nothing is lost, and nothing made up."""
    source = saved(golden, "f_dp2_tp2_bf16_master_avoid_lp_xser")

    convert(source.directory / "step_3", tmp_path / "dp3", to="tag", optimizer_form="zero1", dp=3, durable=False)

    parts = open_checkpoint(tmp_path, "dp3").parts
    assert (True, False, True) == (parts.model, parts.lower_precision_weights, parts.master_weights)
    assert contents(source.directory / "step_3" / "model") == contents(tmp_path / "dp3" / "model")


def test_nxds_files_are_copied(golden: Path, tmp_path: Path) -> None:
    """NxD writes into the files of a tag that it saves again: nothing of it may be the same file."""
    tag = saved(golden, "a_dp2_zero1_pt").directory / "step_3"

    convert(tag, tmp_path / "dp3", to="tag", optimizer_form="zero1", dp=3, durable=False)

    for file in ("model/dp_rank_00_tp_rank_00_pp_rank_00.pt", "scheduler.pt", "user_content.pt"):
        assert (tag / file).read_bytes() == (tmp_path / "dp3" / file).read_bytes()
        assert (tag / file).stat().st_ino != (tmp_path / "dp3" / file).stat().st_ino


def _padded(state: dict[int, Any], like: dict[int, Any]) -> dict[int, Any]:
    """Shards that lack padding, with zeros at their end."""

    def padded(tensor: Any, other: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
            return tensor
        return torch.cat([tensor, tensor.new_zeros(len(other) - len(tensor), *tensor.shape[1:])])

    return {
        index: {key: padded(value, like[index][key]) for key, value in entry.items()} for index, entry in state.items()
    }
