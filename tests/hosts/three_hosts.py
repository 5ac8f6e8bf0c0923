"""What the ranks of a job on three hosts do, one on each."""

from pathlib import Path
from typing import Any

from nxd_ckpt import Checkpointer, Topology
from tests.hosts.jobs import TIMEOUT, state, tier
from tests.support.refusals import refusal

HOSTS = 3


def saver_of(rank: int, path: Path, timeout: float = TIMEOUT, **options: Any) -> Checkpointer:
    """The job's Checkpointer on that rank's host."""
    topology = Topology(tp=HOSTS, rank=rank)
    return Checkpointer(tiers=[tier(path, rank, **options)], topology=topology, timeout=timeout)


def outcome(saver: Checkpointer, step: int, numbers: int = 64) -> str:
    """What becomes of a save."""
    model = state(step, saver.topology.rank, numbers)
    return refusal(lambda: saver.save(f"step_{step}", model, user_content=step)) or "saved"


def newest(rank: int, path: Path, **options: Any) -> int:
    """The step that is loaded, bit-exact."""
    model: dict[str, Any] = {}
    with saver_of(rank, path, **options) as loader:
        step = int(loader.load(model=model))
    numbers = model["weight"].numel()
    assert all(value.equal(model[name]) for name, value in state(step, rank, numbers).items())
    return step
