"""Live models as NxD trains them, cut for any sizes: Llama (Mistral is one too), Mixtral and GPT-NeoX.

Names are NxD's, sizes those of a :class:`~tests.hugging_face.reference.Job`. A pipeline stage holds its own layers
only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_ckpt import Topology
from tests.hugging_face.collectives import through_stages
from tests.hugging_face.layers import (
    ColumnParallelLinear,
    Experts,
    GQAQKVColumnParallelLinear,
    LayerNorm,
    OutputLayer,
    ParallelEmbedding,
    RMSNorm,
    Router,
    RowParallelLinear,
    attend,
)
from tests.hugging_face.reference import Job

LLAMA_NAMES = ("model", "embed_tokens", "norm", "lm_head")
NEOX_NAMES = ("gpt_neox", "embed_in", "final_layer_norm", "embed_out")


class CausalLM(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary), on the last stage."""

    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        neox = job.model.family == "gpt_neox"
        layer, norm = (NeoXLayer, LayerNorm) if neox else (LlamaLayer, RMSNorm)
        self.at, self.width = at, job.model.hidden
        self.body, embed, last, self.head = NEOX_NAMES if neox else LLAMA_NAMES
        self.embed, self.norm = f"{self.body}.{embed}", f"{self.body}.{last}"
        mine = [number for number in range(job.model.layers) if job.stage(f".layers.{number}.") == at.pp_rank]
        body = nn.ModuleDict({"layers": nn.ModuleDict({str(number): layer(job, at) for number in mine})})
        if at.pp_rank == 0:
            body[embed] = ParallelEmbedding(at, job.model.vocab, self.width)
        if at.pp_rank == at.pp - 1:
            body[last] = norm(at, self.width)
            self.add_module(self.head, OutputLayer(at, self.width, job.model.vocab))
        self.add_module(self.body, body)

    def tie(self) -> None:
        """The head is the embedding; again after a move, which unties them on XLA. For one stage."""
        self.get_submodule(self.head).weight = self.get_submodule(self.embed).weight

    def forward(self, tokens: Tensor) -> Tensor:
        start = torch.zeros(*tokens.shape, self.width, device=tokens.device, requires_grad=True)
        hidden = through_stages(self.at, start, lambda hidden: self._stage(tokens, hidden))
        if self.at.pp_rank < self.at.pp - 1:
            return hidden
        logits: Tensor = self.get_submodule(self.head)(self.get_submodule(self.norm)(hidden))
        return logits

    def _stage(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        if self.at.pp_rank == 0:
            hidden = self.get_submodule(self.embed)(tokens)
        for layer in self.get_submodule(f"{self.body}.layers").children():
            hidden = layer(hidden)
        return hidden


class LlamaLayer(nn.Module):
    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(at, job.model.hidden)
        self.self_attn = LlamaAttention(job, at)
        self.post_attention_layernorm = RMSNorm(at, job.model.hidden)
        self.mlp = (MixtureOfExperts if job.model.family == "mixtral" else LlamaMLP)(job, at)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class LlamaAttention(nn.Module):
    """q, k and v are three layers, one with three weights, or one (``job.qkv``)."""

    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        model = job.model
        self.kind, self.head_dim = job.qkv, model.head_dim
        query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
        if job.qkv == "linear":
            self.qkv_proj: nn.Module = GQAQKVColumnParallelLinear(at, job)
        elif job.qkv == "coalesced":
            self.qkv_proj = ColumnParallelLinear(at, model.hidden, 3 * query, stride=3)
        else:
            self.q_proj = ColumnParallelLinear(at, model.hidden, query)
            self.k_proj = ColumnParallelLinear(at, model.hidden, kv)
            self.v_proj = ColumnParallelLinear(at, model.hidden, kv)
        self.o_proj = RowParallelLinear(at, query, model.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kind == "linear":
            query, key, value = self.qkv_proj(hidden)
        elif self.kind == "coalesced":
            query, key, value = self.qkv_proj(hidden).chunk(3, -1)
        else:
            query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        out: Tensor = self.o_proj(attend(query, key, value, self.head_dim, self.head_dim))
        return out


class LlamaMLP(nn.Module):
    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(at, job.model.hidden, 2 * job.model.intermediate, stride=2)
        self.down_proj = RowParallelLinear(at, job.model.intermediate, job.model.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class MixtureOfExperts(nn.Module):
    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        self.router = Router(at, job.model.hidden, job.model.experts)
        self.expert_mlps = Experts(at, job.model.experts, job.model.hidden, job.model.intermediate)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        out: Tensor = self.expert_mlps(tokens, self.router(tokens))
        return out.view_as(hidden)


class NeoXLayer(nn.Module):
    """Attention and MLP side by side."""

    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        width = job.model.hidden
        self.input_layernorm, self.post_attention_layernorm = LayerNorm(at, width), LayerNorm(at, width)
        self.attention = NeoXAttention(job, at)
        self.mlp = NeoXMLP(job, at)

    def forward(self, hidden: Tensor) -> Tensor:
        attended = self.attention(self.input_layernorm(hidden))
        out: Tensor = hidden + attended + self.mlp(self.post_attention_layernorm(hidden))
        return out


class NeoXMLP(nn.Module):
    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(at, job.model.hidden, job.model.intermediate, bias=True)
        self.dense_4h_to_h = RowParallelLinear(at, job.model.intermediate, job.model.hidden, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden)))
        return out


class NeoXAttention(nn.Module):
    """q, k and v of each head lie together; a quarter of each head is rotated."""

    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        width = job.model.hidden
        self.head_dim = job.model.head_dim
        self.query_key_value = ColumnParallelLinear(at, width, 3 * width, bias=True)
        self.dense = RowParallelLinear(at, width, width, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(2, (-1, 3 * self.head_dim))
        query, key, value = (one.flatten(2) for one in heads.chunk(3, -1))
        out: Tensor = self.dense(attend(query, key, value, self.head_dim, self.head_dim // 4))
        return out
