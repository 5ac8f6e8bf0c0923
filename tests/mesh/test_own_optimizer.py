"""An optimizer of DTensors that has other plain parameters, or other param groups, on some ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, convert, open_checkpoint
from nxd_ckpt.errors import IncompatibleState
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal

WIDTH = 64


def made(kind: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :]))
    shards = list(model.named_parameters())
    clone = ("clone", nn.Parameter(torch.randn((rank + 3) % 4)))
    groups: list[Any] = [{"params": shards}]
    if kind == "clones of each":
        groups = [{"params": [*shards, clone]}]
    elif kind == "a clone before the shards" and rank % 2:
        groups = [{"params": [clone, *shards]}]
    elif kind == "a param group of one" and rank == 1:
        groups = [{"params": shards}, {"params": [clone], "lr": 0.3}]
    elif kind == f"a head of rank {rank}":
        model.head = nn.Linear(3, 2)
        groups = [{"params": list(model.named_parameters())}]
    return model, torch.optim.AdamW(groups, lr=0.1)


def step(model: Any, optimizer: Any, drift: int = 0) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad = torch.full_like(one, 0.5 + drift)
    optimizer.step()


def facts(model: Any, optimizer: Any) -> str:
    """Everything that a run continues from."""
    groups = [[(one, optimizer.state.get(one)) for one in group["params"]] for group in optimizer.param_groups]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return repr((sorted(model.state_dict().items()), groups, options))


def saves(
    rank: int, directory: Path, kind: str, shape: tuple[int, ...], first: int, use_async: bool, drift: bool
) -> list[str]:
    """Saves, the first after ``first`` steps, that failed or did not come back; and what a load on other ranks says.

    With ``drift``, replicas of DTensors step on other gradients.
    """
    live = made(kind, shape)
    expected, wrong = {}, []
    with Checkpointer(directory) as checkpointer:
        for number in range(3):
            if number >= first:
                step(*live, drift=rank * drift)
            expected[number] = facts(*live)
            checkpointer.save(number, *live, async_save=use_async)
        checkpointer.wait()
        for number, state in expected.items():
            other = made(kind, shape)
            with torch.no_grad():
                for group in other[1].param_groups:
                    for one in group["params"]:
                        one.zero_()
            checkpointer.load(number, *other)
            wrong += [] if facts(*other) == state else [f"{number}: {facts(*other)} {state}"]
        said = refusal(partial(checkpointer.load, 2, *made(kind, (4,) if len(shape) > 1 else (2, 2))))
    return [*wrong, *([] if "differed between the ranks that saved it" in said else [said])]


KINDS = [
    "clones of each", "a clone before the shards", "a param group of one", "a head of rank 0", "a head of rank 2"
]  # fmt: skip


@pytest.mark.parametrize(("shape", "use_async"), [((4,), True), ((2, 2), False)], ids=["fsdp, async", "hsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_own_back(
    gloo_ranks: RankPool, tmp_path: Path, kind: str, shape: tuple[int, ...], use_async: bool
) -> None:
    """Into fresh objects; the shards stay the mesh's. The saves were refused, and said to build alike what is not."""
    for first in (0, 1):
        place = tmp_path / str(first)
        assert [[]] * 4 == gloo_ranks.run(saves, place, kind, shape, first, use_async, False)
    own = [path.stat().st_size for path in place.glob("step_2/rank_state/*")]
    assert len(own) in (2, 3)
    assert max(own) < WIDTH * WIDTH


def test_replicas_of_shards_that_drift_beside_it_come_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """They are compared, though all of the optimizer is each rank's own."""
    assert [[]] * 4 == gloo_ranks.run(saves, tmp_path, KINDS[0], (2, 2), 1, False, True)


def test_tools_see_each_ranks_own(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """With its shards; conversions refuse it by name."""
    gloo_ranks.run(saves, tmp_path, KINDS[1], (4,), 1, False, False)
    assert () == verify_checkpoint(tmp_path).problems
    checkpoint = open_checkpoint(tmp_path)
    own = [checkpoint.optimizer_state(rank) for rank in range(4)]
    assert [4, 5, 4, 5] == [len(each["state"]) for each in own]
    assert [(0,), (2,)] == [tuple(own[rank]["state"][0]["exp_avg"].shape) for rank in (1, 3)]
    assert torch.equal(own[0]["state"][0]["exp_avg"], own[1]["state"][1]["exp_avg"])
    with pytest.raises(IncompatibleState, match=r": optim differed .* leave out the optimizer"):
        convert(tmp_path, tmp_path / "files", to="files")
    convert(tmp_path, tmp_path / "files", to="files", optimizer=False)
