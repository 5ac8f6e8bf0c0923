"""A small model that is cut like a real one: column and row parallel, tied, replicated, frozen, expert, staged.

It trains for real on any topology: tensor-parallel layers reduce over their group, ZeRO-1 over the data-parallel one.
Pipeline stages are trained each by itself: what matters here is which names a rank holds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nxd_ckpt import Topology

VOCAB, HIDDEN, FFN, EXPERTS = 12, 6, 8, 4


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)},
    "SGD": {"lr": 0.002, "momentum": 0.9},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.005, "momentum": 0.5},
    "Adafactor": {"lr": 0.02},
}
"""By their names in torch, with their options."""


@dataclass(frozen=True)
class Setup:
    """What is trained: a topology by its sizes, and the options that change what is saved."""

    sizes: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    master_weights: bool = True
    zero1: bool = True
    optimizer: str = "AdamW"
    unused: bool = False
    dropout: float = 0.0
    zero_grad_first: bool = False
    seed: int = 1
    constant: bool = False
    options: tuple[tuple[str, Any], ...] = field(default=())

    def topology(self, rank: int) -> Topology:
        sizes = dict(self.sizes)
        return Topology(sizes.get("dp", 1), sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("ep", 1), rank=rank)


def _groups(topology: Topology, key: Callable[[Topology], Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for rank in range(topology.world_size):
        groups.setdefault(key(topology.at(rank)), []).append(rank)
    return list(groups.values())


def tp_groups(topology: Topology) -> list[list[int]]:
    return _groups(topology, lambda t: (t.pp_rank, t.dp_rank))


def dp_groups(topology: Topology) -> list[list[int]]:
    return _groups(topology, lambda t: (t.pp_rank, t.tp_rank))


def expert_dp_groups(topology: Topology) -> list[list[int]]:
    return _groups(topology, lambda t: (t.pp_rank, t.tp_rank, t.ep_rank))


class Model(torch.nn.Module):
    """One pipeline stage on one rank."""

    seen: torch.Tensor
    offset: torch.Tensor | float = 0.0

    def __init__(self, setup: Setup, topology: Topology) -> None:
        super().__init__()
        torch.manual_seed(setup.seed)
        self.topology, self.setup = topology, setup
        tp, ep = topology.tp, topology.ep
        dtype = getattr(torch, setup.dtype)

        def parameter(*shape: int, cut: int | None = None, expert: bool = False) -> torch.nn.Parameter:
            whole = torch.randn(*shape) * 0.3
            if cut is not None:
                whole = whole.chunk(tp, cut)[topology.tp_rank]
            if expert:
                whole = whole.chunk(ep, 0)[topology.ep_rank]
            return torch.nn.Parameter(whole.to(dtype).contiguous())

        stage = f"stage{topology.pp_rank}"
        self.register_parameter(f"{stage}_scale", torch.nn.Parameter(torch.ones(HIDDEN, dtype=dtype)))
        self.embed = parameter(VOCAB, HIDDEN)
        self.up = parameter(FFN, HIDDEN, cut=0)
        self.up_bias = parameter(FFN, cut=0)
        self.down = parameter(HIDDEN, FFN, cut=1)
        self.odd = parameter(5, HIDDEN)
        self.frozen = torch.nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if setup.unused:
            self.unused = parameter(7, 3)
        if ep > 1:
            self.experts_up = parameter(EXPERTS, HIDDEN, FFN, cut=2, expert=True)
        self.head = self.embed
        self.stage = stage

    def attach(self) -> None:
        """NxD's parameter attributes; again after ``.to(device)``, which replaces parameters on XLA."""
        tp = self.topology.tp
        for name, dim in (("up", 0), ("up_bias", 0), ("down", 1), ("experts_up", 2)):
            parameter = getattr(self, name, None)
            if parameter is not None:
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride, parameter.num_partitions = dim, 1, tp
                parameter.expert_model_parallel = name.startswith("experts")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        groups = tp_groups(self.topology)
        hidden = self.embed[tokens] * getattr(self, f"{self.stage}_scale") + self.offset
        inner = torch.nn.functional.linear(_Copy.apply(hidden, groups), self.up, self.up_bias).tanh()
        inner = torch.nn.functional.dropout(inner, self.setup.dropout, self.training)
        out = _Reduce.apply(torch.nn.functional.linear(inner, self.down), groups)
        if hasattr(self, "experts_up"):
            mixed = torch.einsum("bh,ehf->bf", _Copy.apply(hidden, groups), self.experts_up)
            out = out + _Reduce.apply(mixed.sum(-1, keepdim=True), groups)
        out = out + (hidden @ self.odd.t()).sum(-1, keepdim=True)
        self.seen += 1
        return out @ self.head.t()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, groups: list[list[int]]) -> torch.Tensor:
        ctx.groups = groups
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.groups), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, groups: list[list[int]]) -> torch.Tensor:
        return _all_reduce(value, groups)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _all_reduce(value: torch.Tensor, groups: list[list[int]]) -> torch.Tensor:
    import torch_xla.core.xla_model as xm

    return value if len(groups[0]) == 1 else xm.all_reduce(xm.REDUCE_SUM, value, groups=groups)


