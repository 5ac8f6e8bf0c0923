"""Hugging Face directories and meshes: loaded into DTensors, and exported from tags of mesh jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nxd_ckpt.convert import export_checkpoint
from tests.hugging_face.reference import Model
from tests.hugging_face.saved import differences, weights, write_model
from tests.mesh import hugging_face
from tests.rigs.rank_pool import RankPool

pytestmark = [pytest.mark.plain, pytest.mark.once]

MODEL = Model()


@pytest.mark.parametrize("name", hugging_face.JOBS)
def test_a_directory_is_loaded_and_exported_again(gloo_ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Every rank takes its part, by strict names, pipeline stages too; and the export of what they save is the same
    model. torch's own reader reads it."""
    state = write_model(tmp_path / "hf", MODEL, shards=2)
    found = gloo_ranks.run(hugging_face.loaded, tmp_path / "hf", state, name, tmp_path / "run")
    dtype = torch.bfloat16 if name == "crossed" else torch.float32
    expected = {key: value.to(dtype) for key, value in state.items()}
    assert [] == differences(expected, {**found[0], **found[-1]})
    export_checkpoint(tmp_path / "run" / "step_1", tmp_path / "out", config=tmp_path / "hf" / "config.json")
    assert [] == differences(expected, weights(tmp_path / "out"))
    if name == "sharded":
        for one in gloo_ranks.run(hugging_face.read_by_torch, tmp_path / "out", state):
            assert [] == differences(state, one)


@pytest.mark.parametrize("name", ["sharded", "staged"])
def test_a_tensor_of_no_rank_is_refused(gloo_ranks: RankPool, tmp_path: Path, name: str) -> None:
    """On all ranks, and nothing changes on any."""
    state = write_model(tmp_path, MODEL)
    save_file({**state, "model.layers.9.mlp.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    for said in gloo_ranks.run(hugging_face.loaded, tmp_path, state, name, tmp_path / "run"):
        assert said.startswith("KeyMismatch: ")
        assert "holds model.layers.9.mlp.bias, which no rank's model has" in said
