"""A small run with any optimizer and any scheduler, on the CPU or on ranks, and what a resume must not change in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler as lr

import nxd_ckpt
from nxd_ckpt import Topology

Optimizer = Any
Groups = list[dict[str, Any]]

SETTINGS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)}

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step]),
    "MultiplicativeLR": lambda optimizer: lr.MultiplicativeLR(optimizer, lambda step: 0.9),
    "StepLR": lambda optimizer: lr.StepLR(optimizer, 1, 0.8),
    "MultiStepLR": lambda optimizer: lr.MultiStepLR(optimizer, [1, 2, 4], 0.5),
    "LinearLR": lambda optimizer: lr.LinearLR(optimizer, total_iters=4),
    "ExponentialLR": lambda optimizer: lr.ExponentialLR(optimizer, 0.8),
    "PolynomialLR": lambda optimizer: lr.PolynomialLR(optimizer, 9),
    "CosineAnnealingLR": lambda optimizer: lr.CosineAnnealingLR(optimizer, 9),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 2),
    "OneCycleLR": lambda optimizer: lr.OneCycleLR(optimizer, max_lr=0.3, total_steps=9),
    "CyclicLR": lambda optimizer: lr.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "ReduceLROnPlateau": lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    "SequentialLR": lambda optimizer: lr.SequentialLR(
        optimizer, [lr.LinearLR(optimizer, total_iters=3), lr.CosineAnnealingLR(optimizer, 9)], [3]
    ),
    "ChainedScheduler": lambda optimizer: lr.ChainedScheduler(
        [lr.ConstantLR(optimizer, total_iters=3), lr.ExponentialLR(optimizer, 0.8)]
    ),
}


class Model(torch.nn.Module):
    """Three parameters, one of them an expert's if there are ranks of experts."""

    def __init__(self, topology: Topology, device: torch.device, shift: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.bias = (self._parameter(torch.randn(*shape) + shift, device) for shape in ((5, 3), (4,)))
        self.experts = self._parameter(torch.randn(2, 2, 3).chunk(topology.ep)[topology.ep_rank] + shift, device)
        vars(self.experts)["expert_model_parallel"] = True

    @staticmethod
    def _parameter(value: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
        return torch.nn.Parameter(value.to(device).contiguous())

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return (self.up * data).sin().sum() + (self.bias * data[0]).cos().sum() + (self.experts * data).sin().sum()


@dataclass(frozen=True)
class Kind:
    """How one kind of optimizer is made of two param groups, and whether it is saved and loaded as a dict."""

    make: Callable[[Groups, Topology], Optimizer]
    as_dict: bool = False


class Run:
    """Model, optimizer and scheduler. ``shift`` makes it start from other values."""

    def __init__(self, kind: Kind, scheduler: str, topology: Topology, device: torch.device, shift: float = 0.0):
        self.kind, self.topology, self.device = kind, topology, device
        self.model = Model(topology, device, shift)
        groups: Groups = [{"params": [self.model.up, self.model.experts]}, {"params": [self.model.bias], "lr": 0.02}]
        self.optimizer = kind.make(groups, topology)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.step_number = 0

    def train(self, steps: int, after_each: Callable[[], None] = lambda: None) -> list[Any]:
        """For each step: the loss, as hex, and the options of all param groups that it was made with."""
        return [self._step(after_each) for _ in range(steps)]

    def _step(self, after: Callable[[], None]) -> Any:
        generator = torch.Generator().manual_seed(1000 * self.step_number + self.topology.dp_rank)
        loss = self.model(torch.randn(3, generator=generator).to(self.device))
        loss.backward()
        self.optimizer.step()
        options = list(options_of(self.optimizer))
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step(*[1.0] if isinstance(self.scheduler, lr.ReduceLROnPlateau) else [])
        after()
        self.step_number += 1
        return float(loss.detach().cpu()).hex(), options

    def save(self, directory: str, tag: str) -> None:
        optimizer = self.optimizer.state_dict() if self.kind.as_dict else self.optimizer
        nxd_ckpt.save_checkpoint(
            directory, tag, self.model, optimizer, self.scheduler, {"step": self.step_number}, topology=self.topology
        )

    def load(self, directory: str, tag: str) -> None:
        optimizer: Any = {} if self.kind.as_dict else self.optimizer
        content = nxd_ckpt.load_checkpoint(
            directory, tag, self.model, optimizer, self.scheduler, topology=self.topology
        )
        if self.kind.as_dict:
            self.optimizer.load_state_dict(optimizer)
        self.step_number = content["step"]


def options_of(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """The options of every list of param groups that an optimizer has: its own, and those of optimizers inside it."""
    inside = (getattr(optimizer, name, None) for name in ("optimizer", *_INNER))
    for group in optimizer.param_groups:
        yield {option: value for option, value in group.items() if option in ("lr", "betas", "weight_decay")}
    for inner in inside:
        yield from () if inner is None else options_of(inner)


_INNER = ("non_ep_zero_optimizer", "ep_zero_optimizer", "base_optimizer")


def differences(kind: Kind, scheduler: str, directory: str) -> list[str]:
    """What is not the same, in any bit, in the three steps after a resume on one rank; in words."""
    run = Run(kind, scheduler, Topology(), torch.device("cpu"))
    run.train(2)
    run.save(directory, scheduler)
    expected = run.train(3)
    resumed = Run(kind, scheduler, Topology(), torch.device("cpu"), shift=1.0)
    resumed.load(directory, scheduler)
    actual = resumed.train(3)
    return [] if expected == actual else [f"{scheduler}: expected {expected}, found {actual}"]
