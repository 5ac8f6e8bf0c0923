"""Tensor-parallel layers: the few that a Llama needs, with the parameter attributes that neuronx-distributed sets.

They stand in for ``neuronx_distributed.parallel_layers`` so that the example runs without it. What nxd_ckpt needs of
such layers are the attributes on their parameters: they say how the ranks' shards add up to one global tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among the ``size`` ranks that share each layer; ``groups`` are lists of global ranks."""

    rank: int
    size: int
    groups: list[list[int]]

    def embedding(self, rows: int, columns: int) -> nn.Module:
        return ParallelEmbedding(self, rows, columns)

    def column_parallel(self, inputs: int, outputs: int) -> nn.Module:
        return ColumnParallelLinear(self, inputs, outputs)

    def row_parallel(self, inputs: int, outputs: int) -> nn.Module:
        return RowParallelLinear(self, inputs, outputs)

    def output(self, inputs: int, outputs: int) -> nn.Module:
        return OutputLayer(self, inputs, outputs)


class ParallelLayer(nn.Module):
    """A layer of which each tensor-parallel rank holds an equal part of ``weight``, cut along ``partition_dim``."""

    partition_dim: int

    def __init__(self, tp: TensorParallel, rows: int, columns: int) -> None:
        super().__init__()
        self.tp = tp
        # Every rank draws the whole weight and keeps its part: the same model on any number of ranks.
        whole = torch.randn(rows, columns) * 0.02
        self.weight = nn.Parameter(whole.chunk(tp.size, self.partition_dim)[tp.rank].contiguous())
        self.set_partition_attributes()

    def set_partition_attributes(self) -> None:
        """Say on the parameter how it is cut."""
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim = self.partition_dim
        self.weight.partition_stride = 1
        self.weight.num_partitions = self.tp.size


class ColumnParallelLinear(ParallelLayer):
    """Each rank computes its part of the output features; the weight is (out features, in features)."""

    partition_dim = 0

    def __init__(self, tp: TensorParallel, inputs: int, outputs: int) -> None:
        super().__init__(tp, outputs, inputs)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(_Copy.apply(hidden, self.tp), self.weight)


class RowParallelLinear(ParallelLayer):
    """Each rank has its part of the input features; the ranks' results are summed."""

    partition_dim = 1

    def __init__(self, tp: TensorParallel, inputs: int, outputs: int) -> None:
        super().__init__(tp, outputs, inputs)

    def forward(self, hidden: Tensor) -> Tensor:
        return _Sum.apply(F.linear(hidden, self.weight), self.tp)


class ParallelEmbedding(ParallelLayer):
    """Each rank knows its part of the vocabulary; as output layer (tied weights) it is column-parallel."""

    partition_dim = 0

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.tp.rank * self.weight.shape[0]
        absent = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(absent, 0), self.weight)
        return _Sum.apply(found.masked_fill(absent.unsqueeze(-1), 0.0), self.tp)


class OutputLayer(ColumnParallelLinear):
    """A column-parallel layer whose whole output every rank gets: (..., vocabulary)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _Gather.apply(super().forward(hidden), self.tp)


def restore_partition_attributes(model: nn.Module) -> None:
    """Call it after ``model.to(device)``, which replaces parameters on XLA and so drops what was set on them."""
    for layer in model.modules():
        if isinstance(layer, ParallelLayer):
            layer.set_partition_attributes()


def _all_reduce(value: Tensor, tp: TensorParallel) -> Tensor:
    return xm.all_reduce(xm.REDUCE_SUM, value, groups=tp.groups, pin_layout=False)


class _Copy(torch.autograd.Function):
    """The same input for all ranks: the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(gradient, ctx.tp), None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' partial results: each has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tp: TensorParallel) -> Tensor:
        return _all_reduce(value, tp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """The ranks' parts of the last dimension, side by side: each rank's gradient is its own part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return xm.all_gather(value, dim=value.dim() - 1, groups=tp.groups, pin_layout=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.tp.size, -1)[ctx.tp.rank].contiguous(), None
