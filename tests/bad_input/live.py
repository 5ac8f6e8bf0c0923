"""A small training job on plain CPU torch, and pictures of it and of a directory to compare."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nxd_ckpt import Topology
from tests.live.doubles import ShardedOptimizer, plain


class Net(torch.nn.Module):
    """A few parameters, one of them frozen, and a buffer."""

    steps_seen: torch.Tensor

    def __init__(self, width: int = 4, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, width, dtype=dtype)
        self.down = torch.nn.Linear(width, 3, bias=False, dtype=dtype)
        self.scale = torch.nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps_seen += 1
        out: torch.Tensor = self.down(self.up(x).relu()) * self.scale
        return out


class Job:
    """What one rank of a job has live. ZeRO-1 with ``zero1``, its shards over all of dp."""

    def __init__(self, model: Net, topology: Topology, *, zero1: bool, lr: float) -> None:
        self.model, self.topology = model, topology
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        dp_group = topology.replicas(topology.coordinates)
        self.optimizer: torch.optim.Optimizer = (
            ShardedOptimizer(trained, topology.rank, [dp_group], save_master_weights=True, lr=lr)
            if zero1
            else torch.optim.AdamW(trained, lr=lr)
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)
        self.rank_content: dict[str, Any] = {"lr": lr, "rank": topology.rank}

    @property
    def parts(self) -> dict[str, Any]:
        """The objects, as arguments of ``save_checkpoint`` and ``load_checkpoint``."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def picture(self) -> dict[str, Any]:
        """Everything that a load may change, and what it must not: gradients, random state."""
        return {**self.saved_picture(), **self._aside()}

    def saved_picture(self) -> dict[str, Any]:
        """What a checkpoint of this job holds."""
        return {
            "model": plain(dict(self.model.state_dict())),
            "optimizer": plain(self.optimizer.state_dict()),
            "scheduler": plain(self.scheduler.state_dict()),
            "rank_content": dict(self.rank_content),
        }

    def _aside(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state()
        return {
            "gradients": plain([parameter.grad for parameter in self.model.parameters()]),
            "python": random.getstate(),
            "numpy": (kind, np.asarray(keys).tolist(), rest),
            "torch": plain(torch.get_rng_state()),
        }


def jobs(dp: int = 1, *, zero1: bool = False, seed: int = 0, steps: int = 1, net: Callable[[], Net] = Net) -> list[Job]:
    """One job for each rank of ``dp`` data-parallel ones, after ``steps`` steps. Replicas share their parameters."""
    torch.manual_seed(seed)
    model = net()
    ranks = [Job(model, Topology(dp=dp, rank=rank), zero1=zero1, lr=0.1 / (seed + 1)) for rank in range(dp)]
    for _ in range(steps):
        model(torch.randn(2, 3, dtype=model.scale.dtype)).sum().backward()
        for job in ranks:
            job.optimizer.step()
            job.scheduler.step()
    return ranks


def topologies(ranks: Sequence[Job]) -> list[Topology]:
    return [job.topology for job in ranks]


def files_below(directory: Path) -> dict[str, bytes | None]:
    """Every name below a directory, hidden ones too, with the bytes of files; empty where it does not exist."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }
