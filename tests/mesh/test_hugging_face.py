"""Hugging Face directories and meshes: loaded into DTensors, and exported from tags of mesh jobs."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nxd_ckpt import convert
from tests.hugging_face.reference import Model
from tests.hugging_face.saved import differences, weights, write_model
from tests.mesh import hugging_face
from tests.support.rank_pool import RankPool

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
    convert(tmp_path / "run" / "step_1", tmp_path / "out", to="hf", config=tmp_path / "hf" / "config.json")
    assert [] == differences(expected, weights(tmp_path / "out"))
    if name == "sharded":
        for one in gloo_ranks.run(hugging_face.read_by_torch, tmp_path / "out", state):
            assert [] == differences(state, one)


@pytest.mark.parametrize("name", hugging_face.JOBS)
@pytest.mark.one_in(2)
def test_an_optimizer_is_exported(gloo_ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Its moments, the steps that were made and a learning rate that is a tensor."""
    state = write_model(tmp_path / "hf", MODEL)
    found = gloo_ranks.run(hugging_face.trained, state, name, 0.5, tmp_path / "run")
    config = tmp_path / "hf" / "config.json"
    convert(tmp_path / "run" / "step_1", tmp_path / "out", to="hf", config=config, optimizer=True)
    moments = load_file(tmp_path / "out" / "optimizer.safetensors")
    expected = {f"{key}/exp_avg": value for key, value in {**found[0], **found[-1]}.items()}
    assert [] == differences(expected, {key: value for key, value in moments.items() if key in expected})
    document = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert {0.5} == {group["lr"] for group in document["param_groups"]}
    assert {1.0} == {scalars["step"] for scalars in document["state"].values()}
    assert state.keys() == document["state"].keys()


@pytest.mark.parametrize("name", ["sharded", "staged"])
def test_a_tensor_of_no_rank_is_refused(gloo_ranks: RankPool, tmp_path: Path, name: str) -> None:
    state = write_model(tmp_path, MODEL)
    save_file({**state, "model.layers.9.mlp.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    for said in gloo_ranks.run(hugging_face.loaded, tmp_path, state, name, tmp_path / "run"):
        assert said.startswith("KeyMismatch: ")
        assert "unexpected in the checkpoint: 'model.layers.9.mlp.bias'" in said
