"""Rows of a vocabulary, and heads, are cut off as padding only where the sizes explain them and they are zero."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Topology, convert, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import ShapeMismatch
from tests.hugging_face import saved
from tests.hugging_face.reference import Model, State
from tests.hugging_face.saved import weights, write_config

MODEL = Model(layers=1, intermediate=8, vocab=64)
HIDDEN, VOCAB = MODEL.hidden, MODEL.vocab


def llama(rows: int, surplus: float = 7.0) -> State:
    embedding = torch.full((rows, HIDDEN), 7.0)
    embedding[VOCAB:] = surplus
    ones = {name: torch.ones_like(tensor) for name, tensor in MODEL.state().items()}
    return {**ones, "model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}


def export(path: Path, state: State, **changes: Any) -> Path:
    config = write_config(path, {**MODEL.config, **changes})
    save_checkpoint(path / "run", "s", state)
    convert(path / "run" / "s", path / "out", to="hf", config=config)
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


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("rows", [VOCAB + 1, VOCAB + 8, 2 * VOCAB, VOCAB + 1000])
def test_live_rows_beyond_the_files_are_not_zeroed(tmp_path: Path, rows: int, strict: bool) -> None:
    """One rank pads nothing. The live model stays as it was, whatever ``strict`` says."""
    out = export(tmp_path, llama(VOCAB))
    live, before = llama(rows, 3.0), llama(rows, 3.0)
    with pytest.raises(ShapeMismatch, match=f"vocab_size 64, the live .* has {rows} rows"):
        load_checkpoint(out, model=live, strict=strict)
    assert all(torch.equal(live[name], tensor) for name, tensor in before.items())


RANKS = [(2 * VOCAB, 1), (512, 0), (512, 1), (1024, 1)]
"""Live rows of two ranks, all of which a rounding explains, and a rank that has some beyond the vocabulary."""


def rank_of(whole: State, rank: int) -> State:
    """What one of two tensor-parallel ranks holds."""
    columns = ("o_proj.weight", "down_proj.weight")
    dims = {name: 1 if name.endswith(columns) else 0 for name in whole if "norm" not in name}
    return {name: one.chunk(2, dims[name])[rank].clone() if name in dims else one for name, one in whole.items()}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("rows", "rank"), RANKS)
def test_live_rows_that_may_be_trained_are_not_zeroed(tmp_path: Path, rows: int, rank: int, strict: bool) -> None:
    """A rounding that the ranks do not need explains only rows that are zero, or on the meta device."""
    out, at = export(tmp_path, llama(VOCAB)), Topology(tp=2, tp_rank=rank)
    live, before = (rank_of(llama(rows, 3.0), rank) for _ in range(2))
    with pytest.raises(ShapeMismatch, match=r"rows 64 to .* not zero now, .* set them to zero before the load"):
        load_checkpoint(out, model=live, topology=at, strict=strict)
    assert all(torch.equal(live[name], tensor) for name, tensor in before.items())
    for zeros in (saved.live(rank_of(llama(rows, 0.0), rank), "meta"), rank_of(llama(rows, 0.0), rank)):
        load_checkpoint(out, model=zeros, topology=at, strict=strict)
        state = zeros if isinstance(zeros, dict) else zeros.state_dict()
        assert torch.equal(rank_of(llama(rows, 0.0), rank)["lm_head.weight"], state["lm_head.weight"])


def test_rows_that_the_ranks_need_are_padding(tmp_path: Path) -> None:
    """Sixty-three rows are 64 on two ranks; one more is an unexplained number."""
    state = {name: tensor[: VOCAB - 1] if len(tensor) == VOCAB else tensor for name, tensor in llama(VOCAB).items()}
    out = export(tmp_path, state, vocab_size=VOCAB - 1)
    live = rank_of(llama(VOCAB), 1)
    load_checkpoint(out, model=live, topology=Topology(tp=2, tp_rank=1))
    assert not live["lm_head.weight"][-1].any()
    with pytest.raises(ShapeMismatch, match="no rounding to 2 tensor-parallel ranks explains"):
        load_checkpoint(out, model=rank_of(llama(VOCAB + 6, 0.0), 1), topology=Topology(tp=2, tp_rank=1))


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads"])
@pytest.mark.parametrize("strict", [True, False])
def test_heads_beyond_the_files_are_refused(tmp_path: Path, key: str, strict: bool) -> None:
    """In either direction: an export that would drop heads, and a load that would fill only some."""
    fewer = {"head_dim": 2, key: 2 if key == "num_attention_heads" else 1}
    with pytest.raises(ShapeMismatch, match="elements along dimension 0 do not fit"):
        export(tmp_path, llama(VOCAB), **fewer)
    out = export(tmp_path / "hub", llama(VOCAB))
    write_config(out, {**MODEL.config, **fewer})
    live = {name: torch.zeros_like(tensor) for name, tensor in llama(VOCAB).items()}
    with pytest.raises(ShapeMismatch):
        load_checkpoint(out, model=live, strict=strict)
    assert not any(tensor.any() for tensor in live.values())
