"""The run of :mod:`tests.training.schedules` on every rank of a pool, with torch-xla's own ZeRO-1."""

from __future__ import annotations

from typing import Any

import nxd_ckpt
from nxd_ckpt import Topology
from tests.adapters.doubles import NxDWrapper
from tests.training.model import zero1
from tests.training.schedules import SETTINGS, Groups, Kind, differences


def sharded(groups: Groups, topology: Topology) -> Any:
    return NxDWrapper(zero1(groups, topology, {**SETTINGS, "pin_layout": False, "save_master_weights": True}))


def all_differences(rank: int, directory: str, ep: int, schedulers: list[str]) -> list[str]:
    """What is not the same after a resume, with each scheduler."""
    import torch_xla

    topology, device = Topology(dp=4, ep=ep, rank=rank), torch_xla.device()
    found = [differences(Kind(sharded), name, directory, topology, device, torch_xla.sync) for name in schedulers]
    nxd_ckpt.close_checkpointers()
    return [problem for each in found for problem in each]
