"""A disk in each host, where the ranks are processes of torch-xla: a save, the copy to a lower tier, and loads."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Tier
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hosts.jobs import RANKS, TIMEOUT, host_of, of, tier
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.xla


def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model on the rank's device, and its optimizer after one step."""
    import torch_xla

    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 8).to(torch_xla.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4).to(torch_xla.device())).square().sum().backward()
    optimizer.step()
    torch_xla.sync()
    return model, optimizer


def values(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that training goes on from."""
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [value.detach().cpu() for value in (*model.parameters(), *moments)]


def launch(rank: int, path: Path) -> Checkpointer:
    tiers = [tier(path, rank, replicas=2), Tier(path / "far")]
    return Checkpointer(tiers=tiers, topology=of(rank), timeout=TIMEOUT)


def save(rank: int, path: Path) -> None:
    model, optimizer = made(rank)
    with launch(rank, path) as saver:
        saver.save("step_1", model, optimizer, user_content=1, async_save=True)
        saver.wait(tier=1)


def load(rank: int, path: Path) -> tuple[Any, bool]:
    """What was saved beside the model; whether the rank has the numbers that it saved."""
    model, optimizer = made(rank + RANKS)
    with launch(rank, path) as loader:
        content = loader.load(model=model, optimizer=optimizer)
    saved = values(*made(rank))
    return content, all(one.equal(other) for one, other in zip(saved, values(model, optimizer), strict=True))


def test_ranks_of_torch_xla_save_on_their_hosts(xla_ranks: RankPool, tmp_path: Path) -> None:
    """Each loads what it saved: from its own disk, after a host was replaced, and from the lower tier alone."""
    xla_ranks.run(save, tmp_path)
    own = [{file.name for file in (host_of(tmp_path, rank) / "step_1" / "model").iterdir()} for rank in range(RANKS)]
    assert RANKS == len({frozenset(files) for files in own})
    assert () == verify_checkpoint(tmp_path / "far", "step_1").problems
    assert RANKS * [(1, True)] == xla_ranks.run(load, tmp_path)
    shutil.rmtree(host_of(tmp_path, 1))
    (tmp_path / "far").rename(tmp_path / "away")
    assert RANKS * [(1, True)] == xla_ranks.run(load, tmp_path)
    (tmp_path / "away").rename(tmp_path / "far")
    for rank in range(RANKS):
        shutil.rmtree(host_of(tmp_path, rank))
    assert RANKS * [(1, True)] == xla_ranks.run(load, tmp_path)
