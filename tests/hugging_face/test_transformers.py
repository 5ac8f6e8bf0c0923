"""The real client: transformers loads what was exported, and computes the same logits with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nxd_ckpt.convert import export_checkpoint
from tests.hugging_face.reference import Job, Model
from tests.hugging_face.saved import save_job

pytestmark = [pytest.mark.plain, pytest.mark.once]

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 8}, {"tp": 2, "qkv": "coalesced"}),
    "llama-gqa": ("LlamaConfig", {"num_key_value_heads": 2}, {"tp": 4, "qkv": "linear", "copies": 2, "pp": 2}),
    "llama-gqa-fused": (
        "LlamaConfig", {"num_key_value_heads": 2}, {"tp": 4, "qkv": "fused", "copies": 2, "hardware": "trn2"}
    ),
    "llama-tied": ("LlamaConfig", {"num_key_value_heads": 2, "tie_word_embeddings": True}, {"tp": 2}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 4, "sliding_window": 8}, {"tp": 2, "qkv": "linear"}),
    "mixtral": (
        "MixtralConfig", {"num_key_value_heads": 4, "num_local_experts": 4}, {"tp": 2, "ep": 2, "qkv": "linear"}
    ),
    "gpt-neox": ("GPTNeoXConfig", {}, {"tp": 2, "pp": 2}),
}


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12) % 64
    with torch.no_grad():
        computed: torch.Tensor = model.eval()(input_ids=tokens).logits
    return computed


@pytest.mark.parametrize("name", CASES)
def test_transformers_computes_the_same_logits_with_an_export(tmp_path: Path, name: str) -> None:
    """A random model, sharded and saved as NxD does, and exported: nothing missing, logits to the last bit."""
    kind, changes, how = CASES[name]
    config = getattr(transformers, kind)(**SIZES, **changes)
    torch.manual_seed(7)
    original = transformers.AutoModelForCausalLM.from_config(config)
    original.config.save_pretrained(tmp_path / "config")
    family = {"mistral": "llama"}.get(config.model_type, config.model_type)
    job = Job(Model(family, 2, 8, changes.get("num_key_value_heads", 8), 4, 48, 64, 4), **how)
    tag = save_job(tmp_path / "run", job, dict(original.state_dict()))

    export_checkpoint(
        tag,
        tmp_path / "out",
        config=tmp_path / "config",
        kv_size_multiplier=job.copies,
        hardware=job.hardware,
        size_per_shard="20KB",
    )

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []} == {
        key: sorted(report[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    assert torch.equal(logits(original), logits(loaded))
