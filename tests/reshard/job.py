"""A job that trains the same model on the same data, however it is cut: losses of any two sizes can be compared.

Every collective is real: activations are handed from stage to stage, experts see the tokens of their whole group, the
embedding is tied to the head across the first and the last stage.
"""

from typing import Any

import torch

from nxd_ckpt import Partition
from tests.reshard.ranks import Pipeline, Stage, entries_of, mark
from tests.reshard.whole import Layout, Weight
from tests.training.model import (
    Setup,
    _all_reduce,
    _Copy,
    _groups,
    _Reduce,
    dp_groups,
    expert_dp_groups,
    tp_groups,
    zero1,
)

VOCAB, HIDDEN, FFN, EXPERTS, BATCH = 12, 6, 12, 4, 12

Groups = list[list[int]]


def weights_of(dtype: torch.dtype) -> list[Weight]:
    found = [Weight("embed", (VOCAB, HIDDEN), dtype), Weight("seen", (), torch.int64, "buffer")]
    for block in ("first", "second"):
        found += [
            Weight(f"{block}_up", (FFN, HIDDEN), dtype),
            Weight(f"{block}_up_bias", (FFN,), dtype),
            Weight(f"{block}_down", (HIDDEN, FFN), dtype),
            Weight(f"{block}_odd", (5, HIDDEN), dtype),
            Weight(f"{block}_unused", (3,), dtype),
            Weight(f"{block}_frozen", (2,), dtype, "frozen"),
        ]
    return [*found, Weight("second_experts", (EXPERTS, HIDDEN, FFN), dtype)]


def layout_of(setup: Setup, rank: int = 0) -> Layout:
    """How the job cuts the model: the first block on the first stage, the second on the last, the embedding on both."""
    at = setup.topology(rank)
    known = {
        "up": Partition(0, num_partitions=at.tp),
        "up_bias": Partition(0, num_partitions=at.tp),
        "down": Partition(1, num_partitions=at.tp),
        "experts": Partition(2, num_partitions=at.tp, expert=at.ep > 1),
    }
    names = [weight.name for weight in weights_of(torch.float32)]
    cuts = {name: known.get(name.partition("_")[2], Partition()) for name in names}
    ends = {"embed": {0, at.pp - 1}, "seen": {0}, "first": {0}, "second": {at.pp - 1}}
    stages = {name: frozenset(ends[name.partition("_")[0]]) for name in names}
    return Layout(at, cuts, (), stages, setup.zero1, setup.master_weights)


