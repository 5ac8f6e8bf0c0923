"""What the doctor says of tags of FSDP2: nothing of a run that goes on, a problem of weights that were not saved."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, examine_checkpoint, open_checkpoint
from tests.mesh import jobs
from tests.support.rank_pool import RankPool


def _save_all(rank: int, directory: Path) -> None:
    """Save a tag, the right one after three more steps, and one that has the weights of before."""
    torch.manual_seed(0)
    layers = [nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.Linear(12, 12)]
    model = nn.Sequential(*layers)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    with Checkpointer(directory, durable=False) as saver:
        was: dict[str, torch.Tensor] = {}
        for step in range(1, 14):
            inputs = torch.randn(8, 12)
            (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step in (10, 13):
                saver.save("before" if step == 10 else "after", model, optimizer, scheduler)
            if step == 10:
                was = {name: jobs.local(value).clone() for name, value in model.state_dict().items()}
        for name, value in model.state_dict().items():
            jobs.local(value).detach().copy_(was[name])
        saver.save("weights_of_before", model, optimizer, scheduler)


def test_weights_that_were_not_saved_again_are_a_problem(gloo_ranks: RankPool, tmp_path: Path) -> None:
    gloo_ranks.run(_save_all, tmp_path)
    before, after, stale = (open_checkpoint(tmp_path, tag) for tag in ("before", "after", "weights_of_before"))
    assert () == examine_checkpoint(after, before=before).findings
    findings = examine_checkpoint(stale, before=before).findings
    assert [("problem", "weights", "model")] == [(one.severity, one.kind, one.what) for one in findings]
