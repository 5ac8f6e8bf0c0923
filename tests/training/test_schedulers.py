"""Every kind of optimizer with every kind of scheduler: a resumed run steps with the same options, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

import nxd_ckpt
from nxd_ckpt import Topology
from tests.live.doubles import ExpertShardedOptimizer, NxDWrapper, ShardedOptimizer
from tests.support.rank_pool import RankPool
from tests.training import scheduled_ranks
from tests.training.schedules import SCHEDULERS, SETTINGS, Groups, Kind, differences

ALONE = [[0]]


def adamw(groups: Groups, topology: Topology) -> Any:
    return torch.optim.AdamW(groups, **SETTINGS)


def sgd(groups: Groups, topology: Topology) -> Any:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def zero1(groups: Groups, topology: Topology) -> Any:
    return ShardedOptimizer(groups, 0, ALONE, save_master_weights=True, **SETTINGS)


def expert_zero1(groups: Groups, topology: Topology) -> Any:
    return ExpertShardedOptimizer(groups, 0, ALONE, ALONE, **SETTINGS)


def wrapped(make: Any) -> Any:
    return lambda groups, topology: NxDWrapper(make(groups, topology))


KINDS = {
    "torch": Kind(adamw),
    "torch SGD": Kind(sgd),
    "dict": Kind(adamw, as_dict=True),
    "ZeRO-1": Kind(zero1),
    "expert ZeRO-1": Kind(expert_zero1),
    "NxD's wrapper of torch": Kind(wrapped(adamw)),
    "NxD's wrapper of ZeRO-1": Kind(wrapped(zero1)),
    "NxD's wrapper of expert ZeRO-1": Kind(wrapped(expert_zero1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_steps_as_the_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    """Losses, learning rates and momenta of all param groups are equal to the last bit.

    With every scheduler, and with every third one if the optimizer is wrapped.
    """
    schedulers = list(SCHEDULERS)[:: 3 if kind.startswith("NxD") else 1]
    found = [differences(KINDS[kind], scheduler, str(tmp_path)) for scheduler in schedulers]
    nxd_ckpt.close_checkpointers()
    assert [] == [each for one in found for each in one]


@pytest.mark.xla
@pytest.mark.parametrize("beside_dict", [False, True], ids=["model", "its state dict"])
def test_shards_that_are_made_late(xla_ranks: RankPool, tmp_path: Path, beside_dict: bool) -> None:
    """``lazy_init``: the model loads before ``init_zero()``, the optimizer after, and goes on to the last bit."""
    assert [[]] * 4 == xla_ranks.run(scheduled_ranks.lazy_differences, str(tmp_path), beside_dict)
