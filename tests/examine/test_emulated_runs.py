"""What jobs of torch-xla's ZeRO-1 save, on emulated ranks, is examined without a finding."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest

import nxd_ckpt
from tests.support.rank_pool import RankPool
from tests.training import scenarios
from tests.training.model import OPTIMIZERS, Setup, Trainer

pytestmark = [pytest.mark.xla, pytest.mark.soak]

STEPS = (2, 1, 3, 10, 1, 20, 1, 2)
SIZES = ((("dp", 4),), (("dp", 2), ("tp", 2)), (("dp", 2), ("pp", 2)), (("dp", 4), ("ep", 2)))


def _run(rank: int, directory: str, setup: Setup) -> None:
    """A tag after each of STEPS, with a loader's place on each rank."""
    trainer = Trainer(rank, setup)
    for steps in STEPS:
        trainer.train(steps)
        content = {"loader": {"num_yielded": trainer.step_number}, "random": nxd_ckpt.capture_random_state()}
        scenarios.save(rank, directory, str(trainer.step_number), trainer, setup, rank_content=content)
    nxd_ckpt.close_checkpointers()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(f"{name}{size}" for name, size in sizes))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_emulated_runs_are_well(
    xla_ranks: RankPool, tmp_path: Path, optimizer: str, sizes: tuple[tuple[str, int], ...], dtype: str
) -> None:
    """Seven pairs of tags of each run: no finding."""
    xla_ranks.run(_run, str(tmp_path), Setup(sizes, dtype=dtype, optimizer=optimizer))
    opened = [nxd_ckpt.open_checkpoint(tmp_path, str(step)) for step in accumulate(STEPS)]
    for before, after in pairwise(opened):
        assert () == nxd_ckpt.examine_checkpoint(after, before=before).findings
