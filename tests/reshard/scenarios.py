"""What the ranks of a job do that goes on from the checkpoint of another. Run on every rank of a pool."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import nxd_ckpt
from tests.reshard.job import Trainer
from tests.reshard.ranks import fresh, load_rank
from tests.reshard.whole import Layout, Weight
from tests.tag.equality import difference
from tests.training import scenarios
from tests.training.model import Setup


@dataclass(frozen=True)
class Leg:
    """One job of a chain: its setup, the tag that it starts from (None: anew), the one that it saves.

    ``share_reads`` as in ``load_checkpoint``.
    """

    setup: Setup
    start: str | None
    save: str
    share_reads: bool | None = None


@dataclass(frozen=True)
class Outcome:
    """What a rank held at its save, and the losses of the steps after it."""

    held: dict[str, Any]
    losses: list[float]


def run(rank: int, directory: str, leg: Leg, steps: int) -> Outcome | None:
    """Start, save, train on. None on ranks that this job does not have."""
    if rank >= leg.setup.topology(0).world_size:
        return None
    if leg.start is None:
        trainer = Trainer(rank, leg.setup)
        trainer.train(2)
    else:
        trainer = Trainer(rank, leg.setup, shift=0.25)
        trainer.train(1)
        scenarios.load(directory, leg.start, cast("Any", trainer), share_reads=leg.share_reads)
    held = trainer.held()
    # With fewer ranks than processes there is no process group of just these ranks: a run_id joins them.
    scenarios.save(rank, directory, leg.save, cast("Any", trainer), leg.setup, run_id=leg.save)
    losses = trainer.train(steps)
    nxd_ckpt.finalize_checkpoint()
    nxd_ckpt.close_checkpointers()
    return Outcome(held, losses)


def refused(rank: int, directory: str, weights: list[Weight], layout: Layout) -> tuple[str, str | None]:
    """The class of the error that a load raises on this rank, and what it changed here (None: nothing)."""
    live = fresh(weights, layout, layout.topology.at(rank))
    before = live.held()
    try:
        load_rank(Path(directory), live, timeout=600.0)
    except nxd_ckpt.errors.CheckpointError as error:
        return type(error).__name__, difference(before, live.held())
    return "nothing raised", None
