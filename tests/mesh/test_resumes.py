"""What proves a resume holds for jobs of FSDP2, too: the probe right after a load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from nxd_ckpt import Checkpointer, ResumeProbe, open_checkpoint
from tests.mesh import jobs
from tests.support.rank_pool import RankPool


def _probed(rank: int, directory: Path, saved: str, live: str) -> list[list[tuple[str, str]]]:
    """What the probe finds on this rank after a load, and once a bit of its first weight is changed."""
    model, optimizer = jobs.trained(saved)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("step_1", model, optimizer)
    model = jobs.JOBS[live](1)
    optimizer = jobs.adamw(model)
    found = []
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(None, model, optimizer)
    tag = open_checkpoint(directory)
    found.append(ResumeProbe().check(tag, model, optimizer))
    locals_of = (one.to_local() for one in model.parameters() if isinstance(one, DTensor))
    weight = next(one for one in locals_of if one.numel())
    with torch.no_grad():
        weight.view(-1).view(torch.int32)[0] ^= 1
    found.append(ResumeProbe().check(tag, model, optimizer))
    return [[(one.kind, one.what) for one in each.findings] for each in found]


@pytest.mark.parametrize(
    ("saved", "live"), [("fsdp", "fsdp x tp"), pytest.param("hsdp", "hsdp", marks=pytest.mark.soak)]
)
def test_a_resume_is_proved_on_every_rank(gloo_ranks: RankPool, tmp_path: Path, saved: str, live: str) -> None:
    """On the mesh of the save and another one; a bit that changed is named by the rank that holds it."""
    for right, wrong in gloo_ranks.run(_probed, tmp_path, saved, live):
        assert [] == right
        assert {"weights"} == {kind for kind, _ in wrong}
