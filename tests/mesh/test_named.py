"""Several models and optimizers of a mesh job, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_ckpt import Checkpointer
from nxd_ckpt.errors import CheckpointError, UnsupportedState
from tests.mesh import jobs
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference

pytestmark = [pytest.mark.plain, pytest.mark.once]


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
    """Whole tensors of models and optimizers are equal."""
    expected = gloo_ranks.run(save, tmp_path, first)[0]
    found = gloo_ranks.run(load, tmp_path, then)[0]
    assert None is difference(expected, found)


class OwnState:
    """An object with another state on each rank, or with a DTensor in it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def refused(rank: int, directory: Path) -> str:
    held: dict[str, Any] = {"model": jobs.JOBS["fsdp"](0)}
    held["loader"] = OwnState(next(held["model"].parameters()))
    try:
        with Checkpointer(directory) as checkpointer:
            checkpointer.save(2, state=held)
    except CheckpointError as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    return "saved"


def kept(rank: int, directory: Path, later: bool) -> Any:
    """The value of an object that differs between ranks, after a load."""
    held: dict[str, Any] = {"model": jobs.JOBS["fsdp"](0), "loader": OwnState(0 if later else rank)}
    with Checkpointer(directory) as checkpointer:
        if later:
            checkpointer.save(1, state=held)
            held["loader"].value = rank
        checkpointer.save(2, state=held)
        fresh: dict[str, Any] = {"model": jobs.JOBS["fsdp"](0), "loader": OwnState(None)}
        checkpointer.load(2, state=fresh)
    return fresh["loader"].value


@pytest.mark.parametrize("later", [False, True])
def test_a_state_that_differs_between_ranks_comes_back_to_them(
    gloo_ranks: RankPool, tmp_path: Path, later: bool
) -> None:
    """As a data loader's position: at the first save, and at any later one."""
    assert [0, 1, 2, 3] == gloo_ranks.run(kept, tmp_path, later)


def test_a_state_with_a_dtensor_is_refused(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0's part alone would be kept."""
    answers = gloo_ranks.run(refused, tmp_path)
    assert all("state['loader']: the state_dict() of OwnState has DTensors" in answer for answer in answers)
    assert answers[0].startswith(UnsupportedState.__name__)
