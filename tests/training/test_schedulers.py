"""Every kind of optimizer with every kind of scheduler: a resumed run steps with the same options, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.testing import check_resume
from tests.live.doubles import AcceleratedOptimizer, ExpertShardedOptimizer, NxDWrapper, ShardedOptimizer
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.training.model import zero1
from tests.training.registry import SCHEDULERS

Groups = list[dict[str, Any]]
SETTINGS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)}
ALONE = [[0]]


class Model(nn.Module):
    """Three parameters, one of them an expert's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))
        self.experts = nn.Parameter(torch.randn(2, 2, 3))
        vars(self.experts)["expert_model_parallel"] = True

    def forward(self) -> torch.Tensor:
        data = torch.randn(3).to(self.up.device)
        return (self.up * data).sin().sum() + (self.bias * data[0]).cos().sum() + (self.experts * data).sin().sum()


def two_groups(model: Model) -> Groups:
    return [{"params": [model.up, model.experts]}, {"params": [model.bias], "lr": 0.02}]


def adamw(groups: Groups) -> Any:
    return torch.optim.AdamW(groups, **SETTINGS)


def sgd(groups: Groups) -> Any:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def sharded(groups: Groups) -> Any:
    return ShardedOptimizer(groups, 0, ALONE, save_master_weights=True, **SETTINGS)


def expert_sharded(groups: Groups) -> Any:
    return ExpertShardedOptimizer(groups, 0, ALONE, ALONE, **SETTINGS)


KINDS: dict[str, Callable[[Groups], Any]] = {
    "torch SGD": sgd,
    "dict": adamw,
    "ZeRO-1": sharded,
    "expert ZeRO-1": expert_sharded,
    "NxD's wrapper of torch": lambda groups: NxDWrapper(adamw(groups)),
    "NxD's wrapper of ZeRO-1": lambda groups: NxDWrapper(sharded(groups)),
    "NxD's wrapper of expert ZeRO-1": lambda groups: NxDWrapper(expert_sharded(groups)),
    "accelerate's wrapper of ZeRO-1": lambda groups: AcceleratedOptimizer(sharded(groups)),
    "accelerate's wrapper of NxD's of ZeRO-1": lambda groups: AcceleratedOptimizer(NxDWrapper(sharded(groups))),
}


def step(model: Model, optimizer: Any, scheduler: Any) -> float:
    loss = model()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step(*[1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else [])
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, ExpertShardedOptimizer):
        inner.hand_down()  # else its state dict, which is compared, has the options of the step before
    return loss.item()


def save_dict(directory: str, tag: str, model: Model, optimizer: Any, scheduler: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(tag, model, optimizer.state_dict(), scheduler)


def load_dict(directory: str, tag: str, model: Model, optimizer: Any, scheduler: Any) -> None:
    state: dict[str, Any] = {}
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(tag, model, state, scheduler)
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_steps_as_the_uninterrupted_one(kind: str) -> None:
    """With every scheduler, and with every third one if the optimizer is wrapped; AdamW itself is in the registry."""

    def make(scheduler: str) -> Any:
        model = Model()
        optimizer = KINDS[kind](two_groups(model))
        return model, optimizer, SCHEDULERS[scheduler](optimizer)

    how: dict[str, Any] = {"save": save_dict, "load": load_dict} if kind == "dict" else {}
    for scheduler in list(SCHEDULERS)[:: 3 if "wrapper" in kind else 1]:
        check_resume(lambda scheduler=scheduler: make(scheduler), step, new_process=False, **how)  # type: ignore[misc]


def late_shards(rank: int, directory: Path, beside_dict: bool) -> tuple[str, list[float], list[float]]:
    """What a load before ``init_zero()`` is refused with; the losses of a run, and of one whose shards came late."""
    import torch_xla

    topology = Topology(dp=4, rank=rank)

    def made(seed: int, **more: Any) -> Any:
        torch.manual_seed(seed)
        model = Model().to(torch_xla.device())
        optimizer = zero1(two_groups(model), topology, {**SETTINGS, "pin_layout": False, **more})
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)

    def losses(objects: Any, numbers: range) -> list[float]:
        found = []
        for number in numbers:
            torch.manual_seed(1000 * number + rank)
            found.append(step(*objects))
            torch_xla.sync()
        return found

    saved, (model, optimizer, scheduler) = made(0), made(1, lazy_init=True)
    with Checkpointer(directory, topology=topology) as checkpointer:
        losses(saved, range(2))
        checkpointer.save("t", *saved)
        refused = refusal(lambda: checkpointer.load("t", model, optimizer, scheduler))
        checkpointer.load("t", model)
        optimizer.init_zero()
        checkpointer.load("t", model.state_dict() if beside_dict else model, optimizer, scheduler)
    return refused, losses(saved, range(2, 5)), losses((model, optimizer, scheduler), range(2, 5))


@pytest.mark.xla
@pytest.mark.parametrize("beside_dict", [False, True], ids=["model", "its state dict"])
def test_shards_that_are_made_late(xla_ranks: RankPool, tmp_path: Path, beside_dict: bool) -> None:
    """``lazy_init``: the model loads before ``init_zero()``, the optimizer after, and goes on to the last bit."""
    for refused, expected, actual in xla_ranks.run(late_shards, tmp_path, beside_dict):
        assert "init_zero()" in refused
        assert expected == actual
