"""Rows of a vocabulary, and heads, are cut off as padding only where the sizes explain them and they are zero."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import load_checkpoint, save_checkpoint
from nxd_ckpt.convert import export_checkpoint
from nxd_ckpt.errors import ShapeMismatch
from tests.hugging_face.saved import weights

pytestmark = [pytest.mark.plain, pytest.mark.once]

HIDDEN, VOCAB = 8, 64
SIZES: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB,
}  # fmt: skip
LAYER = "model.layers.0."


def llama(rows: int, surplus: float = 7.0) -> dict[str, torch.Tensor]:
    embedding = torch.full((rows, HIDDEN), 7.0)
    embedding[VOCAB:] = surplus
    shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8)}
    state = {f"{LAYER}self_attn.{name}_proj.weight": torch.ones(shape) for name, shape in shapes.items()}
    state |= {f"{LAYER}mlp.{name}_proj.weight": torch.ones(8, 8) for name in ("gate", "up", "down")}
    state |= {f"{LAYER}{name}_layernorm.weight": torch.ones(8) for name in ("input", "post_attention")}
    return state | {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.clone(),
        "model.norm.weight": torch.ones(HIDDEN),
    }


def export(path: Path, state: dict[str, torch.Tensor], **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**SIZES, **changes}))
    save_checkpoint(path / "run", "s", state)
    export_checkpoint(path / "run" / "s", path / "out", config=path / "config.json")
    return path / "out"


@pytest.mark.parametrize(
    ("rows", "surplus", "text"),
    [
        (VOCAB + 8, 7.0, "vocab_size 64: rows 64 to 71 .* No rounding .* config.json with vocab_size 72"),
        (VOCAB + 8, 0.0, "No rounding"),
        (2 * VOCAB, 1e-30, "rows 64 to 127 .* not zero, .* config.json with vocab_size 128"),
        (2 * VOCAB, float("nan"), "not zero"),
    ],
)
def test_rows_that_may_be_trained_are_not_left_out(tmp_path: Path, rows: int, surplus: float, text: str) -> None:
    """The error names them, what config.json says, and a config.json that keeps them; that works."""
    state = llama(rows, surplus)
    with pytest.raises(ShapeMismatch, match=text):
        export(tmp_path, state)
    assert not (tmp_path / "out").exists()
    exported = weights(export(tmp_path, state, vocab_size=rows))
    assert torch.equal(exported["lm_head.weight"].nan_to_num(), state["lm_head.weight"].nan_to_num())


def test_padding_of_zeros_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Megatron rounds a vocabulary, to 128."""
    caplog.set_level(logging.INFO, "nxd_ckpt")
    exported = weights(export(tmp_path, llama(2 * VOCAB, 0.0)))
    assert (VOCAB, HIDDEN) == exported["lm_head.weight"].shape
    assert "padding of zeros is left out" in caplog.text
    assert "lm_head.weight rows 64 to 127" in caplog.text


@pytest.mark.parametrize("rows", [VOCAB + 1, VOCAB + 8, 2 * VOCAB, VOCAB + 1000])
def test_live_rows_beyond_the_files_are_not_zeroed(tmp_path: Path, rows: int) -> None:
    """One rank pads nothing. The live model stays as it was; strict=False loads and warns."""
    out = export(tmp_path, llama(VOCAB))
    live, before = llama(rows, 3.0), llama(rows, 3.0)
    with pytest.raises(ShapeMismatch, match=f"vocab_size 64, the live .* has {rows} rows"):
        load_checkpoint(out, model=live)
    assert all(torch.equal(live[name], tensor) for name, tensor in before.items())