class Trainer:
    """A model with its optimizer and scheduler, trained on data that depends on step and data-parallel rank only."""

    def __init__(self, rank: int, setup: Setup) -> None:
        import torch_xla

        self.setup, self.topology = setup, setup.topology(rank)
        self.device = torch_xla.device()
        self.model = Model(setup, self.topology)
        self.model.to(self.device)
        self.model.head = self.model.embed  # .to(xla) unties
        self.model.attach()
        if setup.constant:  # made on the device, and not saved
            self.model.offset = torch.arange(HIDDEN, device=self.device).sin() * 0.37
        self.optimizer = self._optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.step_number = 0

    def train(self, steps: int) -> list[str]:
        """The losses, as hex: equal means equal to the last bit."""
        import torch_xla

        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(1000 * self.step_number + self.topology.dp_rank)
            tokens = torch.randint(0, VOCAB, (4,), generator=generator).to(self.device)
            if self.setup.zero_grad_first:
                self.optimizer.zero_grad(set_to_none=True)
            loss = self.model(tokens).float().logsumexp(-1).mean()
            loss.backward()
            if not self.setup.zero1:
                self._reduce_gradients()
            self.optimizer.step()
            if not self.setup.zero_grad_first:
                self.optimizer.zero_grad(set_to_none=True)
            self.scheduler.step()
            torch_xla.sync()
            losses.append(float(loss.detach().cpu()).hex())
            self.step_number += 1
        return losses

    def _reduce_gradients(self) -> None:
        """What ZeRO-1 does by itself: the mean over the replicas of each parameter."""
        for parameter in self.model.parameters():
            expert = getattr(parameter, "expert_model_parallel", False)
            groups = expert_dp_groups(self.topology) if expert else dp_groups(self.topology)
            if parameter.grad is not None and len(groups[0]) > 1:
                parameter.grad = _all_reduce(parameter.grad, groups) / len(groups[0])

    def state(self) -> dict[str, Any]:
        """Everything that must survive, on the CPU."""
        if hasattr(self.optimizer, "hand_down"):  # what the scheduler did since the last step
            self.optimizer.hand_down()
        return {
            "model": _cpu(self.model.state_dict()),
            "optimizer": _cpu(self.optimizer.state_dict()),
            "shards": _cpu(self._shards()),
            "scheduler": self.scheduler.state_dict(),
        }

    def _shards(self) -> list[torch.Tensor]:
        inner = [getattr(self.optimizer, name, None) for name in ("non_ep_zero_optimizer", "ep_zero_optimizer")]
        owners = [each for each in inner if each is not None] or [self.optimizer]
        bases = [owner.base_optimizer for owner in owners if hasattr(owner, "base_optimizer")]
        return [shard.data for base in bases for group in base.param_groups for shard in group["params"]]

    def _optimizer(self) -> Any:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        kind, settings = getattr(torch.optim, self.setup.optimizer), dict(OPTIMIZERS[self.setup.optimizer])
        if not self.setup.zero1:
            return kind(parameters, **settings)
        settings["save_master_weights"] = self.setup.master_weights
        settings["pin_layout"] = False
        return zero1(parameters, self.topology, settings, kind)


def zero1(
    parameters: Any,
    topology: Topology,
    settings: dict[str, Any],
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Any:
    """The ZeRO-1 optimizer that NxD would make: torch-xla's own, under expert parallelism a double of NxD's."""
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    from tests.training.nxd_optimizers import ExpertZero1

    norms = tp_groups(topology) if topology.tp > 1 else None
    settings = {"sharding_groups": dp_groups(topology), "grad_norm_groups": norms, **settings}
    if topology.ep > 1:
        return ExpertZero1(parameters, kind, expert_dp_groups(topology), **settings)
    return ZeroRedundancyOptimizer(parameters, kind, **settings)


def _cpu(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: _cpu(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_cpu(value) for value in tree) if not isinstance(tree, torch.Size) else tree
    return tree
