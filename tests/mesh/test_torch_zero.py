"""torch's ZeroRedundancyOptimizer, whose ranks step parameters of their own: resumed, it goes on."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.errors import OptimizerMismatch, UnsupportedState
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing import ResumeDiffers, check_resume
from tests.support.rank_pool import RankPool


def made() -> Any:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(5)), torch.nn.Linear(3, 1))
    )
    groups = [{"params": list(model.module[:3].parameters())}, {"params": list(model.module[3:].parameters())}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def step(model: Any, optimizer: Any, scheduler: Any) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(2, 3)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return float(loss)


def local_state(model: Any, optimizer: Any, scheduler: Any) -> Any:
    """What this rank steps with: its part of the state, and the options of all groups."""
    return optimizer.optim.state_dict()["state"], [group["lr"] for group in optimizer.param_groups]


def resumed(rank: int, directory: Path) -> str:
    """The difference that a resume makes on this rank, of its own state too; and what other sizes are told."""
    try:
        check_resume(made, step, new_process=False, save=_save, load=_load)
    except ResumeDiffers as error:
        return str(error)
    objects = made()
    step(*objects)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("t", *objects)
    fresh = made()
    with Checkpointer(directory) as checkpointer:
        checkpointer.load("t", *fresh)
    for one, other in zip(_flat(local_state(*objects)), _flat(local_state(*fresh)), strict=True):
        if not torch.equal(torch.as_tensor(one), torch.as_tensor(other)):
            return f"expected {one}, found {other}"
    try:
        Checkpointer(directory, topology=Topology()).load("t", *made())
    except OptimizerMismatch as error:
        return "" if "load it on the sizes that it was saved on" in str(error) else str(error)
    return "loaded on one rank"


def _save(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(tag, *objects, async_save=True)


def _load(directory: str, tag: str, *objects: Any) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(tag, *objects)


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _flat(value)]
    return [leaf for value in tree for leaf in _flat(value)] if isinstance(tree, (list, tuple)) else [tree]


def test_each_rank_has_its_part_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """State and learning rates, into fresh objects; on other sizes it is refused."""
    assert [""] * 4 == gloo_ranks.run(resumed, tmp_path)
    assert () == verify_checkpoint(tmp_path).problems


def overlapping(rank: int, directory: Path) -> str:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
    try:
        with Checkpointer(directory) as checkpointer:
            checkpointer.save("t", model, optimizer)
    except UnsupportedState as error:
        return str(error)
    return ""


def test_steps_in_the_backward_pass_are_refused(gloo_ranks: RankPool, tmp_path: Path) -> None:
    assert all("overlap_with_ddp=True" in message for message in gloo_ranks.run(overlapping, tmp_path))
