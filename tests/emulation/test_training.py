"""Training across emulated ranks, with torch-xla's own optimizer, equals the same training in one process."""

from typing import Any

import pytest
import torch

from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.xla

# Two jobs of two ranks; seven rows do not divide by two, so shards are padded.
SHARDING_GROUPS = [[0, 2], [1, 3]]
TENSOR_PARALLEL_GROUPS = [[0, 1], [2, 3]]
STEPS = 3
ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: torch.nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    loss = model(batch(rank, step).to(device)).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def train_zero(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    import torch_xla
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    model = build_model().to(torch_xla.device())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, sharding_groups=SHARDING_GROUPS, **ADAMW, **options
    )
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), gradients(model, rank, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        torch_xla.sync()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def train_in_one_process(rank: int, max_norm: float | None) -> list[torch.Tensor]:
    """What ``rank``'s group should arrive at: AdamW on the mean of the group's gradients, no collective."""
    import torch_xla

    group = next(group for group in SHARDING_GROUPS if rank in group)
    model = build_model().to(torch_xla.device())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        first, second = (gradients(model, peer, step) for peer in group)
        for parameter, a, b in zip(model.parameters(), first, second, strict=True):
            parameter.grad = (a + b) * 0.5
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        torch_xla.sync()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [{"pin_layout": True}, {"pin_layout": False, "bucket_cap_mb_all_gather": 1, "bucket_cap_mb_reduce_scatter": 1}],
    ids=["one by one", "bucketized"],
)
def test_zero_equals_one_process(xla_ranks: RankPool, options: dict[str, Any]) -> None:
    """ZeroRedundancyOptimizer over two groups of two, with padding, equals plain AdamW bit for bit."""
    expected = xla_ranks.run(train_in_one_process, None)
    actual = xla_ranks.run(train_zero, {"grad_clipping": False, **options})
    for rank in range(4):
        for wanted, found in zip(expected[rank], actual[rank], strict=True):
            assert torch.equal(wanted, found), f"rank {rank}: {(wanted - found).abs().max()}"
    assert not torch.equal(actual[0][0], actual[1][0]), "the two groups saw different batches"


def test_zero_clips_by_the_norm_over_all_shards(xla_ranks: RankPool) -> None:
    """With clipping, the gradient norm is that of the whole group (summed in another order: 1e-6)."""
    expected = xla_ranks.run(train_in_one_process, 0.05)
    actual = xla_ranks.run(train_zero, {"grad_clipping": True, "max_norm": 0.05})
    for rank in range(4):
        for wanted, found in zip(expected[rank], actual[rank], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def tensor_parallel_gradients(rank: int) -> list[torch.Tensor]:
    """Gradients of a column-parallel and a row-parallel layer, in Megatron's way."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    class CopyToRegion(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return xm.all_reduce(xm.REDUCE_SUM, gradient, groups=TENSOR_PARALLEL_GROUPS)

    class ReduceFromRegion(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            xm.all_reduce(xm.REDUCE_SUM, [tensor], groups=TENSOR_PARALLEL_GROUPS)
            return tensor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    inputs, column, row = tensor_parallel_problem()
    half = slice(3 * (rank % 2), 3 * (rank % 2) + 3)
    device = torch_xla.device()
    leaves = [t.to(device).requires_grad_() for t in (inputs, column[half], row[:, half])]
    hidden = torch.tanh(CopyToRegion.apply(leaves[0]) @ leaves[1].T)
    ReduceFromRegion.apply(hidden @ leaves[2].T).square().sum().backward()
    return [torch.empty(0) if leaf.grad is None else leaf.grad.cpu() for leaf in leaves]


def tensor_parallel_problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(5, 4), torch.randn(6, 4), torch.randn(3, 6)


def test_gradients_flow_through_tensor_parallel_layers(xla_ranks: RankPool) -> None:
    """Collectives in forward and in backward give each rank its slice of the whole model's gradients."""
    inputs, column, row = (tensor.requires_grad_() for tensor in tensor_parallel_problem())
    (torch.tanh(inputs @ column.T) @ row.T).square().sum().backward()
    for rank, found in enumerate(xla_ranks.run(tensor_parallel_gradients)):
        half = slice(3 * (rank % 2), 3 * (rank % 2) + 3)
        assert inputs.grad is not None
        assert column.grad is not None
        assert row.grad is not None
        expected = [inputs.grad, column.grad[half], row.grad[:, half]]
        for wanted, gradient in zip(expected, found, strict=True):
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
