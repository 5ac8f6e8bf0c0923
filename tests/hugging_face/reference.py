"""What each rank of an NxD job holds of a Hugging Face model: with torch, slowly and obviously.

Nothing here knows of mappings, pieces or boxes: tensors are split, reordered and concatenated one after the other, as a
person would convert a model by hand.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nxd_ckpt.core.heads import Hardware

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """The sizes of a Hugging Face model, ``family`` being "llama" (Mistral is one too), "qwen2", "qwen3", "mixtral" or
    "gpt_neox". ``bias`` is that of attention, ``mlp_bias`` that of a Llama's MLP."""

    family: str = "llama"
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 2
    intermediate: int = 12
    vocab: int = 24
    experts: int = 4
    bias: bool = False
    mlp_bias: bool = False

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        config = {
            "model_type": self.family,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
        }
        if self.family != "gpt_neox":
            config["num_key_value_heads"] = self.kv_heads
        if self.family == "mixtral":
            config["num_local_experts"] = self.experts
        if self.bias:
            config["attention_bias"] = True
        if self.mlp_bias:
            config["mlp_bias"] = True
        return config

    def state(self) -> State:
        """The tensors that its files hold; every element of all is another number."""
        shapes = self._neox_shapes() if self.family == "gpt_neox" else self._llama_shapes()
        state, start = {}, 1
        for name, shape in shapes.items():
            count = int(torch.Size(shape).numel())
            state[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
            start += count
        return state

    def _llama_shapes(self) -> dict[str, tuple[int, ...]]:
        query, kv, hidden, wide = self.hidden, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            rows = {"q_proj": query, "k_proj": kv, "v_proj": kv}
            shapes |= {f"{at}.self_attn.{name}.weight": (size, hidden) for name, size in rows.items()}
            if self.bias:
                shapes |= {f"{at}.self_attn.{name}.bias": (size,) for name, size in rows.items()}
            shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, query)
            if self.bias and self.family != "qwen2":
                shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
            if self.family == "qwen3":
                shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (self.head_dim,)
            if self.family == "mixtral":
                shapes[f"{at}.block_sparse_moe.gate.weight"] = (self.experts, hidden)
                for expert in range(self.experts):
                    here = f"{at}.block_sparse_moe.experts.{expert}"
                    shapes[f"{here}.w1.weight"] = shapes[f"{here}.w3.weight"] = (wide, hidden)
                    shapes[f"{here}.w2.weight"] = (hidden, wide)
            else:
                shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (wide, hidden)
                shapes[f"{at}.mlp.down_proj.weight"] = (hidden, wide)
                if self.mlp_bias:
                    shapes[f"{at}.mlp.gate_proj.bias"] = shapes[f"{at}.mlp.up_proj.bias"] = (wide,)
                    shapes[f"{at}.mlp.down_proj.bias"] = (hidden,)
            shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (self.vocab, hidden)}

    def _neox_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, wide = self.hidden, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {"gpt_neox.embed_in.weight": (self.vocab, hidden)}
        for layer in range(self.layers):
            at = f"gpt_neox.layers.{layer}"
            for name, rows, columns in (
                ("attention.query_key_value", 3 * hidden, hidden),
                ("attention.dense", hidden, hidden),
                ("mlp.dense_h_to_4h", wide, hidden),
                ("mlp.dense_4h_to_h", hidden, wide),
            ):
                shapes[f"{at}.{name}.weight"], shapes[f"{at}.{name}.bias"] = (rows, columns), (rows,)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{at}.{name}.weight"] = shapes[f"{at}.{name}.bias"] = (hidden,)
        ends = {f"gpt_neox.final_layer_norm.{kind}": (hidden,) for kind in ("weight", "bias")}
        return {**shapes, **ends, "embed_out.weight": (self.vocab, hidden)}


