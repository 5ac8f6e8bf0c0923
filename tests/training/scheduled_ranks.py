"""The run of :mod:`tests.training.schedules` on every rank of a pool, with torch-xla's own ZeRO-1."""

from __future__ import annotations

from typing import Any

import nxd_ckpt
from nxd_ckpt import Topology
from nxd_ckpt.errors import InvalidArgument
from tests.live.doubles import NxDWrapper
from tests.training.model import zero1
from tests.training.schedules import SETTINGS, Groups, Kind, Run, differences


def sharded(groups: Groups, topology: Topology) -> Any:
    return NxDWrapper(zero1(groups, topology, {**SETTINGS, "pin_layout": False, "save_master_weights": True}))


def all_differences(rank: int, directory: str, ep: int, schedulers: list[str]) -> list[str]:
    """What is not the same after a resume, with each scheduler."""
    import torch_xla

    topology, device = Topology(dp=4, ep=ep, rank=rank), torch_xla.device()
    found = [differences(Kind(sharded), name, directory, topology, device, torch_xla.sync) for name in schedulers]
    nxd_ckpt.close_checkpointers()
    return [problem for each in found for problem in each]


def lazy_differences(rank: int, directory: str, beside_dict: bool) -> list[str]:
    """As a run whose shards are made late: refused before, and after a load of the model alone the same run."""
    import torch_xla

    topology, device = Topology(dp=4, rank=rank), torch_xla.device()
    settings = {**SETTINGS, "pin_layout": False}
    run = Run(Kind(lambda groups, at: zero1(groups, at, settings)), "StepLR", topology, device)
    run.train(2, torch_xla.sync)
    run.save(directory, "t")
    expected = run.train(3, torch_xla.sync)
    late = Kind(lambda groups, at: zero1(groups, at, {**settings, "lazy_init": True}))
    resumed = Run(late, "StepLR", topology, device, shift=1.0)
    problems = []
    try:
        resumed.load(directory, "t")
        problems.append("a load before init_zero() was not refused")
    except InvalidArgument as error:
        if "init_zero()" not in str(error):
            problems.append(str(error))
    nxd_ckpt.load_checkpoint(directory, "t", resumed.model, topology=topology)
    resumed.optimizer.init_zero()
    model = resumed.model.state_dict() if beside_dict else resumed.model
    content = nxd_ckpt.load_checkpoint(
        directory, "t", model, resumed.optimizer, resumed.scheduler, topology=topology
    )
    resumed.step_number = content["step"]
    actual = resumed.train(3, torch_xla.sync)
    nxd_ckpt.close_checkpointers()
    return problems if actual == expected else [*problems, f"expected {expected}, found {actual}"]
