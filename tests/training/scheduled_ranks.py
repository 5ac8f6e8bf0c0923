"""A run of :mod:`tests.training.schedules` on every rank of a pool, with torch-xla's own ZeRO-1, made late."""

import nxd_ckpt
from nxd_ckpt import Topology
from nxd_ckpt.errors import InvalidArgument
from tests.training.model import zero1
from tests.training.schedules import SETTINGS, Kind, Run


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
    content = nxd_ckpt.load_checkpoint(directory, "t", model, resumed.optimizer, resumed.scheduler, topology=topology)
    resumed.step_number = content["step"]
    actual = resumed.train(3, torch_xla.sync)
    nxd_ckpt.close_checkpointers()
    return problems if actual == expected else [*problems, f"expected {expected}, found {actual}"]
