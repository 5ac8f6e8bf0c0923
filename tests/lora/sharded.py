"""Live Llamas as NxD trains them, cut for any sizes.

Names are NxD's, sizes those of a :class:`~tests.hugging_face.reference.Job`. A pipeline stage holds its own layers
only.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from nxd_ckpt import Topology
from tests.hugging_face.reference import Job
from tests.lora.layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    OutputLayer,
    ParallelEmbedding,
    RMSNorm,
    RowParallelLinear,
    attend,
)


class CausalLM(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary), where there is one stage."""

    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        mine = [number for number in range(job.model.layers) if job.stage(f".layers.{number}.") == at.pp_rank]
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({str(number): LlamaLayer(job, at) for number in mine})})
        if at.pp_rank == 0:
            self.model["embed_tokens"] = ParallelEmbedding(at, job.model.vocab, job.model.hidden)
        if at.pp_rank == at.pp - 1:
            self.model["norm"] = RMSNorm(at, job.model.hidden)
            self.lm_head = OutputLayer(at, job.model.hidden, job.model.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.get_submodule("model.embed_tokens")(tokens)
        for layer in self.get_submodule("model.layers").children():
            hidden = layer(hidden)
        logits: Tensor = self.lm_head(self.get_submodule("model.norm")(hidden))
        return logits


class LlamaLayer(nn.Module):
    def __init__(self, job: Job, at: Topology) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(at, job.model.hidden)
        self.self_attn = LlamaAttention(job, at)
        self.post_attention_layernorm = RMSNorm(at, job.model.hidden)
        self.mlp = LlamaMLP(job, at)

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
        out: Tensor = self.o_proj(attend(query, key, value, self.head_dim))
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
