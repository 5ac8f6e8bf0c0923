"""Wrapped and unwrapped models load each other: torch.compile, data parallelism, activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nxd_ckpt import Topology, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.api import close_checkpointers

pytestmark = [pytest.mark.plain, pytest.mark.once]

Model = torch.nn.Module


class Block(Model):
    """Has a module that is really called ``module``."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.module(batch))
        return out


def plain() -> Model:
    return torch.nn.Sequential(Block(), torch.nn.Linear(4, 4))


def inner_compiled() -> Model:
    model = torch.nn.Sequential(Block(), torch.nn.Linear(4, 4))
    model[1] = torch.compile(model[1])  # type: ignore[assignment]
    return model


def checkpointed() -> Model:
    model = torch.nn.Sequential(Block(), torch.nn.Linear(4, 4))
    model[0] = checkpoint_wrapper(model[0])
    return model


WRAPPED: dict[str, Callable[[], Model]] = {
    "plain": plain,
    "compiled": lambda: torch.compile(plain()),  # type: ignore[dict-item, return-value]
    "a compiled layer": inner_compiled,
    "checkpointed": checkpointed,
    "DDP": lambda: torch.nn.parallel.DistributedDataParallel(plain()),
    "DataParallel": lambda: torch.nn.DataParallel(plain()),
    "compiled DDP": lambda: torch.compile(  # type: ignore[dict-item, return-value]
        torch.nn.parallel.DistributedDataParallel(checkpointed())
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, which DDP needs."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def made(kind: str, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = WRAPPED[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer


def values(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return [*model.parameters(), *model.buffers(), *moments]


@pytest.mark.parametrize("kind", WRAPPED)
def test_names_are_those_of_the_model_itself(tmp_path: Path, kind: str) -> None:
    """In the tag, of weights and of the optimizer."""
    expected, _ = made("plain", 1)
    save_checkpoint(tmp_path, "t", *made(kind, 1))
    names = {name for name in open_checkpoint(tmp_path).metadata if name.startswith("model/")}
    assert {f"model/{name}" for name in expected.state_dict()} == names
    assert "optim/0.module.weight/exp_avg" in open_checkpoint(tmp_path).metadata


@pytest.mark.parametrize("saved", WRAPPED)
def test_wrapped_and_unwrapped_load_each_other(tmp_path: Path, saved: str) -> None:
    """With the optimizer; tags too that have the names of wrappers, as those of earlier versions and of others have."""
    model, optimizer = made(saved, 1)
    save_checkpoint(tmp_path, "t", model, optimizer)
    topology = Topology()
    save_checkpoint(tmp_path / "old", "t", model.state_dict(), topology=topology)
    close_checkpointers()
    for number, live in enumerate(WRAPPED):
        other = made(live, number + 2)
        load_checkpoint(tmp_path, "t", *other)
        pairs = zip(values(model, optimizer), values(*other), strict=True)
        assert all(torch.equal(one, its) for one, its in pairs), live
        fresh, _ = made(live, number + 2)
        load_checkpoint(tmp_path / "old", "t", fresh)
        pairs = zip(model.parameters(), fresh.parameters(), strict=True)
        assert all(torch.equal(one, its) for one, its in pairs), live


def test_a_state_dict_of_a_wrapped_model_is_filled(tmp_path: Path) -> None:
    """From a tag with the model's own names."""
    model, _ = made("plain", 1)
    save_checkpoint(tmp_path, "t", model)
    state: dict[str, Any] = {
        name: value.clone() for name, value in WRAPPED["compiled DDP"]().state_dict().items()
    }
    load_checkpoint(tmp_path, "t", state)
    assert all(torch.equal(one, its) for one, its in zip(model.state_dict().values(), state.values(), strict=True))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("at", [Topology(), Topology(dp=2, rank=1)], ids=["same sizes", "other sizes"])
def test_a_tag_that_nxd_wrote_of_a_wrapped_model_loads(tmp_path: Path, prefix: str, at: Topology) -> None:
    """Without manifest and index; into an unwrapped model and into a wrapped one, with the optimizer."""
    model, optimizer = made("plain", 1)
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    for folder, content in (("model", state), ("optim", optimizer.state_dict())):
        (tmp_path / "t" / folder).mkdir(parents=True)
        torch.save(content, tmp_path / "t" / folder / "dp_rank_00_tp_rank_00_pp_rank_00.pt")
    for marker in ("checkpoint", "done"):
        (tmp_path / "t" / marker).write_text("1")
    for kind in ("plain", "compiled DDP"):
        other = made(kind, 2)
        load_checkpoint(tmp_path, "t", *other, topology=at)
        pairs = zip(values(model, optimizer), values(*other), strict=True)
        assert all(torch.equal(one, its) for one, its in pairs)
