"""Tensors whose memory is not what their shapes say: freed, cut short, expanded, or awaited by a backward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from nxd_ckpt import Checkpointer, dcp, load_checkpoint, save_checkpoint
from nxd_ckpt.errors import UnsupportedState
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusals


class Net(torch.nn.Module):
    """A layer, a buffer, and an AdamW that has made a step, with a tensor learning rate."""

    buffer: torch.Tensor

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.register_buffer("buffer", torch.full((64, 3), value))
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=torch.full((2,), 0.1)[0])
        self.layer(torch.ones(1, 64)).sum().backward()
        self.optimizer.step()


PLACES: dict[str, Callable[[Net], torch.Tensor]] = {
    "model/layer.weight": lambda net: net.layer.weight,
    "model/buffer": lambda net: net.buffer,
    "optim/layer.weight/exp_avg": lambda net: net.optimizer.state[net.layer.weight]["exp_avg"],
    "optim/layer.weight/step": lambda net: net.optimizer.state[net.layer.weight]["step"],
    "optim/param_groups/0/lr": lambda net: net.optimizer.param_groups[0]["lr"],
}


def cut(tensor: torch.Tensor, nbytes: int) -> None:
    tensor.untyped_storage().resize_(nbytes)


@pytest.mark.parametrize("nbytes", [0, 3])
@pytest.mark.parametrize("name", list(PLACES))
def test_freed_memory_is_refused_by_name_at_the_save(tmp_path: Path, name: str, nbytes: int) -> None:
    """At the first save and at later ones, when nothing but the memory has changed; the older tag stays."""
    net = Net()
    with Checkpointer(tmp_path / "first") as checkpointer, Checkpointer(tmp_path / "later") as later:
        later.save(1, net, net.optimizer)
        later.save(2, net, net.optimizer)
        cut(PLACES[name](net), nbytes)
        for one in (checkpointer, later):
            with pytest.raises(UnsupportedState, match=rf"{name}: its memory was freed or cut .* {nbytes} bytes"):
                one.save(3, net, net.optimizer)
        assert (None, 2) == (checkpointer.latest_step(), later.latest_step())


@pytest.mark.parametrize("part", ["scheduler", "user_content", "rank_content"])
def test_freed_memory_in_content_is_refused_by_name(tmp_path: Path, part: str) -> None:
    """Content is pickled with its tensors, which are read for that."""
    freed = torch.ones(100)
    cut(freed, 0)
    content: dict[str, Any] = {part: {"a": [freed]}}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UnsupportedState, match=rf"{part}/a/0: its memory was freed"):
            checkpointer.save(1, {"w": torch.ones(1)}, **content)
        assert checkpointer.latest_step() is None


@pytest.mark.parametrize("nbytes", [0, 3])
@pytest.mark.parametrize("name", list(PLACES))
def test_freed_memory_is_refused_by_name_at_the_load(tmp_path: Path, name: str, nbytes: int) -> None:
    """Before anything changes."""
    saved, live = Net(1.0), Net(2.0)
    save_checkpoint(tmp_path, "t", saved, saved.optimizer)
    before = live.layer.bias.detach().clone()
    cut(PLACES[name](live), nbytes)
    with pytest.raises(UnsupportedState, match=rf"{name}: its memory was freed or cut .* {nbytes} bytes"):
        load_checkpoint(tmp_path, "t", live, live.optimizer)
    assert torch.equal(before, live.layer.bias)


@pytest.mark.parametrize("nbytes", [0, 3])
def test_torch_dcp_refuses_freed_memory(tmp_path: Path, nbytes: int) -> None:
    """By our names of its functions, at the save and at the load."""
    dcp.save({"model": {"w": torch.ones(64)}}, checkpoint_id=tmp_path / "t")
    freed = torch.ones(64)
    cut(freed, nbytes)
    for call in (dcp.save, dcp.load):
        with pytest.raises(CheckpointException, match=r"model.w: its memory was freed"):
            call({"model": {"w": freed}}, checkpoint_id=tmp_path / ("t" if call is dcp.load else "u"))


def with_freed_memory(rank: int, directory: str) -> list[str]:
    """Save and load with a weight that was freed on rank 1 alone; return the errors, and what is left."""
    net = Net()
    with Checkpointer(directory, timeout=600.0) as checkpointer:
        checkpointer.save(1, net, net.optimizer)
        if rank:
            cut(net.layer.weight, 0)
        raised = refusals([lambda: checkpointer.save(2, net, net.optimizer), lambda: checkpointer.load(1, net)])
        return [*raised, str(checkpointer.latest_step())]


def test_freed_memory_of_one_rank_is_refused_on_all(pair: RankPool, tmp_path: Path) -> None:
    """At once, with the rank's name."""
    for raised in pair.run(with_freed_memory, str(tmp_path)):
        assert "1" == raised.pop()
        assert [True, True] == ["model/layer.weight: its memory was freed" in error for error in raised]


