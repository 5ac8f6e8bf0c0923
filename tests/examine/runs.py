"""Small runs that really train, and their tags: of one process, or cut over the ranks of a job with ZeRO-1."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Checkpointer, Partition, Topology, capture_random_state
from tests.interop.saving import save_as_every_rank

BATCH = 8
CUTS = {"0.weight": Partition(0, num_partitions=2), "0.bias": Partition(0, num_partitions=2)}
SIZES = Topology(dp=2, tp=2)

Rank = dict[str, Any]
Optimizers = dict[str, Callable[[Iterator[torch.nn.Parameter]], torch.optim.Optimizer]]

OPTIMIZERS: Optimizers = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "momentum": lambda params: torch.optim.SGD(params, 0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, 3e-3, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-2, weight_decay=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, 1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, 1e-2),
    "radam": lambda params: torch.optim.RAdam(params, 1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, 1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 1e-3, momentum=0.9, centered=True),
    "adadelta": lambda params: torch.optim.Adadelta(params),
    "rprop": lambda params: torch.optim.Rprop(params, 1e-3),
    "asgd": lambda params: torch.optim.ASGD(params, 1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, 1e-2),
    "fast": lambda params: torch.optim.AdamW(params, 1e-2, betas=(0.9, 0.95)),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "warmup": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, 1000, cycle_momentum=False),
}


class Run:
    """A run that trains a model of an embedding, a frozen layer, a layer that nothing uses, and batch norm."""

    def __init__(self, optimizer: str = "adamw", scheduler: str = "warmup", seed: int = 0) -> None:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 12)]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(12, 12))
        self.model[4].requires_grad_(False)
        self.optimizer = OPTIMIZERS[optimizer](one for one in self.model.parameters() if one.requires_grad)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.step = 0
        self.data = torch.Generator().manual_seed(seed)

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            inputs = torch.randn(BATCH, 12, generator=self.data)
            loss = (self.model(torch.nn.functional.dropout(inputs, 0.1)) - inputs.roll(1, 1)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
        return self

    def content(self) -> dict[str, Any]:
        return {"step": self.step, "consumed_samples": self.step * BATCH, "seed": 7}

    def save(self, directory: Path, tag: str) -> None:
        with Checkpointer(directory, durable=False) as saver:
            saver.save(
                tag,
                self.model,
                self.optimizer,
                self.scheduler,
                user_content=self.content(),
                rank_content={"random": capture_random_state()},
            )


def ranks_of(run: Run) -> list[Rank]:
    """What the ranks of a job with tp=2 and ZeRO-1 over dp=2 hold of the run: bf16 weights, fp32 master weights."""
    return [_rank(run, SIZES.at(rank)) for rank in range(SIZES.world_size)]


def save_ranks(directory: Path, tag: str, ranks: list[Rank]) -> None:
    """The tag of that job."""
    topologies = [SIZES.at(rank) for rank in range(SIZES.world_size)]
    save_as_every_rank(directory, tag, topologies, lambda rank: ranks[rank], partitions=CUTS, durable=False)


def _rank(run: Run, at: Topology) -> Rank:
    named = {name: value for name, value in run.model.named_parameters() if value.requires_grad}
    held = {name: _of_tp(name, value.detach(), at) for name, value in run.model.state_dict().items()}
    state = [run.optimizer.state[value] for value in named.values()]

    def shard(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return copy.deepcopy(value)
        if len(value) != len(run.model.get_parameter(name)):  # of all rows together, as Adafactor's col_var
            return value.detach().clone()
        return _of_dp(_of_tp(name, value.detach(), at), at)

    entries = [{key: shard(name, value) for key, value in one.items()} for name, one in zip(named, state, strict=True)]
    group = {**run.optimizer.state_dict()["param_groups"][0], "params": list(range(len(named)))}
    return {
        "model": {name: value.bfloat16() if value.is_floating_point() else value for name, value in held.items()},
        "optimizer": {
            "state": {},
            "param_groups": [group],
            "base_state": dict(enumerate(entries)),
            "shape_info": {index: held[name].shape for index, name in enumerate(named)},
            "sharded_master_weights": {index: _of_dp(held[name], at) for index, name in enumerate(named)},
        },
        "param_names": [list(named)],
        "scheduler": copy.deepcopy(run.scheduler.state_dict()),
        "user_content": run.content(),
        "rank_content": {"loader": {"num_yielded": run.step}, "random": torch.tensor([run.step, at.rank])},
    }


def _of_tp(name: str, value: torch.Tensor, at: Topology) -> torch.Tensor:
    return (value.chunk(at.tp)[at.tp_rank] if name in CUTS else value).clone()


def _of_dp(value: torch.Tensor, at: Topology) -> torch.Tensor:
    return value.chunk(at.dp)[at.dp_rank].clone()
