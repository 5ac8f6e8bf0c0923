"""The real client: transformers loads what was exported, and computes the same logits with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nxd_ckpt import Topology, convert, load_checkpoint, save_checkpoint
from tests.hugging_face.families import CASES, FAMILIES, random_model
from tests.hugging_face.reference import Job, Model, State
from tests.hugging_face.saved import differences, live, save_job, weights

BIASES = {"bias": "attention_bias", "mlp_bias": "mlp_bias"}


def as_transformers_5_names_them(state: State) -> State:
    """The names that transformers 5 gives the experts of its own Mixtral: files keep the older ones."""
    found = {name: tensor for name, tensor in state.items() if "block_sparse_moe" not in name}
    for layer in range(2):
        theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        gate, down, up = (
            torch.stack([state[f"{theirs}.experts.{expert}.w{part}.weight"] for expert in range(4)])
            for part in (1, 2, 3)
        )
        found[f"{ours}.gate.weight"] = state[f"{theirs}.gate.weight"]
        found[f"{ours}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        found[f"{ours}.experts.down_proj"] = down
    return found


def exported(tag: Path, out: Path, config: str = "config", **options: Any) -> Any:
    """The model that transformers loads from an export, which must have every tensor and no other."""
    convert(tag, out, to="hf", config=tag.parents[1] / config, size_per_shard="20KB", **options)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    expected: dict[str, list[str]] = {key: [] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert expected == {key: sorted(report[key]) for key in expected}
    return loaded


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) % 64
    with torch.no_grad():
        computed: torch.Tensor = model.eval()(input_ids=tokens).logits
    return computed


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
def test_transformers_computes_the_same_logits_with_an_export(tmp_path: Path, name: str) -> None:
    """A random model, sharded and saved as NxD does, and exported: nothing missing, logits to the last bit."""
    _, changes, how = CASES[name]
    original = random_model(name)
    original.config.save_pretrained(tmp_path / "config")
    family = {"mistral": "llama"}.get(original.config.model_type, original.config.model_type)
    biases = {key: changes.get(option, family == "qwen2" and key == "bias") for key, option in BIASES.items()}
    job = Job(Model(family, 2, 8, changes.get("num_key_value_heads", 8), 4, 48, 64, 4, **biases), **how)
    tag = save_job(tmp_path / "run", job, dict(original.state_dict()))

    loaded = exported(tag, tmp_path / "out", kv_size_multiplier=job.copies, hardware=job.hardware)

    assert torch.equal(logits(original), logits(loaded))


@pytest.mark.parametrize("name", [*CASES, *FAMILIES])
@pytest.mark.one_in(3)
def test_a_live_model_of_transformers_is_saved_exported_and_loaded(tmp_path: Path, name: str) -> None:
    """On one rank, under its own names: what it saves is exported, and the export loads into a fresh one."""
    original = random_model(name)
    original.save_pretrained(tmp_path / "config")
    save_checkpoint(tmp_path / "run", "step_1", original)
    exported(tmp_path / "run" / "step_1", tmp_path / "out")
    assert [] == differences(weights(tmp_path / "config"), weights(tmp_path / "out"))

    fresh = transformers.AutoModelForCausalLM.from_config(original.config)
    load_checkpoint(tmp_path / "out", model=fresh)
    assert [] == differences(dict(original.state_dict()), dict(fresh.state_dict()))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.one_in(3)
def test_a_family_is_imported_for_a_job_and_exported_again(tmp_path: Path, name: str) -> None:
    """Every tensor bit for bit what save_pretrained wrote, config.json too; logits to the last bit."""
    *_, how = FAMILIES[name]
    original = random_model(name)
    original.save_pretrained(tmp_path / "config")
    convert(tmp_path / "config", tmp_path / "run" / "step_1", to="tag", names="nxd", **how)

    copies = {key: how[key] for key in ("kv_size_multiplier", "mapping") if key in how}
    loaded = exported(tmp_path / "run" / "step_1", tmp_path / "out", **copies)

    assert [] == differences(weights(tmp_path / "config"), weights(tmp_path / "out"))
    first, last = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("config", "out"))
    assert first == last
    assert torch.equal(logits(original), logits(loaded))


@pytest.mark.parametrize("mapping", ["gpt2", "gpt2_linear"])
def test_files_of_gpt2_without_its_head_are_imported_and_loaded(tmp_path: Path, mapping: str) -> None:
    """As openai-community/gpt2 has them: no name begins with "transformer.", and masks lie beside the weights."""
    original = random_model("gpt2")
    base, whole = tmp_path / "base", tmp_path / "whole"
    original.save_pretrained(whole)
    original.transformer.save_pretrained(base)
    state = load_file(base / "model.safetensors")
    assert "h.0.attn.c_attn.weight" in state
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    save_file({**state, **masks}, base / "model.safetensors", metadata={"format": "pt"})
    held: list[State] = []
    for source in (whole, base):
        run = tmp_path / f"run-{source.name}"
        convert(source, run / "step_0", to="tag", names="nxd", tp=2, mapping=mapping)
        held.append({})
        load_checkpoint(run, model=held[-1], topology=Topology(tp=2, tp_rank=1))
    assert [] == differences(*held)

    exported(tmp_path / "run-base" / "step_0", tmp_path / "out", config="whole", mapping=mapping)
    assert [] == differences(weights(whole), weights(tmp_path / "out"))

    fresh = transformers.AutoModelForCausalLM.from_config(original.config)
    load_checkpoint(base, model=fresh)
    assert [] == differences(dict(original.state_dict()), dict(fresh.state_dict()))


def heads_as_transformers_5_names_them(state: State) -> State:
    """The name that transformers 5 gives GPT-NeoX's head: files keep the older one."""
    return {name.replace("embed_out", "lm_head"): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("family", "named"), [("mixtral", as_transformers_5_names_them), ("gpt-neox", heads_as_transformers_5_names_them)]
)
def test_a_model_of_transformers_5_is_saved_exported_and_loaded(
    tmp_path: Path, family: str, named: Callable[[State], State]
) -> None:
    """Its modules have other names than its files; Mixtral's has the experts of a layer in two tensors."""
    original = random_model(family)
    original.config.save_pretrained(tmp_path / "config")
    state = named(dict(original.state_dict()))
    save_checkpoint(tmp_path / "run", "step_1", dict(state))
    assert torch.equal(logits(original), logits(exported(tmp_path / "run" / "step_1", tmp_path / "out")))

    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    model = live(fresh)
    load_checkpoint(tmp_path / "out", model=model)
    assert [] == differences(state, dict(model.state_dict()))
