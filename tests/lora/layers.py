"""Layers as NxD has them: cut over tensor-parallel ranks, with its names and attributes.

Every layer starts as zeros: what it computes comes from a checkpoint.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_ckpt import Partition, Topology
from tests.hugging_face.reference import Job
from tests.reshard.ranks import mark
from tests.training.model import _Copy, _groups, _Reduce, tp_groups


def parameter(at: Topology, *shape: int, dim: int | None = None, stride: int = 1) -> nn.Parameter:
    """This rank's part of a parameter of the whole ``shape``, marked as NxD's layers mark it."""
    local = list(shape)
    if dim is not None:
        local[dim] //= at.tp
    held = nn.Parameter(torch.zeros(local))
    mark(held, Partition() if dim is None else Partition(dim, stride, at.tp))
    return held


class Gather(torch.autograd.Function):
    """The ranks' parts of the last dimension, side by side: each rank's gradient is its own part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: list[list[int]], rank: int) -> Tensor:
        import torch_xla.core.xla_model as xm

        ctx.parts, ctx.rank = len(groups[0]), rank
        return xm.all_gather(value, dim=value.dim() - 1, groups=groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(ctx.parts, -1)[ctx.rank].contiguous(), None, None


class ColumnParallelLinear(nn.Module):
    """Each rank computes its part of the outputs. With a stride, of each of as many tensors that lie side by side."""

    def __init__(self, at: Topology, inputs: int, outputs: int, *, bias: bool = False, stride: int = 1) -> None:
        super().__init__()
        self.groups = tp_groups(at)
        self.weight = parameter(at, outputs, inputs, dim=0, stride=stride)
        self.bias = parameter(at, outputs, dim=0, stride=stride) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(_Copy.apply(hidden, self.groups), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Each rank has its part of the inputs; the results are summed, and then the bias, which all have, is added."""

    def __init__(self, at: Topology, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.groups = tp_groups(at)
        self.weight = parameter(at, outputs, inputs, dim=1)
        self.bias = parameter(at, outputs) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = _Reduce.apply(F.linear(hidden, self.weight), self.groups)
        return out if self.bias is None else out + self.bias


class ParallelEmbedding(nn.Module):
    """Each rank knows its part of the vocabulary."""

    def __init__(self, at: Topology, vocabulary: int, width: int) -> None:
        super().__init__()
        self.rank, self.groups = at.tp_rank, tp_groups(at)
        self.weight = parameter(at, vocabulary, width, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.rank * len(self.weight)
        absent = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(absent, 0), self.weight).masked_fill(absent.unsqueeze(-1), 0.0)
        out: Tensor = _Reduce.apply(found, self.groups)
        return out


class OutputLayer(ColumnParallelLinear):
    """A column-parallel layer without bias whose whole output every rank gets."""

    def __init__(self, at: Topology, inputs: int, outputs: int) -> None:
        super().__init__(at, inputs, outputs)
        self.rank = at.tp_rank

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = Gather.apply(super().forward(hidden), self.groups, self.rank)
        return out


class GQAQKVColumnParallelLinear(nn.Module):
    """Queries, keys and values of this rank's places for heads; a key-value head is kept ``job.copies`` times.

    Ranks that keep the same heads sum their gradients of them, and so copies stay equal.
    """

    def __init__(self, at: Topology, job: Job) -> None:
        super().__init__()
        model, self.groups = job.model, tp_groups(at)
        places = model.kv_heads * job.copies
        self.weight_q = parameter(at, model.heads * model.head_dim, model.hidden, dim=0)
        self.weight_k = parameter(at, places * model.head_dim, model.hidden, dim=0)
        self.weight_v = parameter(at, places * model.head_dim, model.hidden, dim=0)

        def kept(tp_rank: int) -> list[int]:
            mine = range(tp_rank * places // at.tp, (tp_rank + 1) * places // at.tp)
            return [place % model.kv_heads if job.hardware == "trn1" else place // job.copies for place in mine]

        self.keepers = _groups(at, lambda one: (one.pp_rank, one.dp_rank, *kept(one.tp_rank)))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = _Copy.apply(hidden, self.groups)
        key, value = (_Copy.apply(weight, self.keepers) for weight in (self.weight_k, self.weight_v))
        return F.linear(hidden, self.weight_q), F.linear(hidden, key), F.linear(hidden, value)


class RMSNorm(nn.Module):
    """Of which every rank holds all."""

    def __init__(self, at: Topology, width: int) -> None:
        super().__init__()
        self.weight = parameter(at, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def attend(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
    """Causal attention of (batch, length, heads * head_dim), with rotary positions.

    Neighbouring query heads share a key-value head, where there are more of them.
    """
    query, key, value = (one.unflatten(2, (-1, head_dim)).transpose(1, 2) for one in (query, key, value))
    sharing = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(sharing, 1) for one in (_rotate(key), value))
    mixed = F.scaled_dot_product_attention(_rotate(query), key, value, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def _rotate(heads: Tensor) -> Tensor:
    rotated = heads.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, rotated, 2).float() / rotated)
    angles = torch.outer(torch.arange(heads.shape[2]).float(), frequencies)
    cosine, sine = angles.cos().to(heads.device), angles.sin().to(heads.device)
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
