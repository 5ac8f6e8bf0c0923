"""Several models and optimizers of a mesh job, by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer
from tests.mesh import jobs
from tests.support.rank_pool import RankPool
from tests.support.stateful import Object
from tests.tag.equality import difference


def two(name: str, seed: int) -> dict[str, Any]:
    """A sharded model of this kind with AdamW, and a copy that is not trained, with SGD."""
    models = {"model": jobs.JOBS[name](seed), "teacher": jobs.JOBS[name](seed + 1)}
    second = torch.optim.SGD(models["teacher"].parameters(), lr=0.1, momentum=0.9)
    return {**models, "adamw": jobs.adamw(models["model"]), "sgd": second}


def whole(held: dict[str, Any]) -> dict[str, Any]:
    pairs = {"model": "adamw", "teacher": "sgd"}
    return {model: jobs.whole_state(held[model], held[optimizer]) for model, optimizer in pairs.items()}


def save(rank: int, directory: Path, name: str) -> dict[str, Any]:
    held = two(name, 0)
    jobs.train(held["model"], held["adamw"])
    jobs.train(held["teacher"], held["sgd"])
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state=held)
    return whole(held)


def load(rank: int, directory: Path, name: str) -> dict[str, Any]:
    held = two(name, 5)
    with Checkpointer(directory) as checkpointer:
        assert 1 == checkpointer.load_latest(state=held)
    return whole(held)


@pytest.mark.parametrize(("first", "then"), [("fsdp x tp", "fsdp"), ("plain", "hsdp"), ("fsdp", "plain")])
@pytest.mark.one_in(2)
def test_both_come_back_on_any_mesh(gloo_ranks: RankPool, tmp_path: Path, first: str, then: str) -> None:
    expected = gloo_ranks.run(save, tmp_path, first)[0]
    found = gloo_ranks.run(load, tmp_path, then)[0]
    assert None is difference(expected, found)


class Average(Object):
    """Moving averages of a model's parameters, in a form of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__({"shadow": [one.detach().clone() for one in model.parameters()], "updates": 0})

    def update(self, model: Any) -> None:
        self.state["updates"] += 1
        for shadow, one in zip(self.state["shadow"], model.parameters(), strict=True):
            shadow.lerp_(one.detach(), 0.5)


def _cut(shape: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 6))
    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model


def averaged(rank: int, directory: Path) -> list[bool]:
    """Whether an average of weights comes back on the same mesh, and on another one."""
    model = _cut((4,))
    average, optimizer = Average(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    average.update(model)
    right = []
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model, optimizer, state={"ema": average, "optimizer": Object({"by": 7})})
        for shape in ((4,), (2, 2)):
            other = _cut(shape)
            fresh, moments = Average(other), torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
            named = Object()
            checkpointer.load(1, other, moments, state={"ema": fresh, "optimizer": named})
            pairs = list(zip(average.state["shadow"], fresh.state["shadow"], strict=True))
            right += [torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs]
            right.append(fresh.state["updates"] == 1 and fresh.state["shadow"][0].device_mesh.shape == shape)
            right.append(moments.param_groups[0]["momentum"] == 0.9 and len(moments.state) == 4)
            right.append(named.state == {"by": 7})
    return right


def test_dtensors_of_any_object_are_cut_and_come_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """An average of weights beside model= and optimizer=, also on another mesh; what is called so was lost."""
    assert [[True] * 14] * 4 == gloo_ranks.run(averaged, tmp_path)


def in_backward(rank: int, directory: Path) -> list[bool]:
    """Whether an optimizer for each parameter, called by its name, comes back."""
    runs: list[Any] = []
    for _ in range(2):
        model = _cut((4,))
        own = {name: torch.optim.AdamW([one], lr=0.1) for name, one in model.named_parameters()}
        runs.append((model, own))
    for one in runs[0][0].parameters():
        one.grad = one.detach() * 0 + 1.0
    for optimizer in runs[0][1].values():
        optimizer.step()
    right = []
    for number, passed in enumerate((lambda own: {"optimizer": own}, lambda own: {"state": own})):
        with Checkpointer(directory / str(number)) as checkpointer:
            checkpointer.save(1, runs[0][0], **passed(runs[0][1]))
            checkpointer.load(1, runs[1][0], **passed(runs[1][1]))
        moments = [[state["exp_avg"] for own in run[1].values() for state in own.state.values()] for run in runs]
        right += [torch.equal(a.to_local(), b.to_local()) for a, b in zip(*moments, strict=True)]
    return right


def test_an_optimizer_for_each_parameter_has_its_name(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """With dots in it, as optimizer= and in state=."""
    assert [[True] * 8] * 4 == gloo_ranks.run(in_backward, tmp_path)