def expanded(value: float) -> torch.nn.Module:
    """A layer with a buffer of three equal rows, which are one in memory, and the row itself."""
    net = torch.nn.Linear(4, 4)
    row = torch.full((1, 4), value)
    row[0, 0] = float("nan")
    net.register_buffer("row", row)
    net.register_buffer("rows", row.expand(3, 4))
    return net


@pytest.mark.parametrize("verify", [True, "reading", False])
def test_an_expanded_buffer_comes_back(tmp_path: Path, verify: Any) -> None:
    """It stays expanded, of the memory that it shares with others, like a copy into each of its elements."""
    save_checkpoint(tmp_path, "t", expanded(1.0))
    live = expanded(2.0)
    load_checkpoint(tmp_path, "t", live, verify=verify)
    for name, tensor in expanded(1.0).named_buffers():
        assert torch.equal(tensor.nan_to_num(), live.get_buffer(name).nan_to_num())
    assert (0, 1) == live.get_buffer("rows").stride()
    assert live.get_buffer("row").data_ptr() == live.get_buffer("rows").data_ptr()


@pytest.mark.parametrize("verify", [True, "reading", False])
def test_rows_that_differ_are_not_put_into_an_expanded_buffer(tmp_path: Path, verify: Any) -> None:
    """One memory cannot hold them: refused by name, before anything changes."""
    saved, live = expanded(1.0), expanded(2.0)
    saved.register_buffer("rows", torch.arange(12.0).view(3, 4))
    save_checkpoint(tmp_path, "t", saved)
    before = {name: tensor.clone().nan_to_num() for name, tensor in live.state_dict().items()}
    with pytest.raises(UnsupportedState, match=r"model/rows is expanded .*load into a contiguous\(\) copy"):
        load_checkpoint(tmp_path, "t", live, verify=verify)
    assert all(torch.equal(tensor, live.state_dict()[name].nan_to_num()) for name, tensor in before.items())


def test_torch_dcp_loads_into_expanded_tensors(tmp_path: Path) -> None:
    """As a load of ours does; what differs is refused."""
    dcp.save({"model": {"w": torch.ones(1, 4).expand(3, 4)}}, checkpoint_id=tmp_path / "t")
    dcp.save({"model": {"w": torch.arange(12.0).view(3, 4)}}, checkpoint_id=tmp_path / "u")
    live = torch.zeros(1, 4).expand(3, 4)
    dcp.load({"model": {"w": live}}, checkpoint_id=tmp_path / "t")
    assert torch.equal(torch.ones(3, 4), live)
    with pytest.raises(CheckpointException, match=r"model.w is expanded"):
        dcp.load({"model": {"w": live}}, checkpoint_id=tmp_path / "u")
    assert torch.equal(torch.ones(3, 4), live)


def awaited_by(kind: str, net: Net) -> tuple[torch.Tensor, torch.Tensor]:
    """A result whose backward pass needs a tensor of the net, and that tensor."""
    if kind == "weight":
        return net.layer(torch.ones(1, 64, requires_grad=True)).sum(), net.layer.weight
    if kind == "buffer":
        return (torch.ones(3, requires_grad=True) * net.buffer).sum(), net.buffer
    moment = net.optimizer.state[net.layer.weight]["exp_avg"]
    return (torch.ones(64, requires_grad=True) * moment).sum(), moment


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["weight", "buffer", "moment"])
def test_a_load_between_forward_and_backward_is_noticed(tmp_path: Path, kind: str, transposed: bool) -> None:
    """By autograd, as ``copy_`` is: gradients of the old values with the new ones would be wrong.

    A transposed tensor is copied into, others are read into.
    """
    net = Net()
    save_checkpoint(tmp_path, "t", net, net.optimizer)
    if transposed:
        tensor = awaited_by(kind, net)[1]
        tensor.data = tensor.data.t().contiguous().t()
    result, tensor = awaited_by(kind, net)
    version = tensor._version
    load_checkpoint(tmp_path, "t", net, net.optimizer)
    assert tensor._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_a_dcp_load_between_forward_and_backward_is_noticed(tmp_path: Path) -> None:
    """As torch's own is."""
    live = {"w": torch.ones(64)}
    dcp.save({"model": live}, checkpoint_id=tmp_path / "t")
    result = (torch.ones(64, requires_grad=True) * live["w"]).sum()
    dcp.load({"model": live}, checkpoint_id=tmp_path / "t")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
