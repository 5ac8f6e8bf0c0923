"""Collectives of torch-xla with their gradients, beside those of tests/training: for experts, stages and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nxd_ckpt import Topology
from tests.training.model import _groups

Groups = list[list[int]]


def through_stages(at: Topology, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """What the last pipeline stage computes of what the stages before it did; zeros on the others.

    On them ``.sum().backward()`` receives the gradient from the next stage: to be called on all stages alike.
    """
    for stage in range(at.pp):
        if stage == at.pp_rank:
            hidden = compute(hidden)
        if stage + 1 < at.pp:
            stages = _groups(at, lambda one: (one.dp_rank, one.tp_rank))
            hidden = Send.apply(hidden, [[ranks[stage], ranks[stage + 1]] for ranks in stages])
    return hidden


class Gather(torch.autograd.Function):
    """The ranks' parts of the last dimension, side by side: each rank's gradient is its own part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: Groups, rank: int) -> Tensor:
        import torch_xla.core.xla_model as xm

        ctx.parts, ctx.rank = len(groups[0]), rank
        return xm.all_gather(value, dim=value.dim() - 1, groups=groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(ctx.parts, -1)[ctx.rank].contiguous(), None, None


def _all_gather(value: Tensor, groups: Groups) -> Tensor:
    import torch_xla.core.xla_model as xm

    return value.clone() if len(groups[0]) == 1 else xm.all_gather(value, dim=0, groups=groups)


def _reduce_scatter(value: Tensor, groups: Groups) -> Tensor:
    import torch_xla.core.xla_model as xm

    count = len(groups[0])
    return value.clone() if count == 1 else xm.reduce_scatter(xm.REDUCE_SUM, value, 1.0, 0, count, groups=groups)


class AllGather(torch.autograd.Function):
    """The rows of all ranks of a group, each of which goes on with them in its own way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return _all_gather(value, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(gradient, ctx.groups), None


class ReduceScatter(torch.autograd.Function):
    """This rank's rows of the sum over the group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return _reduce_scatter(value, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradient, ctx.groups), None


class Send(torch.autograd.Function):
    """To the target of each pair (source, target); the gradient goes back. Zeros elsewhere, both ways."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, pairs: Groups) -> Tensor:
        import torch_xla.core.xla_model as xm

        ctx.pairs = pairs
        return xm.collective_permute(value, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        import torch_xla.core.xla_model as xm

        return xm.collective_permute(gradient, [[target, source] for source, target in ctx.pairs]), None