@dataclass(frozen=True)
class Job:
    """How NxD trains a :class:`Model`.

    ``qkv`` is "separate" (q_proj, k_proj, v_proj), "linear" (weight_q, weight_k, weight_v), "fused" (weight_qkv) or
    "coalesced" (one ColumnParallelLinear, with as many key-value heads as heads). ``copies`` is kv_size_multiplier;
    ``converted`` copies lie as NxD's converter writes them, for trn2 too.
    """

    model: Model
    tp: int = 1
    pp: int = 1
    ep: int = 1
    qkv: str = "separate"
    fused_mlp: bool = True
    copies: int = 1
    hardware: Hardware = "trn1"
    converted: bool = False
    padded_vocab: int | None = None
    padded_heads: int | None = None

    def rank(self, state: State, tp_rank: int = 0, ep_rank: int = 0) -> State:
        """What the rank holds of a model with the Hugging Face tensors ``state``, of all pipeline stages."""
        held = self._neox(state, tp_rank) if self.model.family == "gpt_neox" else self._llama(state, tp_rank, ep_rank)
        return {name: tensor.contiguous() for name, tensor in held.items()}

    def stage(self, name: str) -> int:
        """The pipeline stage of a tensor: layers spread evenly, embeddings at both ends."""
        if ".layers." in name:
            return int(name.split(".layers.")[1].split(".")[0]) * self.pp // self.model.layers
        return 0 if "embed_tokens" in name or "embed_in" in name else self.pp - 1

    def _cut(self, tensor: torch.Tensor, dim: int, tp_rank: int) -> torch.Tensor:
        return tensor.chunk(self.tp, dim)[tp_rank]

    def _vocabulary(self, tensor: torch.Tensor, tp_rank: int) -> torch.Tensor:
        missing = (self.padded_vocab or len(tensor)) - len(tensor)
        return self._cut(torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]), 0, tp_rank)

    def _query_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of q in NxD's order."""
        if self.hardware == "trn2" or self.copies == 1:
            return tensor
        kept = self.padded_heads or self.model.heads
        beside = kept // (self.model.kv_heads * self.copies)
        rows = beside * len(tensor) // self.model.heads
        groups = tensor.reshape(self.model.kv_heads, -1, rows, *tensor.shape[1:])
        padding = tensor.new_zeros(len(tensor) // self.model.heads * (kept - self.model.heads), *tensor.shape[1:])
        return torch.cat([groups.transpose(0, 1).reshape(tensor.shape), padding])

    def _kv_copies(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of k or v, as often as NxD keeps them."""
        if self.hardware == "trn1" or self.converted:
            return torch.cat([tensor] * self.copies)
        heads = tensor.reshape(self.model.kv_heads, -1, *tensor.shape[1:])
        return torch.cat([head for head in heads for _ in range(self.copies)])

    def _attention(self, state: State, at: str, kind: str, tp_rank: int) -> State:
        q = self._cut(self._query_order(state[f"{at}.q_proj.{kind}"]), 0, tp_rank)
        k, v = (self._cut(self._kv_copies(state[f"{at}.{name}.{kind}"]), 0, tp_rank) for name in ("k_proj", "v_proj"))
        if self.qkv == "separate":
            return {f"{at}.q_proj.{kind}": q, f"{at}.k_proj.{kind}": k, f"{at}.v_proj.{kind}": v}
        if self.qkv == "linear":
            return {f"{at}.qkv_proj.{kind}_{name}": part for name, part in zip("qkv", (q, k, v), strict=True)}
        return {f"{at}.qkv_proj.{kind}{'_qkv' if self.qkv == 'fused' else ''}": torch.cat([q, k, v])}

    def _llama(self, state: State, tp_rank: int, ep_rank: int) -> State:
        held = {"model.embed_tokens.weight": self._vocabulary(state["model.embed_tokens.weight"], tp_rank)}
        for layer in range(self.model.layers):
            at = f"model.layers.{layer}"
            for kind in ("weight", "bias") if self.model.bias else ("weight",):
                held |= self._attention(state, f"{at}.self_attn", kind, tp_rank)
            columns = self._query_order(state[f"{at}.self_attn.o_proj.weight"].T).T
            held[f"{at}.self_attn.o_proj.weight"] = self._cut(columns, 1, tp_rank)
            mlp = self._experts if self.model.family == "mixtral" else self._dense
            held |= mlp(state, at, tp_rank, ep_rank)
            held |= {name: tensor for name, tensor in state.items() if name.startswith(f"{at}.") and _is_whole(name)}
        head = self._vocabulary(state["lm_head.weight"], tp_rank)
        return {**held, "model.norm.weight": state["model.norm.weight"], "lm_head.weight": head}

    def _dense(self, state: State, at: str, tp_rank: int, ep_rank: int) -> State:
        held = {f"{at}.mlp.down_proj.weight": self._cut(state[f"{at}.mlp.down_proj.weight"], 1, tp_rank)}
        for kind in ("weight", "bias") if self.model.mlp_bias else ("weight",):
            gate, up = (self._cut(state[f"{at}.mlp.{name}.{kind}"], 0, tp_rank) for name in ("gate_proj", "up_proj"))
            if self.fused_mlp:
                held[f"{at}.mlp.gate_up_proj.{kind}"] = torch.cat([gate, up])
            else:
                held |= {f"{at}.mlp.gate_proj.{kind}": gate, f"{at}.mlp.up_proj.{kind}": up}
        return held

    def _experts(self, state: State, at: str, tp_rank: int, ep_rank: int) -> State:
        count = self.model.experts // self.ep
        mine = range(ep_rank * count, (ep_rank + 1) * count)

        def stack(name: str) -> torch.Tensor:  # a Linear's weight is (out, in), that of fused experts (E, in, out)
            return torch.stack([state[f"{at}.block_sparse_moe.experts.{expert}.{name}.weight"].T for expert in mine])

        gate, up = (self._cut(stack(name), 2, tp_rank) for name in ("w1", "w3"))
        ops = f"{at}.mlp.expert_mlps.mlp_op"
        held = {
            f"{at}.mlp.router.linear_router.weight": state[f"{at}.block_sparse_moe.gate.weight"],
            f"{ops}.down_proj.weight": self._cut(stack("w2"), 1, tp_rank),
        }
        if self.fused_mlp:
            return {**held, f"{ops}.gate_up_proj.weight": torch.cat([gate, up], dim=2)}
        return {**held, f"{ops}.gate_proj.weight": gate, f"{ops}.up_proj.weight": up}

    def _neox(self, state: State, tp_rank: int) -> State:
        held = {}
        for name, tensor in state.items():
            if "embed" in name:
                held[name] = self._vocabulary(tensor, tp_rank)
            elif "query_key_value" in name or "h_to_4h" in name:
                held[name] = self._cut(tensor, 0, tp_rank)
            elif name.endswith(("dense.weight", "dense_4h_to_h.weight")):
                held[name] = self._cut(tensor, 1, tp_rank)
            else:
                held[name] = tensor
        return held


def _is_whole(name: str) -> bool:
    """Whether every rank holds all of a tensor of a layer: norms, and biases that are added to a sum over ranks."""
    return name.endswith(("norm.weight", "o_proj.bias", "down_proj.bias"))
