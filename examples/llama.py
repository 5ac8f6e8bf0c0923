"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings.

How its matrices are cut over tensor-parallel ranks is up to the layers that it is built of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layers(Protocol):
    """Makes the layers that tensor parallelism cuts; their weights are named ``weight``, and there are no biases."""

    def embedding(self, rows: int, columns: int) -> nn.Module: ...

    def column_parallel(self, inputs: int, outputs: int) -> nn.Module: ...

    def row_parallel(self, inputs: int, outputs: int) -> nn.Module: ...

    def output(self, inputs: int, outputs: int) -> nn.Module: ...


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

    def __init__(self, config: Config, make: Layers) -> None:
        super().__init__()
        self.embed = make.embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config, make) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = make.output(config.width, config.vocabulary)
        self.head_size = config.head_size
        self.tie_embeddings()

    def tie_embeddings(self) -> None:
        """Again after whatever replaces parameters: ``.to(device)`` on XLA, and ``parallelize_module``."""
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        rotation = rotary_angles(tokens.shape[1], self.head_size, hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return self.head(self.norm(hidden))


class Layer(nn.Module):
    def __init__(self, config: Config, make: Layers) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config, make)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = MLP(config, make)
        # On what every tensor-parallel rank computes alike: their random states must be equal.
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), rotation))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class Attention(nn.Module):
    """Causal attention; ``heads // kv_heads`` query heads share a key and value head."""

    def __init__(self, config: Config, make: Layers) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.sharing = config.heads // config.kv_heads
        self.q = make.column_parallel(config.width, config.heads * config.head_size)
        self.k = make.column_parallel(config.width, config.kv_heads * config.head_size)
        self.v = make.column_parallel(config.width, config.kv_heads * config.head_size)
        self.out = make.row_parallel(config.heads * config.head_size, config.width)

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

    def __init__(self, config: Config, make: Layers) -> None:
        super().__init__()
        self.gate = make.column_parallel(config.width, config.inner)
        self.up = make.column_parallel(config.width, config.inner)
        self.down = make.row_parallel(config.inner, config.width)

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
