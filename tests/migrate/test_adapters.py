"""Adapters that optimum-neuron trained become PEFT's files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nxd_ckpt import convert
from nxd_ckpt.core.names import rank_file
from nxd_ckpt.errors import CheckpointNotFound, InvalidArgument, MalformedFile, PartNotFound, UnsupportedState
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, write_config
from tests.lora.adapters import adapters_of
from tests.migrate.written_adapter import ABOVE, write_adapter, write_pickled_adapter

JOBS = {
    "q k v apart": Job(Model(heads=4, kv_heads=4, head_dim=4), tp=2, pp=2),
    "copies of heads": Job(Model(heads=8, head_dim=2), tp=4, qkv="linear", copies=2),
    "fused copies": Job(Model(heads=8, head_dim=2), tp=4, pp=2, qkv="fused", copies=2),
}


def config_of(folder: Path, job: Job) -> Path:
    return write_config(folder / "config", job.model.config)


@pytest.mark.parametrize("name", JOBS)
def test_each_adapter_is_that_of_its_layer(tmp_path: Path, name: str) -> None:
    """Under PEFT's names, what NxD fuses apart again, with the configuration that was beside it."""
    job = JOBS[name]
    place = write_adapter(tmp_path, job)
    done = convert(place, tmp_path / "out", to="hf", config=config_of(tmp_path, job))
    assert ("optimum-neuron, a PEFT adapter", ("trainer_state.json",)) == (done.writer, done.left_out)
    expected: State = {}
    for layer, (a, b) in adapters_of(job.model).items():
        expected |= {f"{ABOVE}{layer}.lora_A.weight": a, f"{ABOVE}{layer}.lora_B.weight": b}
    assert [] == differences(expected, load_file(tmp_path / "out" / "adapter_model.safetensors"))
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert json.loads((place / "adapter_default" / "adapter_config.json").read_text()) == written


@pytest.mark.parametrize("qkv", ["separate", "linear", "fused"])
def test_an_adapter_of_which_optimum_neuron_pickled_the_metadata(tmp_path: Path, qkv: str) -> None:
    """Each layer has its own B and A, but q, k and v, which lost theirs where they became one layer; the columns of the
    output layer's A are in the order of the base's heads again. What was trained whole is there too."""
    job = Job(Model(heads=8, kv_heads=8), tp=2, fused_mlp=False)
    if qkv != "separate":
        job = Job(Model(heads=8), tp=4, fused_mlp=False, qkv=qkv, copies=2)
    done = convert(write_pickled_adapter(tmp_path, job), tmp_path / "out", to="hf", config=config_of(tmp_path, job))
    assert "optimum-neuron, a PEFT adapter" == done.writer
    expected: State = {f"{ABOVE}lm_head.weight": job.model.state()["lm_head.weight"]}
    for layer, (a, b) in adapters_of(job.model).items():
        if qkv == "separate" or not layer.endswith(("q_proj", "k_proj", "v_proj")):
            expected |= {f"{ABOVE}{layer}.lora_A.weight": a, f"{ABOVE}{layer}.lora_B.weight": b}
    assert [] == differences(expected, load_file(tmp_path / "out" / "adapter_model.safetensors"))


def test_one_of_several_adapters_is_named(tmp_path: Path) -> None:
    """By its directory, or by that of its shards."""
    job = JOBS["q k v apart"]
    for name in ("default", "other"):
        place = write_adapter(tmp_path, job, name)
    config = config_of(tmp_path, job)
    with pytest.raises(CheckpointNotFound, match=r"adapter_default/adapter_shards, .*adapter_other/adapter_shards"):
        convert(place, tmp_path / "out", to="hf", config=config)
    for number, path in enumerate((place / "adapter_other", place / "adapter_other" / "adapter_shards")):
        assert convert(path, tmp_path / f"out-{number}", to="hf", config=config).nbytes > 0


def test_one_adapter_has_a_name_that_another_begins_with(tmp_path: Path) -> None:
    """The metadata of each lists both, for it is of the whole model: only its own are expected in its files."""
    job = JOBS["q k v apart"]
    for name in ("a", "a-2"):
        place = write_adapter(tmp_path, job, name)
    for path in place.glob("adapter_*/adapter_shards/mp_metadata_*.json"):
        other = "a" if path.parts[-3] == "adapter_a-2" else "a-2"
        content = json.loads(path.read_text())
        layers = [key.rsplit(".", 2)[0] for key in content["parameters"] if ".lora_" in key]
        for layer in (*layers, f"{ABOVE}lm_head.modules_to_save"):
            content["parameters"][f"{layer}.{other}.weight"] = {"tensor_model_parallel": False}
        path.write_text(json.dumps(content))
    config = config_of(tmp_path, job)
    for name in ("a", "a-2"):
        convert(place / f"adapter_{name}", tmp_path / f"out-{name}", to="hf", config=config)
    written = [load_file(tmp_path / f"out-{name}" / "adapter_model.safetensors") for name in ("a", "a-2")]
    assert written[0].keys() == written[1].keys() == {
        f"{ABOVE}{layer}.lora_{part}.weight" for layer in adapters_of(job.model) for part in "AB"
    }


def test_what_is_refused(tmp_path: Path) -> None:
    """Forms that need the base, the base's sizes unknown, no configuration, another kind, missing adapters."""
    job = JOBS["copies of heads"]
    place, config = write_adapter(tmp_path, job), config_of(tmp_path, job)
    for form in ("tag", "dcp", "torchtitan"):
        with pytest.raises(UnsupportedState, match="is an adapter without its base model"):
            convert(place, tmp_path / "out", names="hf", to=form, config=config)
    with pytest.raises(InvalidArgument, match=r"config\.json has no num_attention_heads"):
        convert(place, tmp_path / "out", to="hf")
    peft_config = place / "adapter_default" / "adapter_config.json"
    peft_config.write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(UnsupportedState, match="peft_type='IA3'; only LORA adapters"):
        convert(place, tmp_path / "out", to="hf", config=config)
    peft_config.unlink()
    with pytest.raises(PartNotFound, match="not the factor that they are multiplied by"):
        convert(place, tmp_path / "out", to="hf", config=config)
    shards = place / "adapter_default" / "adapter_shards"
    path = shards / "model" / rank_file(0, None, 0, 0)
    content = torch.load(path)
    name = content.popitem()[0]
    torch.save(content, path)
    with pytest.raises(MalformedFile, match=f"lists {name} that the model's files do not have"):
        convert(place, tmp_path / "out", to="hf", config=config)
    shutil.rmtree(shards / "model")
    assert not (tmp_path / "out").exists()
