"""What a broken save or resume leaves in a tag of FSDP2 is found: one thing is changed in what its ranks hold."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, examine_checkpoint, open_checkpoint
from tests.mesh import jobs
from tests.support.rank_pool import RankPool

BATCH = 8
STEPS = 10, 13


class Run:
    """A job that trains on one batch that all ranks have."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.Linear(12, 12)]
        self.model = nn.Sequential(*layers, nn.Linear(12, 12))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 100))
        self.content, self.loader = {"consumed_samples": 0}, {"num_yielded": 0}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.randn(BATCH, 12)
            (self.model(inputs) - inputs.roll(1, 1)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.content["consumed_samples"] += BATCH
            self.loader["num_yielded"] += 1

    def save(self, saver: Checkpointer, tag: str) -> None:
        content: dict[str, Any] = {"user_content": dict(self.content), "rank_content": {"loader": dict(self.loader)}}
        saver.save(tag, self.model, self.optimizer, self.scheduler, **content)

    def held(self) -> dict[str, torch.Tensor]:
        """What this rank holds of every tensor; to be changed in place."""
        found = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        for name, weight in self.model.named_parameters():
            found |= {f"optim/{name}/{key}": value for key, value in self.optimizer.state[weight].items()}
        return {name: jobs.local(value).detach() for name, value in found.items()}


Held = dict[str, torch.Tensor]
"""What a rank holds, by name."""
Mutant = Callable[[int, Run, Held, Mapping[int, Held]], None]
"""Changes what a rank holds, the third; the last is what it held after earlier steps."""


def weights_not_saved(rank: int, run: Run, now: Held, was: Mapping[int, Held]) -> None:
    _put_back(now, was[STEPS[0]], *(name for name in now if name.startswith("model/")))


def rank_a_step_behind(rank: int, run: Run, now: Held, was: Mapping[int, Held]) -> None:
    """All that it holds but its step counts: a save refuses those that differ, so that only its own position tells."""
    if rank == 3:
        _put_back(now, was[STEPS[1] - 1], *(name for name in now if not name.endswith("/step")))
        run.loader["num_yielded"] -= 1


def scheduler_ahead(rank: int, run: Run, now: Held, was: Mapping[int, Held]) -> None:
    run.scheduler.last_epoch += 1


def loader_behind(rank: int, run: Run, now: Held, was: Mapping[int, Held]) -> None:
    run.content["consumed_samples"] -= BATCH


def loader_of_a_rank_ahead(rank: int, run: Run, now: Held, was: Mapping[int, Held]) -> None:
    run.loader["num_yielded"] += int(rank == 2)


def _put_back(now: Held, was: Held, *names: str) -> None:
    for name in names:
        now[name].copy_(was[name])


MUTANTS: dict[Mutant, tuple[str, str]] = {
    weights_not_saved: ("weights", "model"),
    rank_a_step_behind: ("position", "rank_content/loader/num_yielded"),
    scheduler_ahead: ("scheduler", "scheduler/last_epoch"),
    loader_behind: ("position", "user_content/consumed_samples"),
    loader_of_a_rank_ahead: ("position", "rank_content/loader/num_yielded"),
}


def _save_all(rank: int, directory: Path) -> None:
    """The tag before, the right one after it, and what each mutant makes of that."""
    run = Run()
    run.train(STEPS[0])
    with Checkpointer(directory, durable=False) as saver:
        run.save(saver, "before")
        was = {STEPS[0]: _copied(run)}
        run.train(STEPS[1] - 1 - STEPS[0])
        was[STEPS[1] - 1] = _copied(run)
        run.train(1)
        run.save(saver, "after")
        held, now, epoch = run.held(), _copied(run), run.scheduler.last_epoch
        content, loader = dict(run.content), dict(run.loader)
        for mutant in MUTANTS:
            mutant(rank, run, held, was)
            run.save(saver, mutant.__name__)
            _put_back(held, now, *held)
            run.scheduler.last_epoch, run.content, run.loader = epoch, dict(content), dict(loader)


def _copied(run: Run) -> Held:
    return {name: value.clone() for name, value in run.held().items()}


@pytest.fixture(scope="module")
def saved(gloo_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    gloo_ranks.run(_save_all, directory)
    return directory


def test_the_run_is_well(saved: Path) -> None:
    before, after = (open_checkpoint(saved, tag) for tag in ("before", "after"))
    assert () == examine_checkpoint(after, before=before).findings


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(saved: Path, mutant: Mutant) -> None:
    before, after = (open_checkpoint(saved, tag) for tag in ("before", mutant.__name__))
    problems = [one for one in examine_checkpoint(after, before=before).findings if one.severity == "problem"]
    kind, what = MUTANTS[mutant]
    assert [one for one in problems if one.kind == kind and what in one.what], problems
