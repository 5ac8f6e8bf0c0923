"""Replicas that are not alike are named once, and keep their values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer, Topology, load_checkpoint, open_checkpoint
from nxd_ckpt.errors import CheckpointError, RanksDisagree
from tests.support.logged import logged
from tests.support.rank_pool import RankPool


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 8)
        self.table = torch.nn.Embedding(300, 1000)  # more than 1 MiB: samples of it are compared
        self.register_buffer("seen", torch.zeros(2))


def warnings_of(rank: int, directory: Path, what: str) -> list[str]:
    """What is logged on this rank by two saves of objects of which ``what`` differs on rank 2; and by a full check."""
    model = Net()
    if what.startswith("fsdp"):
        fully_shard(model.linear, mesh=init_device_mesh("cpu", (4,)))
    if what.startswith("hsdp"):
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 2 and what.endswith("buffer"):
        model.get_buffer("seen").add_(1)
    if rank == 2 and what == "one number":
        model.table.weight.data[100, 7].add_(1)
    if rank == 2 and what == "hsdp, shard":
        sharded: Any = model.linear.bias.data
        sharded.to_local().add_(1)
    if rank == 2 and what == "rate":
        optimizer.param_groups[0]["lr"] = 0.2
    if rank == 2 and what == "parameter":
        model.linear.bias.data.add_(1)
    with logged() as messages, Checkpointer(directory / what.replace(" ", "-")) as checkpointer:
        for step in range(2):
            checkpointer.save(f"step_{step}", model, optimizer)
        try:
            checkpointer.check_replicas(model, optimizer)
        except RanksDisagree as error:
            messages.append(f"check: {error}")
    return [message for message in messages if "count as replicas" in message]


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("fsdp, buffer", "model/seen"),
        ("parameter", "model/linear.bias"),
        ("one number", "model/table.weight"),  # of which samples alone would not tell
        ("hsdp, shard", "model/linear.bias"),
        ("rate", "optim/param_groups/0/lr"),
        ("hsdp, nothing", None),
        ("fsdp, nothing", None),
    ],
)
def test_what_differs_is_named_once(gloo_ranks: RankPool, tmp_path: Path, what: str, name: str | None) -> None:
    """On rank 0, with the two ranks and what to do; and nothing where replicas are alike."""
    first, *others = gloo_ranks.run(warnings_of, tmp_path, what)
    if name is None:
        assert [[]] * 4 == [first, *others]
    else:
        text = f"ranks 0 and 2 count as replicas, and differ in {name}"
        message, checked = first
        assert f"{text}. From now on each rank's own are saved" in message
        assert checked.startswith(f"check: {text}: ")
        assert [[checked.replace("check: ", "check: on rank 0: ")]] * 3 == others


def warnings_of_shares(rank: int, directory: Path) -> list[str]:
    """What is logged on this rank by a save whose tensors are written by several ranks; all of rank 2's differ."""
    model = Net()
    if rank == 2:
        for parameter in model.parameters():
            parameter.data.add_(1)
    with logged() as messages, Checkpointer(directory) as checkpointer:
        checkpointer.save("step_0", model, use_xser=True)
    return [message for message in messages if "count as replicas" in message]


def test_two_ranks_are_named(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 writes some of the tensors, and has other values than rank 2 of those that this one writes."""
    (message,), *_ = gloo_ranks.run(warnings_of_shares, tmp_path)
    assert "ranks 2 and 0 count as replicas, and differ in model/" in message


def test_a_rank_without_others_cannot_check(tmp_path: Path) -> None:
    """A single process has nothing to compare; one of several without a process group is told what is needed."""
    model = Net()
    Checkpointer(tmp_path).check_replicas(model)
    with pytest.raises(CheckpointError, match=r"check_replicas\(\) needs torch.distributed to be initialised"):
        Checkpointer(tmp_path, topology=Topology(dp=2), run_id="r").check_replicas(model)


def normed(rank: int, directory: Path, kind: str) -> tuple[list[float], list[float], int]:
    """The running mean of a module under DDP as it was saved and as it came back, and the number of warnings."""
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.BatchNorm1d(1, affine=True),
        broadcast_buffers=kind != "of each rank",
        process_group=pairs[rank // 2] if kind == "of a pair" else None,
    )
    mean = model.module.get_buffer("running_mean")
    passed = model.module if kind == f"bare on rank {rank}" else model
    with logged() as messages, Checkpointer(directory) as checkpointer:
        for step in range(3):
            model(torch.full((2, 1), float(rank + step))).sum().backward()
            use_xser = kind == "written by all"
            checkpointer.save(step, {"named": passed} if step else passed, async_save=step == 2, use_xser=use_xser)
        saved = mean.tolist()
        mean.zero_()
        checkpointer.load(2, {"named": passed})
    return saved, mean.tolist(), len([each for each in messages if "count as replicas" in each])


@pytest.mark.parametrize(
    "kind", ["of the job", "of a pair", "of each rank", "written by all", "bare on rank 0", "bare on rank 1"]
)
def test_buffers_that_ddp_broadcasts_are_those_of_its_first_rank(
    gloo_ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """They differ after each step, and DDP gives rank 0's to all before the next; so they go to any number of ranks."""
    answers = gloo_ranks.run(normed, tmp_path, kind)
    first = answers[0][0]
    if kind in ("written by all", "bare on rank 0", "bare on rank 1"):
        assert all(first == loaded for at, (_, loaded, _) in enumerate(answers) if kind != f"bare on rank {at}")
        return
    if kind != "of the job":
        assert [loaded for _, loaded, _ in answers] == [saved for saved, _, _ in answers] != [first] * 4
        return
    assert [(first, 0)] * 4 == [(loaded, warnings) for _, loaded, warnings in answers]
    alone = torch.nn.BatchNorm1d(1)
    load_checkpoint(tmp_path, "step_2", {"named": alone}, topology=Topology())
    assert first == alone.get_buffer("running_mean").tolist() != answers[1][0]


def normed_shards(rank: int, directory: Path) -> list[float]:
    """The running mean of a module of FSDP2, which broadcasts no buffers, on this rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    model(torch.randn(8, 4) + rank)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model)
    mean: list[float] = model[1].get_buffer("running_mean").tolist()
    return mean


def test_buffers_of_fsdp2_are_each_ranks_and_go_elsewhere_by_what_the_error_says(
    gloo_ranks: RankPool, tmp_path: Path
) -> None:
    """It said how to leave them out, which trains on from those of a fresh model, and not how to get a rank's."""
    means = gloo_ranks.run(normed_shards, tmp_path)
    alone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    names = ["model/1.running_mean", "model/1.running_var"]
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=r"model_state\(rank\) has that rank's") as error:
            checkpointer.load(1, alone)
        assert f"ignore_keys={names}" in str(error.value)
        checkpointer.load(1, alone, ignore_keys=names)
    state = open_checkpoint(tmp_path).model_state(2)
    alone.load_state_dict({name.removeprefix("model/"): state[name.removeprefix("model/")] for name in names}, False)
    assert means[2] == alone[1].get_buffer("running_mean").tolist() != means[0]
