"""What NxD 0.18 wrote loads through ``load_checkpoint`` into empty dicts, as every rank held it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import has_checkpoint, load_checkpoint, open_checkpoint
from nxd_ckpt.errors import PartNotFound
from tests.golden.checkpoints import CONFIGURATIONS, saved
from tests.tag.equality import difference

LEFT_OUT = "f_dp2_tp2_bf16_master_avoid_lp_xser"
"""Its model files refer to tensors that were never written."""


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != LEFT_OUT])
@pytest.mark.one_in(2)
def test_one_process_loads_what_any_rank_held(golden: Path, name: str) -> None:
    """Model, optimizer, scheduler and user content equal what was live: bits, dtypes, types and order of keys."""
    golden_one = saved(golden, name)
    for tag in golden_one.tags:
        for rank, topology in enumerate(golden_one.topologies):
            loaded: dict[str, Any] = {"model": {}, "optimizer": {}, "scheduler": {}}
            content = load_checkpoint(golden_one.directory, tag, **loaded, topology=topology)
            held = golden_one.held(tag, rank)
            assert None is difference(held["model"], loaded["model"])
            assert None is difference(held["optimizer"], loaded["optimizer"])
            assert None is difference(held["scheduler"], loaded["scheduler"])
            assert None is difference(held["user_content"], content)


def test_an_opened_checkpoint_shows_the_same(golden: Path) -> None:
    """``open_checkpoint`` reads every rank's state without being one of the ranks."""
    golden_one = saved(golden, "c_dp2_tp2_zero1_xser")
    opened = open_checkpoint(golden_one.directory)
    assert ("step_3", None) == (opened.tag, opened.manifest)
    assert {"dp": 2, "tp": 2, "pp": 1, "ep": 1} == opened.topology.sizes
    for rank in range(4):
        held = golden_one.held("step_3", rank)
        assert None is difference(held["model"], opened.model_state(rank))
        assert None is difference(held["optimizer"], opened.optimizer_state(rank))
        assert None is difference(held["scheduler"], opened.scheduler_state())
        assert None is difference(held["user_content"], opened.user_content())


def test_a_resume_takes_the_latest_complete_tag(golden: Path, tmp_path: Path) -> None:
    """Two of three async saves were kept: step_5 is resumed, and step_4 if step_5 turns out to be incomplete."""
    golden_one = saved(golden, "j_dp2_zero1_xser_async_kept2")
    directory = shutil.copytree(golden_one.directory, tmp_path / "ckpt")
    assert has_checkpoint(directory)
    for tag in ("step_5", "step_4"):
        model: dict[str, Any] = {}
        load_checkpoint(directory, model=model, topology=golden_one.topologies[1])
        assert None is difference(golden_one.held(tag, 1)["model"], model)
        os.remove(directory / tag / "done")
    assert not has_checkpoint(directory)


def test_weights_left_out_need_names(golden: Path) -> None:
    """Without names of the optimizer's entries nothing stands for the weights: strict says so, naming tensors."""
    golden_one = saved(golden, LEFT_OUT)
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    with pytest.raises(PartNotFound, match=r"frozen_scale, logit_scale.*param_names="):
        load_checkpoint(golden_one.directory, model=model, optimizer=optimizer, topology=golden_one.topologies[0])
    assert ({}, {}) == (model, optimizer)


def test_weights_left_out_come_from_master_weights(golden: Path) -> None:
    """With names, even into dicts, every weight is its master weights' cast; three tensors are in no file."""
    golden_one = saved(golden, LEFT_OUT)
    for rank, topology in enumerate(golden_one.topologies):
        held = golden_one.held("step_3", rank)
        names = held["optimizer_param_names"]
        lost = ("frozen_scale", "pos_scale", "tokens_seen")
        strict: dict[str, Any] = {}
        with pytest.raises(PartNotFound, match="frozen_scale, pos_scale, tokens_seen"):
            load_checkpoint(golden_one.directory, model=strict, param_names=names, topology=topology)
        model: dict[str, torch.Tensor] = {}
        optimizer: dict[str, Any] = {}
        load_checkpoint(
            golden_one.directory,
            model=model,
            optimizer=optimizer,
            strict=False,
            param_names=names,
            topology=topology,
        )
        expected = {name: tensor for name, tensor in held["model"].items() if name not in lost}
        assert ({}, None) == (strict, difference(expected, model))
        assert None is difference(held["optimizer"], optimizer)
