"""A resumed run of four ranks is the uninterrupted one, where a rank or a group of ranks has state of its own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nxd_ckpt import Checkpointer
from nxd_ckpt.testing import check_resume
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.support.stateful import Object
from tests.training import imitations
from tests.training.registry import Inner, step

Objects = tuple[Any, ...]


class OfRank(Inner):
    """Its loss is that of one rank, or of one group of ranks."""

    def __init__(self, *layers: nn.Module, number: int) -> None:
        super().__init__(*layers)
        self.number = number

    def forward(self) -> torch.Tensor:
        batch = torch.randn(4, 6).to(next(self.parameters()).dtype)
        loss: torch.Tensor = self.layers(batch).float().square().mean() * (1 + self.number)
        return loss


def _sharded_whole(shape: tuple[int, ...], *, owned: bool) -> Objects:
    model = Inner(nn.Linear(6, 7), nn.Linear(7, 6))
    names = ("replicas", "shards")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model, imitations.Whole(model.parameters(), owned=owned)


def _replicas(optimizer: Callable[[Any], Any] = torch.optim.AdamW, dtype: torch.dtype = torch.float32) -> Objects:
    """Copies that each rank trains on data of its own."""
    model = OfRank(nn.Linear(6, 7, bias=False), nn.Linear(7, 6, bias=False), number=dist.get_rank()).to(dtype)
    return model, optimizer(model.parameters())


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "fsdp"))


class Experts(nn.Module):
    """Weights of each group, cut over its ranks; a router that groups have drifted apart in; a norm of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        mesh = _mesh()
        self.group = mesh.get_local_rank("group")
        self.experts = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh["fsdp"], [Shard(1)]))
        self.router = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh["fsdp"], [Replicate()]))
        self.norm = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()]))

    def forward(self) -> Any:
        own = (self.experts * self.router).square().sum() * (1 + self.group)
        return own.full_tensor() + self.norm.square().sum().full_tensor()  # type: ignore[attr-defined]


def _experts() -> Objects:
    model = Experts()
    return model, torch.optim.AdamW(model.parameters())


def _local_sgd() -> Objects:
    mesh = _mesh()
    model = OfRank(nn.Linear(6, 7), nn.Linear(7, 6), number=mesh.get_local_rank("group"))
    fully_shard(model, mesh=mesh["fsdp"])
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _drifted(parallel: Callable[[nn.Module, DeviceMesh], Any]) -> Objects:
    """Groups that count as replicas, each of which goes on by itself after every step."""
    mesh = _mesh()
    model = OfRank(nn.Linear(6, 8), nn.Linear(8, 6), number=mesh.get_local_rank("group"))
    parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def drift(*_: Any) -> None:
        for one in model.parameters():
            one.detach().to_local().mul_(1 + model.number / 8)  # type: ignore[attr-defined]

    optimizer.register_step_post_hook(drift)
    return model, optimizer


def _in_columns(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model.get_submodule("layers.0"), mesh["fsdp"], ColwiseParallel())
    parallelize_module(model.get_submodule("layers.1"), mesh["fsdp"], RowwiseParallel())


def _sharded(rows: int = 7, last: int = 6) -> Any:
    model = Inner(nn.Linear(6, rows), nn.Linear(rows, last))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    return model


class Stage(OfRank):
    """A layer of a stage's own name, beside parameters, a buffer and extra state of names that all stages have."""

    def __init__(self, number: int) -> None:
        super().__init__(nn.Linear(6, 7), nn.Linear(7, 6), number=number)
        self.seen = 0
        self.add_module(f"of_{number}", nn.Linear(6, 6))
        self.register_buffer("steps", torch.zeros(2))

    def forward(self) -> torch.Tensor:
        self.seen += 1 + self.number
        self.get_buffer("steps").add_(1 + self.number)
        own: torch.Tensor = self.get_submodule(f"of_{self.number}")(torch.randn(4, 6)).square().mean()
        return super().forward() + own

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def _stages() -> Objects:
    mesh = _mesh()
    model = Stage(mesh.get_local_rank("group"))
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + model.number))
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _parts(number: int) -> Objects:
    """A part of a rank's own, of a size of its own, and a buffer that counts, beside one of all ranks."""
    model = Inner(nn.Linear(6, 6))
    model.layers.add_module(f"of_{number}", nn.Linear(6, 6, bias=bool(number % 2)))
    model.register_buffer(f"steps_{number}", torch.zeros(1 + number))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _owned_clones(number: int) -> Objects:
    """ZeRO-1 by hand: float32 clones of the parameters that a rank owns, which are sent to the others."""
    model = OfRank(nn.Linear(6, 7), nn.Linear(7, 6, bias=False), number=number).to(torch.bfloat16)
    named = list(model.parameters())
    owned = named[number :: dist.get_world_size() - 1]
    clones = [nn.Parameter(one.detach().float()) for one in owned]
    optimizer = torch.optim.AdamW(clones, lr=0.1)

    def take_gradients(*_: Any) -> None:
        for clone, one in zip(clones, owned, strict=True):
            clone.grad = None if one.grad is None else one.grad.float()

    def send(*_: Any) -> None:
        for clone, one in zip(clones, owned, strict=True):
            one.detach().copy_(clone)
        for place, one in enumerate(named):
            dist.broadcast(one.detach(), place % (dist.get_world_size() - 1))

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(send)
    return model, optimizer


