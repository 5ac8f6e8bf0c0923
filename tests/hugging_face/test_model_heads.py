"""Directories of models without a head, or with another one, load into such models, and become tags and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    GPTNeoXModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from nxd_ckpt import convert, load_checkpoint
from nxd_ckpt.errors import KeyMismatch

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_labels": 1,
}  # fmt: skip


def made(kind: Any) -> Any:
    config: Any = {"G": GPTNeoXConfig, "L": LlamaConfig, "Q": Qwen2Config}[kind.__name__[0]]
    return kind(config(**SIZES))


def values(model: Any) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "kind",
    [
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
        LlamaModel,
        Qwen2ForSequenceClassification,
        GPTNeoXForSequenceClassification,
        GPTNeoXModel,
    ],
)
def test_a_directory_without_the_usual_head_is_read(kind: Any, tmp_path: Path) -> None:
    """As a load into such a model, and as an import, whose export is the same directory."""
    saved = made(kind)
    saved.save_pretrained(tmp_path / "saved")
    live = made(kind)
    load_checkpoint(tmp_path / "saved", model=live)
    assert values(saved) == values(live)
    convert(tmp_path / "saved", tmp_path / "tags" / "imported", to="tag", names="nxd", tp=2)
    convert(tmp_path / "tags" / "imported", tmp_path / "back", to="hf", config=tmp_path / "saved")
    assert values(saved) == values(kind.from_pretrained(tmp_path / "back"))


def test_a_head_that_is_lost_is_missed(tmp_path: Path) -> None:
    """In a model whose architecture has one; and one that the live model lacks is named."""
    made(LlamaForCausalLM).save_pretrained(tmp_path / "causal")
    made(LlamaModel).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "config.json").write_bytes((tmp_path / "causal" / "config.json").read_bytes())
    with pytest.raises(KeyMismatch, match=r"lm_head\.weight"):
        convert(tmp_path / "base", tmp_path / "tags" / "one", to="tag", names="nxd")
    with pytest.raises(KeyMismatch, match=r"unexpected in the checkpoint: 'lm_head\.weight'; load with strict=False"):
        load_checkpoint(tmp_path / "causal", model=made(LlamaModel))


def test_a_base_model_takes_what_it_has_with_strict_false(tmp_path: Path) -> None:
    """Of a directory with a head; and a model with another head takes the rest."""
    saved = made(LlamaForCausalLM)
    saved.save_pretrained(tmp_path / "causal")
    base, reward = made(LlamaModel), made(LlamaForSequenceClassification)
    for model in (base, reward):
        load_checkpoint(tmp_path / "causal", model=model, strict=False)
    assert torch.equal(saved.model.embed_tokens.weight, base.embed_tokens.weight)
    assert torch.equal(saved.model.embed_tokens.weight, reward.model.embed_tokens.weight)
