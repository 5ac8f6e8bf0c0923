"""Tools look at what ranks saved for themselves, too: the tensors of an adapter, a clone or a shard of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, examine_checkpoint, open_checkpoint
from nxd_ckpt.cli.inspection import View, inspection
from tests.support.rank_pool import RankPool


def saved(rank: int, directory: Path, on_mesh: bool) -> None:
    """A model with an adapter of rank 1, whose bias and moments have a NaN, and a buffer that is the ranks' own."""
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"first": nn.Linear(4, 4)})
    model.register_buffer("seen", torch.full((2,), float("inf") if rank == 2 else rank))
    if on_mesh:
        fully_shard(model["first"], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if rank == 1:
        model["adapter"] = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for name, one in model.named_parameters():
        one.grad = torch.full_like(one, float("nan") if name == "adapter.bias" else 1.0)
    optimizer.step()
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model, optimizer)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_each_ranks_own_tensors_are_examined_and_listed(gloo_ranks: RankPool, tmp_path: Path, on_mesh: bool) -> None:
    """Of a rank's NaN nothing was said, and its tensors were rank 0's in the list."""
    gloo_ranks.run(saved, tmp_path, on_mesh)
    examination = examine_checkpoint(open_checkpoint(tmp_path))
    assert {
        "model/adapter.bias of rank 1", "optim/adapter.bias/momentum_buffer of rank 1", "model/seen of rank 2"
    } == {finding.what for finding in examination.findings}  # fmt: skip
    assert not examination.problems
    found = [inspection(str(tmp_path), None, View(rank, "*")) for rank in range(3)]
    assert [[]] * 3 == [each["problems"] for each in found]
    assert {"optim", "model/adapter.bias", "model/adapter.weight", "model/seen"} == {*found[0]["per_rank"]}
    assert [2, 4, 2] == [each["optimizer"]["parameters"] for each in found]
    listed = [{tensor["name"]: tensor["file"] for tensor in each["tensors"]} for each in found]
    alike = {"first.weight", "first.bias"}
    assert [alike | {"seen"}, alike | {"seen", "adapter.weight", "adapter.bias"}] == [
        {name.removeprefix("model/") for name in each if name.startswith("model/")} for each in listed[:2]
    ]
    entry = "optim/adapter.bias/momentum_buffer"
    assert [False, True, False] == [entry in each for each in listed]
    assert listed[1]["model/seen"].startswith("rank_state/rank_00001")
    assert listed[1][entry].startswith("rank_state/rank_00001")
    assert not listed[0]["model/seen"].startswith("rank_state/")
