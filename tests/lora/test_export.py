"""Adapters as PEFT's files: the real client loads them, and computes what the trained model would."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from nxd_ckpt import Topology, convert, save_checkpoint
from nxd_ckpt.errors import InvalidArgument, PartNotFound, UnsupportedState
from tests.conversion.tags import as_nxd
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import write_config
from tests.interop.saving import save_as_every_rank
from tests.lora.adapters import ALPHA, RANK, adapters_of, adapters_of_rank
from tests.lora.doubles import LoraConfig, LoraModel
from tests.lora.sharded import CausalLM

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "separate": (4, {"tp": 2}),
    "linear": (2, {"tp": 4, "qkv": "linear", "copies": 2}),
    "coalesced": (4, {"tp": 2, "pp": 2, "qkv": "coalesced"}),
    "alone": (4, {}),
}
TARGETS = ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def model_of(kv_heads: int) -> Model:
    return Model("llama", 2, 4, kv_heads, 4, 12, 24)


def live(job: Job, at: Topology, **options: Any) -> LoraModel:
    """A rank's model with its part of these adapters: cut, ordered and fused as the weights that they are added to."""
    model = LoraModel(CausalLM(job, at), LoraConfig(RANK, ALPHA, target_modules=TARGETS, **options))
    held = adapters_of_rank(job, at.tp_rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(held[name])
    return model


def save(directory: Path, job: Job) -> Path:
    sizes = Topology(tp=job.tp, pp=job.pp)
    topologies = [sizes.at(rank) for rank in range(sizes.world_size)]
    save_as_every_rank(directory, "t", topologies, lambda rank: {"model": live(job, topologies[rank])}, durable=False)
    return directory / "t"


@pytest.mark.parametrize("name", CASES)
def test_peft_computes_with_exported_adapters(tmp_path: Path, name: str) -> None:
    """The logits of the base with its weights changed by hand: B A, times alpha by rank."""
    kv_heads, how = CASES[name]
    job = Job(model_of(kv_heads), **how)
    config = transformers.LlamaConfig(**job.model.config, max_position_embeddings=32)
    torch.manual_seed(7)
    base = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    tag = save(tmp_path / "run", job)

    convert(
        tag, tmp_path / "out", to="hf", config=tmp_path / "config", kv_size_multiplier=job.copies, hardware=job.hardware
    )

    assert ["adapter_config.json", "adapter_model.safetensors"] == sorted(p.name for p in (tmp_path / "out").iterdir())
    tokens = torch.arange(16).reshape(2, 8)
    changed = {key: value.clone() for key, value in base.state_dict().items()}
    for layer, (a, b) in adapters_of(job.model).items():
        changed[f"{layer}.weight"] += b @ a * ALPHA / RANK
    expected = transformers.LlamaForCausalLM(config).eval()
    expected.load_state_dict(changed)
    with torch.no_grad():
        tuned = peft.PeftModel.from_pretrained(base, tmp_path / "out")
        assert torch.allclose(expected(tokens).logits, tuned(tokens).logits, atol=1e-4, rtol=1e-4)
    document = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert sorted(adapters_of(job.model)) == sorted(document["target_modules"])


@pytest.mark.parametrize("how", [{"tp": 2}, {"tp": 2, "qkv": "coalesced"}, {"tp": 2, "qkv": "linear"}])
def test_adapters_that_nxd_gathered_are_exported_as_they_are(tmp_path: Path, how: dict[str, Any]) -> None:
    """Each file of NxD's default has all ranks' parts, in the order of the ranks; nothing is doubled."""
    job = Job(model_of(4), **how)
    topologies = [Topology(tp=2).at(rank) for rank in range(2)]
    ours = save(tmp_path / "ours", job)
    parts = [adapters_of_rank(job, rank) for rank in range(2)]
    gathered: dict[str, Any] = {}
    for name, first in parts[0].items():
        dim = 1 if "lora_A" in name else 0
        is_cut = any(layer in name for layer in ("o_proj", "down_proj")) == ("lora_A" in name)
        gathered[name] = torch.cat([part[name] for part in parts], dim) if is_cut else first
    gathered["lora_config"] = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none"}
    save_as_every_rank(tmp_path / "nxd", "t", topologies, lambda rank: {"model": dict(gathered)}, durable=False)
    config = written(tmp_path, job)
    convert(ours, tmp_path / "a", to="hf", mapping="llama", config=config)
    convert(as_nxd(tmp_path / "nxd" / "t"), tmp_path / "b", to="hf", mapping="llama", config=config)
    files = [load_file(tmp_path / out / "adapter_model.safetensors") for out in "ab"]
    assert {name: value.tolist() for name, value in files[0].items()} == {
        name: value.tolist() for name, value in files[1].items()
    }
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        convert(tmp_path / "nxd" / "t", tmp_path / "c", to="hf", mapping="llama")


def test_adapters_without_their_configuration_are_refused(tmp_path: Path) -> None:
    """What NxD saves by default does not say what they are multiplied by; nor does another adapter's file beside it."""
    job = Job(model_of(4))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 999}))
    save_checkpoint(tmp_path, "t", live(job, Topology()), ignore_keys=["model/lora_config"], durable=False)
    with pytest.raises(PartNotFound, match="save_lora_config_adapter=True"):
        convert(tmp_path / "t", tmp_path / "out", to="hf", mapping="llama")


def test_peft_exports_what_it_alone_can(tmp_path: Path) -> None:
    """The configuration of its adapters is not in a model's state: the advice is another than to save it again."""
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**model_of(4).config, "num_hidden_layers": 1}))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    save_checkpoint(tmp_path, "t", model, durable=False)
    with pytest.raises(UnsupportedState, match=r"PEFT's adapters.*save_pretrained\(\), or merge_and_unload\(\)"):
        convert(tmp_path / "t", tmp_path / "out", to="hf", mapping="llama")


def test_modules_that_were_trained_as_a_whole_are_exported(tmp_path: Path) -> None:
    """With their names in PEFT's configuration, which then takes them in place of the base's."""
    job = Job(model_of(4))
    config = transformers.LlamaConfig(**job.model.config, max_position_embeddings=32)
    config.save_pretrained(tmp_path / "config")
    model = live(job, Topology(), modules_to_save=["model.norm"])
    with torch.no_grad():
        model.module.get_parameter("model.norm.weight").fill_(3.0)
    save_checkpoint(tmp_path, "t", model, durable=False)
    convert(tmp_path / "t", tmp_path / "out", to="hf", config=tmp_path / "config")
    tuned = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(config), tmp_path / "out")
    merged = tuned.merge_and_unload()
    assert bool((merged.model.norm.weight == 3.0).all())
    assert bool((merged.model.layers[0].input_layernorm.weight == 1.0).all())


def test_a_base_that_was_saved_with_its_adapters_is_left_out(tmp_path: Path) -> None:
    """The files are the same as of adapters alone."""
    job = Job(model_of(4))
    for tag, options in (("alone", {}), ("both", {"save_lora_base": True, "merge_sharded_lora": False})):
        save_checkpoint(tmp_path, tag, live(job, Topology(), **options), durable=False)
        convert(tmp_path / tag, tmp_path / f"{tag}-out", to="hf", mapping="llama", config=written(tmp_path, job))
    files = [(tmp_path / f"{tag}-out" / "adapter_model.safetensors").read_bytes() for tag in ("alone", "both")]
    assert files[0] == files[1]


def written(directory: Path, job: Job) -> Path:
    return write_config(directory / "config", job.model.config).parent
