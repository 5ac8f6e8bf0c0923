"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings; tensor parallel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from parallel_layers import (
    ColumnParallelLinear,
    OutputLayer,
    ParallelEmbedding,
    RowParallelLinear,
    TensorParallel,
    restore_partition_attributes,
)
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes; ``heads`` and ``kv_heads`` are divided among the tensor-parallel ranks."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    inner: int = 352
    dropout: float = 0.0

    @property
    def head_size(self) -> int:
        return self.width // self.heads


class Llama(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, config: Config, tp: TensorParallel) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(tp, config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config, tp) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = OutputLayer(tp, config.width, config.vocabulary)
        self.head_size = config.head_size
        self.finish_placement()

    def finish_placement(self) -> None:
        """Tie the embeddings and mark the shards. Again after ``.to(device)``, which undoes both on XLA."""
        self.head.weight = self.embed.weight
        restore_partition_attributes(self)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        rotation = rotary_angles(tokens.shape[1], self.head_size, hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return self.head(self.norm(hidden))


class Layer(nn.Module):
    def __init__(self, config: Config, tp: TensorParallel) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config, tp)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = MLP(config, tp)
        # On what every tensor-parallel rank computes alike: their random states must be equal.
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), rotation))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class Attention(nn.Module):
    """Causal attention; ``heads // kv_heads`` query heads share a key and value head."""

    def __init__(self, config: Config, tp: TensorParallel) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.sharing = config.heads // config.kv_heads
        self.q = ColumnParallelLinear(tp, config.width, config.heads * config.head_size)
        self.k = ColumnParallelLinear(tp, config.width, config.kv_heads * config.head_size)
        self.v = ColumnParallelLinear(tp, config.width, config.kv_heads * config.head_size)
        self.out = RowParallelLinear(tp, config.heads * config.head_size, config.width)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query = rotate(self._heads(self.q(hidden)), rotation)
        key = self._shared(rotate(self._heads(self.k(hidden)), rotation))
        value = self._shared(self._heads(self.v(hidden)))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, hidden: Tensor) -> Tensor:
        """(batch, length, heads * size) to (batch, heads, length, size)."""
        return hidden.unflatten(2, (-1, self.head_size)).transpose(1, 2)

    def _shared(self, heads: Tensor) -> Tensor:
        """Each key or value head once for every query head that shares it."""
        return heads.unsqueeze(2).expand(-1, -1, self.sharing, -1, -1).flatten(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config, tp: TensorParallel) -> None:
        super().__init__()
        self.gate = ColumnParallelLinear(tp, config.width, config.inner)
        self.up = ColumnParallelLinear(tp, config.width, config.inner)
        self.down = RowParallelLinear(tp, config.inner, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class RMSNorm(nn.Module):
    """In fp32, whatever the weights' dtype; every rank holds the whole weight, so it carries no attributes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        exact = hidden.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
        return exact.to(hidden.dtype) * self.weight


def rotary_angles(length: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's rotations: two of (length, head_size // 2), fp32."""
    frequencies = 10000.0 ** (-torch.arange(0, head_size, 2, device=device).float() / head_size)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of (batch, heads, length, size)."""
    cosine, sine = rotation
    first, second = heads.float().chunk(2, -1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
    return rotated.to(heads.dtype)
