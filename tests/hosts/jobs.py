"""What the ranks of a job do whose first tier is each host's own: plain processes, joined by gloo, hosts that are
directories."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Checkpointer, Tier, Topology, has_checkpoint, load_checkpoint

RANKS = 4
TIMEOUT = 60.0


def host_of(path: Path, rank: int, ranks_per_host: int = 1) -> Path:
    """The directory of a rank's host."""
    return path / f"host_{rank // ranks_per_host}" / "run"


def state(step: int, rank: int, numbers: int = 64) -> dict[str, torch.Tensor]:
    """A model that tells its step and its rank."""
    return {"weight": torch.full((numbers,), 100.0 * step + rank), "bias": torch.arange(5.0) + rank}


def tier(path: Path, rank: int, ranks_per_host: int = 1, **options: Any) -> Tier:
    """The tier that is this rank's host's own."""
    return Tier(host_of(path, rank, ranks_per_host), per_host=True, **options)


def of(rank: int) -> Topology:
    return Topology(tp=RANKS, rank=rank)


def save(rank: int, path: Path, steps: Sequence[int], ranks_per_host: int = 1, **options: Any) -> None:
    """Save each step, and close."""
    tiers = [tier(path, rank, ranks_per_host, **options)]
    with Checkpointer(tiers=tiers, topology=of(rank), timeout=TIMEOUT) as saver:
        for step in steps:
            saver.save(f"step_{step}", state(step, rank), user_content={"step": step}, rank_content=rank)


def load(rank: int, path: Path, tiers: Sequence[Tier], tag: str | None = None) -> int:
    """The step of the tag that is loaded, which is exactly what was saved."""
    model: dict[str, Any] = {}
    content = load_checkpoint(tag=tag, tiers=tiers, model=model, topology=of(rank), timeout=TIMEOUT)
    expected = state(content["step"], rank)
    assert expected.keys() == model.keys()
    assert all(value.equal(model[name]) for name, value in expected.items())
    return int(content["step"])


def there(tiers: Sequence[Tier]) -> bool:
    return has_checkpoint(tiers=tiers)