class Trainer:
    """One rank: model, optimizer and scheduler. ``shift`` makes it start from other values."""

    def __init__(self, rank: int, setup: Setup, shift: float = 0.0) -> None:
        import torch_xla

        layout = layout_of(setup, rank)
        self.setup, self.topology, self.device = setup, layout.topology, torch_xla.device()
        weights = layout.of_stage(weights_of(getattr(torch, setup.dtype)), self.topology)
        self.stage = Stage(weights, layout, self.topology)
        for tensor in self.stage.parameters():
            tensor.data.add_(shift)
        self.stage.to(self.device)
        self._named: dict[str, Any] = self.stage.state_dict(keep_vars=True)
        for name, tensor in self._named.items():
            mark(tensor, layout.cuts[name])  # .to(xla) drops attributes
        self.model: Any = Pipeline(self.stage) if self.topology.pp > 1 else self.stage
        self.optimizer = self._optimizer()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.step_number = 0

    def train(self, steps: int) -> list[float]:
        """The mean losses over the whole batch, the same on all ranks."""
        import torch_xla

        losses = []
        for _ in range(steps):
            loss = self._loss(self._tokens())
            loss.backward()
            self._finish_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.scheduler.step()
            torch_xla.sync()
            mean = _all_reduce(loss.detach(), dp_groups(self.topology)) / self.topology.dp
            losses.append(float(_all_reduce(mean, self._pp_groups).cpu()))
            self.step_number += 1
        return losses

    def held(self) -> dict[str, Any]:
        """What this rank holds, on the CPU, as ``whole.expected`` has it but for the options."""
        optimizer = {}
        for name, _, key, state, _ in entries_of(self.optimizer, self._trained):
            shard = {"shard": key} if self.setup.zero1 else {}
            optimizer[name] = {kind: _cpu(value) for kind, value in {**state.get(key, {}), **shard}.items()}
        model = {name: _cpu(value) for name, value in self.stage.state_dict().items()}
        return {"model": dict(sorted(model.items())), "optimizer": dict(sorted(optimizer.items()))}

    @property
    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: tensor for name, tensor in self._named.items() if tensor.requires_grad}

    @property
    def _pp_groups(self) -> Groups:
        return _groups(self.topology, lambda at: (at.dp_rank, at.tp_rank))

    @property
    def _ep_groups(self) -> Groups:
        return _groups(self.topology, lambda at: (at.pp_rank, at.tp_rank, at.expert_dp_rank))

    def _tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.step_number)
        tokens = torch.randint(0, VOCAB, (BATCH,), generator=generator)
        return tokens.chunk(self.topology.dp)[self.topology.dp_rank].to(self.device)

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """That of this rank's tokens on the last stage; 0 on the others, which get their gradients all the same."""
        stage, pp, embed = self.topology.pp_rank, self.topology.pp, self._named["embed"]
        hidden = torch.zeros(len(tokens), HIDDEN, device=self.device, dtype=embed.dtype, requires_grad=True)
        if stage == 0:
            self._named["seen"].add_(1)
            hidden = self._block("first", embed[tokens])
        if pp > 1:
            handed = _Sum.apply(hidden, self._pp_groups)
            hidden = handed if stage == pp - 1 else handed * 0
        if stage < pp - 1:
            return hidden.float().sum()
        logits = self._experts(self._block("second", hidden)) @ embed.t()
        return logits.float().logsumexp(-1).mean()

    def _block(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        groups, linear = tp_groups(self.topology), torch.nn.functional.linear
        up, up_bias, down, odd = (self._named[f"{name}_{kind}"] for kind in ("up", "up_bias", "down", "odd"))
        inner = linear(_Copy.apply(hidden, groups), up, up_bias).tanh()
        out: torch.Tensor = _Reduce.apply(linear(inner, down), groups)
        return out + linear(hidden, odd).tanh().sum(-1, keepdim=True)

    def _experts(self, hidden: torch.Tensor) -> torch.Tensor:
        """Every expert mixes in, for the tokens of all ranks that share the experts."""
        mine, groups = self.topology.ep_rank, tp_groups(self.topology)
        slots = [hidden if slot == mine else torch.zeros_like(hidden) for slot in range(self.topology.ep)]
        tokens = _Copy.apply(_Sum.apply(torch.stack(slots), self._ep_groups), groups)
        inner = torch.einsum("sbh,ehf->sbef", tokens, self._named["second_experts"]).tanh().sum((-1, -2))
        mixed = _Sum.apply(_Reduce.apply(inner, groups), self._ep_groups)
        out: torch.Tensor = hidden + mixed[mine].unsqueeze(-1)
        return out

    def _finish_gradients(self) -> None:
        """What pipeline and expert parallelism add up, and without ZeRO-1 what data parallelism does."""
        at = self.topology
        for name, parameter in self._trained.items():
            if parameter.grad is None:
                continue
            expert = name == "second_experts" and at.ep > 1
            if expert:
                parameter.grad = parameter.grad / at.ep  # it sums over its group's batches, others take the mean
            if name == "embed" and at.pp > 1:
                parameter.grad = _all_reduce(parameter.grad, self._pp_groups)
            if not self.setup.zero1:
                groups = expert_dp_groups(at) if expert else dp_groups(at)
                parameter.grad = _all_reduce(parameter.grad, groups) / len(groups[0])

    def _optimizer(self) -> Any:
        settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)}
        trained = list(self._trained.values())
        if not self.setup.zero1:
            return torch.optim.AdamW(trained, **settings)
        # Norms that are clipped depend on how often a replicated gradient is counted, and so on the sizes.
        settings |= {"grad_clipping": False, "save_master_weights": self.setup.master_weights, "pin_layout": False}
        return zero1(trained, self.topology, settings)


class _Sum(torch.autograd.Function):
    """The sum over ranks that each go on with it in their own way: so the gradient is a sum as well."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, groups: Groups) -> torch.Tensor:
        ctx.groups = groups
        return _all_reduce(value, groups) if len(groups[0]) > 1 else value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.groups), None


def _cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
