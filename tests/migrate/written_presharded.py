"""Models as NxD inference loads them, generated from the facts of its sources."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.hugging_face.reference import Model, State


def held_by(model: Model, state: State, tp: int, rank: int) -> State:
    """What the rank's file holds, by hand: heads of k and v as often as ranks need them, one next to the other.

    Sources are in sources.md here.
    """
    copies = 1
    if model.kv_heads != model.heads and model.kv_heads % tp:
        copies = tp // model.kv_heads if tp % model.kv_heads == 0 else model.heads // model.kv_heads

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (model.kv_heads, -1)).repeat_interleave(copies, 0).flatten(0, 1)

    def cut(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(tp, dim)[rank].contiguous()

    number = torch.tensor([rank], dtype=torch.int32)
    found = {"embed_tokens.weight": cut(state["model.embed_tokens.weight"], 1)}
    for layer in range(model.layers):
        hf, own = f"model.layers.{layer}", f"layers.{layer}"
        for kind in ("weight", "bias") if model.bias else ("weight",):
            q, k, v = (state[f"{hf}.self_attn.{name}_proj.{kind}"] for name in "qkv")
            for name, tensor in {"q": q, "k": repeated(k), "v": repeated(v)}.items():
                found[f"{own}.self_attn.qkv_proj.{name}_proj.{kind}"] = cut(tensor, 0)
        found[f"{own}.self_attn.o_proj.o_proj.weight"] = cut(state[f"{hf}.self_attn.o_proj.weight"], 1)
        for name, dim in {"gate": 0, "up": 0, "down": 1}.items():
            found[f"{own}.mlp.{name}_proj.weight"] = cut(state[f"{hf}.mlp.{name}_proj.weight"], dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{own}.{name}.weight"] = state[f"{hf}.{name}.weight"]
        for name in "qk" if model.family == "qwen3" else "":
            found[f"{own}.self_attn.{name}_layernorm.weight"] = state[f"{hf}.self_attn.{name}_norm.weight"]
        found[f"{own}.self_attn.rank_util.rank"] = number
    head = cut(state["lm_head.weight"], 0)
    return {**found, "norm.weight": state["model.norm.weight"], "lm_head.weight": head, "rank_util.rank": number}


def write_presharded(folder: Path, model: Model, state: State, tp: int) -> Path:
    folder.mkdir(parents=True)
    for rank in range(tp):
        held = {name: tensor.clone() for name, tensor in held_by(model, state, tp, rank).items()}
        save_file(held, folder / f"tp{rank}_sharded_checkpoint.safetensors")
    return folder
