"""Independent models on some of the ranks each: they save, load and resume without the others (``process_group=``)."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, Topology, list_checkpoints, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal, refusals


def made(half: int, shape: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """The model of this half, 7 or 9 rows, its optimizer, and its process group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("halves", "shards"))["shards"]
    torch.manual_seed(half)
    model = torch.nn.Linear(4, 7 + 2 * half)
    if shape == "fsdp":
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), mesh.get_group()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()


def local(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found.detach().clone()


def halves(rank: int, directory: Path, shape: str) -> bool:
    """Each half trains its own model for its own number of steps; whether its resumed run is the uninterrupted one."""
    half = rank // 2
    model, optimizer, group = made(half, shape)
    with Checkpointer(directory / f"half_{half}", process_group=group) as checkpointer:
        for step in range(2 + half):  # one half saves more often than the other
            train(model, optimizer, range(step, step + 1))
            checkpointer.save(f"step_{step}", model, optimizer, async_save=step > 0)
    fresh, other, _ = made(half, shape)
    with Checkpointer(directory / f"half_{half}", process_group=group) as checkpointer:
        checkpointer.load(None, fresh, other)
    for pair in ((model, optimizer), (fresh, other)):
        train(*pair, range(10, 12))
    pairs = zip(model.parameters(), fresh.parameters(), strict=True)
    return all(torch.equal(local(one), local(its)) for one, its in pairs)


@pytest.mark.parametrize("shape", ["plain", "fsdp"])
def test_halves_of_the_ranks_train_models_of_their_own(gloo_ranks: RankPool, tmp_path: Path, shape: str) -> None:
    """Other shapes, other numbers of saves, at the same time; each tag is whole and verified."""
    assert [True] * 4 == gloo_ranks.run(halves, tmp_path, shape)
    for half in range(2):
        place = tmp_path / f"half_{half}"
        assert 2 + half == len(list_checkpoints(place))
        assert () == verify_checkpoint(place).problems
        tag = open_checkpoint(place)
        assert (7 + 2 * half, 4) == tag.metadata["model/weight"].shape
        assert 2 == tag.topology.world_size


def functions(rank: int, directory: Path) -> tuple[bool, list[str]]:
    """The four functions take it too; beside them all ranks save together. What is refused, in words."""
    half = rank // 2
    model, optimizer, group = made(half, "plain")
    train(model, optimizer, range(1))
    save_checkpoint(directory / f"half_{half}", "t", model, optimizer, process_group=group)
    save_checkpoint(directory / "all", "t", {"w": torch.ones(2)})
    fresh, other, _ = made(half, "plain")
    load_checkpoint(directory / f"half_{half}", None, fresh, other, process_group=group)
    same = all(torch.equal(one, its) for one, its in zip(model.parameters(), fresh.parameters(), strict=True))
    state: dict[str, torch.Tensor] = {}
    load_checkpoint(directory / "all", None, state)
    close_checkpointers()
    wrong: list[dict[str, Any]] = [
        {"process_group": "half"},
        {"process_group": dist.new_group([rank for rank in range(4) if rank != 3])},
        {"process_group": group, "topology": Topology(dp=4, rank=rank)},
    ]
    messages = refusals(partial(Checkpointer, directory / "wrong", **options) for options in wrong)
    sharded, _, _ = made(half, "fsdp")
    third = dist.new_group([0, 2]), dist.new_group([1, 3])
    to = directory / f"third_{rank % 2}"
    messages.append(refusal(lambda: save_checkpoint(to, "t", sharded, process_group=third[rank % 2])))
    close_checkpointers()
    return same and torch.equal(torch.ones(2), state["w"]), messages


def test_functions_take_a_process_group(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """What is none, or not this process's, is refused by name; so is a tensor on a mesh beyond it."""
    for rank, (same, messages) in enumerate(gloo_ranks.run(functions, tmp_path)):
        assert same
        assert "expected a group of torch.distributed" in messages[0]
        if rank == 3:
            assert "this process is not in process_group=" in messages[1]
        assert any(f"topology= is rank {rank} of 4" in message for message in messages)
        assert "process_group= has the ranks" in messages[-1]
    assert not (tmp_path / "wrong").exists()


def without(rank: int, directory: Path) -> str:
    place = directory / f"half_{rank // 2}"
    said = refusal(lambda: save_checkpoint(place, "t", {"w": torch.ones(2)}, timeout=4.0))
    close_checkpointers()
    return said


def test_a_forgotten_process_group_is_named(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Halves that save to directories of their own are told what to pass."""
    assert all("pass process_group=" in message for message in gloo_ranks.run(without, tmp_path))
