"""A resumed run is the uninterrupted one, for every training object of the registry; and what is not, is said."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, load_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch
from nxd_ckpt.testing import ResumeDiffers, check_resume
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.training import imitations
from tests.training.registry import CASES, OPTIMIZERS, OWN, Inner, Mixed, step


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if case.soak else []) for name, case in CASES.items()]
)
@pytest.mark.one_in(3)
def test_a_resumed_run_is_the_uninterrupted_one(name: str) -> None:
    """Loaded into fresh objects, and trained for three more steps."""
    check_resume(CASES[name].make, step, new_process=False)


def test_another_memory_format_is_that_of_the_live_parameter(tmp_path: Path) -> None:
    """Who changed the memory format between two runs gets moments in the order of the live parameters."""
    model, optimizer = CASES["AdamW, fused, contiguous"].make()
    step(model, optimizer)
    save_checkpoint(tmp_path, "step_1", model, optimizer)
    other, other_optimizer = CASES["AdamW, fused, channels_last"].make()
    load_checkpoint(tmp_path, "step_1", other, other_optimizer)
    close_checkpointers()
    moment = other_optimizer.state[other.kernel]["exp_avg"]
    assert other.kernel.stride() == moment.stride()
    assert torch.equal(optimizer.state[model.kernel]["exp_avg"], moment)


def _simple() -> tuple[Any, ...]:
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _load_without_optimizer(directory: str, tag: str, model: Any, optimizer: Any, scheduler: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(tag, model, None, scheduler)


def test_a_new_process_resumes() -> None:
    """As a job that starts again; what it did not load is named."""
    check_resume(_simple, step, steps=1, steps_after=1)
    with pytest.raises(ResumeDiffers, match=r"after the load: optimizer/param_groups/0/lr: expected 0\.0005 "):
        check_resume(_simple, step, steps=1, steps_after=1, load=_load_without_optimizer, new_process=False)
    with pytest.raises(InvalidArgument, match="make, step, save and load must be functions at the top level"):
        check_resume(lambda: _simple(), step)


class Forgetful(Mixed):
    """Leaves a buffer out of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.moving: torch.Tensor
        self.register_buffer("moving", torch.zeros(()), persistent=False)

    def forward(self, batch: int = 4) -> torch.Tensor:
        self.moving = self.moving + 1
        return super().forward(batch)


class Loose(torch.optim.SGD):
    """Keeps a number where no save looks."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


def _without_frozen(directory: str, tag: str, model: Any, *others: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(tag, model, *others, ignore_keys=["model/frozen"])


@pytest.mark.parametrize(
    ("model", "optimizer", "load", "match"),
    [
        (Forgetful, torch.optim.AdamW, None, "moving: expected other values: 1 of 1 differ, by at most 3"),
        (Mixed, Loose, None, "after the last step: model|after the last step: optimizer|loss of step"),
        (Mixed, torch.optim.AdamW, _without_frozen, "after the load: model/state_dict/frozen: expected other values"),
    ],
    ids=["a buffer", "a number", "a frozen weight"],
)
def test_what_does_not_come_back_is_named(model: Any, optimizer: Any, load: Any, match: str) -> None:
    """State that objects keep outside of what they save, and what a load leaves out."""

    def make() -> Any:
        live = model()
        return live, optimizer(live.parameters())

    with pytest.raises(ResumeDiffers, match=match):
        check_resume(make, step, load=load, new_process=False)


def _by_name() -> Any:
    models = {"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 4)}
    return models, {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}


def _step_by_name(models: dict[str, torch.nn.Module], optimizers: dict[str, torch.optim.Optimizer]) -> torch.Tensor:
    loss = models["second"](models["first"](torch.ones(2, 4))).square().mean()
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
    return loss.detach()


def _load_the_first(directory: str, tag: str, models: Any, optimizers: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(tag, models, optimizers, ignore_keys=["model/second.weight"])


def test_models_by_name_are_compared() -> None:
    """Dicts of models and optimizers: by their state, not by what else the objects have; a lost weight is named."""
    check_resume(_by_name, _step_by_name, new_process=False)
    with pytest.raises(ResumeDiffers, match="after the load: model/second/state_dict/weight: expected other values"):
        check_resume(_by_name, _step_by_name, load=_load_the_first, new_process=False)


def test_a_lazy_parameter_of_an_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    """It has no shape before a first batch; a load of the model alone gives it one."""
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3))
    lazy(torch.ones(1, 5))
    optimizer = torch.optim.AdamW(lazy.parameters())
    save_checkpoint(tmp_path, "t", lazy, optimizer)
    fresh = torch.nn.Sequential(torch.nn.LazyLinear(3))
    other = torch.optim.AdamW(fresh.parameters())
    with pytest.raises(OptimizerMismatch, match=r"optim/0\.weight: its parameter has no shape yet"):
        load_checkpoint(tmp_path, "t", fresh, other)
    load_checkpoint(tmp_path, "t", fresh)
    load_checkpoint(tmp_path, "t", fresh, other)
    assert torch.equal(lazy.get_parameter("0.weight"), fresh.get_parameter("0.weight"))
    close_checkpointers()


ON_RANKS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Without those that torch cannot step on DTensors.
    **{name: make for name, make in OPTIMIZERS.items() if name not in ("Rprop", "Adafactor")},
    **{name: OWN[name] for name in ("Lion", "factored", "Muon", "own options", "schedule-free", "Lookahead")},
    "float32 clones": imitations.WithMasters,
    **{name: OWN[name] for name in ("chained", "chained, in a list", "no optimizer of torch's")},
    **{name: OWN[name] for name in ("tensors as options", "maximize", "decoupled")},
}
ON_SHARDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    f"{kind.__name__} on shards": imitations.on_shards(kind)
    for kind in (
        imitations.Lion,
        imitations.Muon,
        imitations.Shampoo,
        imitations.Soap,
        imitations.GaLore,
        imitations.EightBit,
        imitations.ScheduleFree,
    )
}


def _on_ranks(rank: int, names: list[str]) -> list[str]:
    """What differs after a resume of a model that is cut over the ranks, one line for each optimizer."""
    problems = []
    for name in names:

        def make(name: str = name) -> Any:
            torch.manual_seed(0)
            rows = 7 if name in ON_RANKS else 8  # what is kept for a shard has one shape on all ranks
            model = Inner(torch.nn.Linear(6, rows), torch.nn.Linear(rows, 6 if rows == 7 else 8, bias=False))
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
            return model, {**ON_RANKS, **ON_SHARDS}[name](model.parameters())

        told = refusal(partial(check_resume, make, step, new_process=False))
        problems += [f"{name}: {told}"] if told else []
    return problems


SOME = [
    "AdamW",
    "SGD",
    "float32 clones",
    "chained, in a list",
    "no optimizer of torch's",
    "factored",
    "own options",
    "Soap on shards",
    "EightBit on shards",
]
OTHERS = [name for name in (*ON_RANKS, *ON_SHARDS) if name not in SOME]


@pytest.mark.parametrize("names", [SOME, pytest.param(OTHERS, marks=pytest.mark.soak)], ids=["some", "others"])
def test_resumed_ranks_are_the_uninterrupted_ones(gloo_ranks: RankPool, names: list[str]) -> None:
    """FSDP2 on four ranks, also with shards of different sizes; all ranks hear of a difference."""
    assert [[]] * 4 == gloo_ranks.run(_on_ranks, names)