def _beside_shards(number: int) -> Objects:
    """DTensors, beside a frozen adapter and a table of another size on each rank."""
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.add_module("adapter", nn.Linear(6, 1 + number).requires_grad_(False))
    model.register_buffer("table", torch.ones(1 + number))
    return model, optimizer


def _schedulers() -> Objects:
    model, optimizer = _replicas(partial(torch.optim.SGD, lr=0.1 * (1 + dist.get_rank())))
    rates = torch.optim.lr_scheduler
    first, then = rates.ConstantLR(optimizer, 0.5, 2), rates.ExponentialLR(optimizer, 0.9)
    return model, optimizer, rates.SequentialLR(optimizer, [first, then], [1 + dist.get_rank()])


class Average(Object):
    """An average of weights, of DTensors or plain ones, beside a number and what only some ranks have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__({"weights": [one.detach().clone() for one in model.parameters()], "count": 0})
        self.model = model

    def step(self) -> None:
        self.state["count"] += 1 + dist.get_rank()
        for own, one in zip(self.state["weights"], self.model.parameters(), strict=True):
            own.lerp_(one.detach(), 0.5)


class Ragged(Average):
    """One whose state has another form on each rank."""

    def step(self) -> None:
        super().step()
        if dist.get_rank():
            self.state[f"of rank {dist.get_rank()}"] = {"all": [torch.ones(dist.get_rank())]}


def _averages(kind: type[Average], make: Callable[[], Any]) -> Objects:
    model = make()
    return model, torch.optim.AdamW(model.parameters()), {"average": kind(model)}


def _without_empty(groups: int) -> Objects:
    """An optimizer, on ranks without a row of some parameters, without these."""
    model = _sharded(2, 8)
    held = [one for one in model.parameters() if one.to_local().numel()]
    split: Any = [{"params": held}] if groups == 1 else [
        {"params": [one for one in held if one.dim() > 1]},
        {"params": [one for one in held if one.dim() < 2], "weight_decay": 0.0},
    ]  # fmt: skip
    return model, torch.optim.AdamW(split, lr=0.1)


def _for_each(make: Callable[[], Any]) -> Objects:
    model = make()
    return model, {name: torch.optim.AdamW([one]) for name, one in model.named_parameters()}


CASES: dict[str, Callable[[], Objects]] = {
    "experts of groups": _experts,
    "local SGD": _local_sgd,
    "groups of columns": partial(_drifted, _in_columns),
    "replicas of shards": partial(_drifted, lambda model, mesh: fully_shard(model, mesh=mesh)),
    "stages": _stages,
    "drifted copies": _replicas,
    "schedulers": _schedulers,
    "float32 clones": partial(_replicas, imitations.WithMasters, torch.bfloat16),
    "chained": partial(_replicas, imitations.Chained),
    "chained, in a list": partial(_replicas, imitations.ChainedInList),
    "no optimizer of torch's": partial(_replicas, imitations.NoOptimizer),
    "Muon by owner": partial(_replicas, imitations.by_owner(imitations.Muon)),
    "SOAP by owner": partial(_replicas, imitations.by_owner(imitations.Soap)),
    "Shampoo by owner": partial(_replicas, imitations.by_owner(imitations.Shampoo)),
    "a block of each rank": partial(_replicas, partial(imitations.Blocks, lr=0.01, momentum=0.9)),
    "parts of a rank": lambda: _parts(dist.get_rank()),
    "clones of owned parameters": lambda: _owned_clones(dist.get_rank() % 3),
    "parts of a rank beside shards": lambda: _beside_shards(dist.get_rank()),
    "whole tensors beside DTensors": partial(_sharded_whole, (4,), owned=False),
    "whole tensors of owners": partial(_sharded_whole, (4,), owned=True),
    "whole tensors of owners, in replicas of shards": partial(_sharded_whole, (2, 2), owned=True),
    "an average of DTensors": partial(_averages, Average, _sharded),
    "an average of copies": partial(_averages, Average, lambda: _replicas()[0]),
    "another form on each rank": partial(_averages, Ragged, lambda: _replicas()[0]),
    "an optimizer without empty parameters": partial(_without_empty, 1),
    "an optimizer without empty parameters, in two groups": partial(_without_empty, 2),
    "an optimizer for each parameter": partial(_for_each, partial(_sharded, 2)),
}


def _step(model: Any, optimizer: Any, other: Any = None) -> Any:
    if isinstance(optimizer, dict):
        loss = model()
        loss.backward()
        for each in optimizer.values():
            each.step()
            each.zero_grad()
        return loss.detach()
    loss = step(model, optimizer)
    for each in other.values() if isinstance(other, dict) else [other] if other is not None else []:
        each.step()
    return loss


def _by_argument(model: Any, optimizer: Any, other: Any = None) -> dict[str, Any]:
    others = {"state" if isinstance(other, dict) else "scheduler": other} if other is not None else {}
    return {"model": model, "optimizer": optimizer, **others}


def _save(before: Callable[[], Objects] | None, directory: str, tag: str, *objects: Any) -> None:
    """Save, by a Checkpointer that saved objects without differences twice ``before``."""
    with Checkpointer(directory) as checkpointer:
        for step_before in range(0 if before is None else 2):
            checkpointer.save(step_before, **_by_argument(*before()))  # type: ignore[misc]
        checkpointer.save(tag, **_by_argument(*objects), async_save=before is not None)


def _load(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(tag, **_by_argument(*objects))


def resumed(rank: int, names: list[str], later: bool) -> list[str]:
    """What differs after a resume, one line for each case."""
    problems = []
    for name in names:
        make = CASES[name]
        how: Any = {"save": partial(_save, make if later else None), "load": _load, "new_process": False}
        told = refusal(partial(check_resume, make, _step, steps=2, steps_after=2, **how))
        problems += [f"{name}: {told}"] if told else []
    return problems


@pytest.mark.parametrize("later", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["later", "at once"])
def test_what_is_of_one_rank_or_group_is_resumed(gloo_ranks: RankPool, later: bool) -> None:
    """Weights, moments, values and schedulers; alike in the first saves, or not."""
    assert [[]] * 4 == gloo_ranks.run(resumed, list(CASES), later)


def moved(rank: int, directory: Path) -> list[str]:
    """What loads on one mesh of all ranks say of stages that had things of one name, alike and not."""
    said = []
    for differ in (False, True):
        model, *_ = _stages()
        model.seen = model.number if differ else 1
        place = directory / str(differ)
        with Checkpointer(place) as checkpointer:
            checkpointer.save(1, model)
        whole: Any = Stage(0)
        whole.add_module("of_1", nn.Linear(6, 6))
        fully_shard(whole, mesh=init_device_mesh("cpu", (4,)))
        for left_out in ([], ["model/_extra_state"]):
            with Checkpointer(place) as checkpointer:
                said.append(refusal(partial(checkpointer.load, 1, whole, ignore_keys=left_out)))
    return said


def test_what_stages_have_under_one_name_is_refused_elsewhere_if_it_differs(
    gloo_ranks: RankPool, tmp_path: Path
) -> None:
    """By name, with what to leave out."""
    for first, second, refused, rest in gloo_ranks.run(moved, tmp_path):
        assert [""] * 3 == [first, second, rest]
        assert "model/_extra_state differed between the ranks that saved it" in refused


def without_empty(rank: int, directory: Path) -> list[str]:
    """Save with an optimizer without empty parameters; what is wrong on a mesh of another shape, with and without."""
    model, optimizer = _without_empty(2)
    for number in range(2):
        torch.manual_seed(number)
        _step(model, optimizer)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model, optimizer)
    whole = {}
    for name, one in model.named_parameters():
        moments: Any = distribute_tensor(torch.zeros(one.shape), one.device_mesh, one.placements)
        whole[name] = (optimizer.state[one]["exp_avg"] if one in optimizer.state else moments).full_tensor()
    other: Any = Inner(nn.Linear(6, 2), nn.Linear(2, 8))
    fully_shard(other, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    wide: Any = [one for one in other.parameters() if one.dim() > 1]
    narrow: Any = [one for one in other.parameters() if one.dim() < 2]
    fresh = torch.optim.AdamW([{"params": wide}, {"params": narrow, "weight_decay": 0.0}], lr=0.5)
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(1, other, fresh)
    named = other.named_parameters()
    return [name for name, one in named if not torch.equal(fresh.state[one]["exp_avg"].full_tensor(), whole[name])]


def test_what_was_saved_without_empty_parameters_is_resharded(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Onto a mesh on which each rank has elements of each."""
    assert [[]] * 4 == gloo_ranks.run(without_empty, tmp_path)
