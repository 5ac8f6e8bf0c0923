"""What a rank does with nxd_ckpt.dcp: the calls of a script that was written for torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nxd_ckpt import dcp
from tests.bad_input.live import Net
from tests.torch_dcp.coded import Coded, blank, coded
from tests.torch_dcp.ranks import gathered, picture, training
from tests.torch_dcp.writing import fsdp2_job


class Application:
    """Model and optimizer as one Stateful object, as in torch's tutorial."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def told(error: CheckpointException) -> str:
    return "; ".join(str(problem) for problem, _ in error.failures.values())


def resumed(rank: int, directory: Path, how: str) -> bool:
    """FSDP2 saves, trains on, and another job resumes; whether that is what was saved."""
    model, optimizer = fsdp2_job()
    before = picture(model, optimizer)
    state = {"app": Application(model, optimizer), "step": 7}
    if how == "save":
        dcp.save(state, checkpoint_id=directory / how)
    else:
        group: Any = dist.new_group(backend="gloo")
        kind = AsyncCheckpointerType.THREAD if how == "thread" else AsyncCheckpointerType.PROCESS
        future = dcp.async_save(state, checkpoint_id=directory / how, process_group=group, async_checkpointer_type=kind)
        training(model, optimizer)
        metadata = future.result()
        assert "app.model.up.weight" in metadata.state_dict_metadata
    other, fresh = fsdp2_job(lr=9.0, seed=4)
    found: dict[str, Any] = {"app": Application(other, fresh), "step": 0}
    dcp.load(found, checkpoint_id=directory / how)
    return picture(other, fresh) == before and found["step"] == 7


def halves(rank: int, directory: Path) -> list[float]:
    """Each rank is a group of its own; both save at a time."""
    groups: Any = [dist.new_group([number]) for number in range(dist.get_world_size())]
    place = directory / str(rank) / "step_1"
    dcp.save({"model": {"w": torch.full((3,), float(rank))}}, checkpoint_id=place, process_group=groups[rank])
    state = {"model": {"w": torch.zeros(3)}}
    dcp.load(state, checkpoint_id=place, process_group=groups[rank])
    return state["model"]["w"].tolist()


def onto_meta(rank: int, directory: Path) -> bool:
    """A model on the meta device takes what was saved, sharded: into memory of anything, or none."""
    model, _ = fsdp2_job()
    dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "full")
    found = []
    for has_memory in (True, False):
        with torch.device("meta"):
            other = Net()
        fully_shard(other, mesh=init_device_mesh("cpu", (2,)))
        if has_memory:
            other.to_empty(device="cpu")
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=directory / "full")
        other.load_state_dict(state["model"], assign=not has_memory)
        found.append(gathered(other.state_dict()))
    return found == [gathered(model.state_dict())] * 2


def sharded_codes(rank: int, directory: Path) -> list[Any]:
    """What a low-bit optimizer keeps of a shard is each rank's own: back on the same mesh, refused on another."""
    mesh = init_device_mesh("cpu", (2,))
    own = coded(3 - rank, start=10 * rank + 1)
    moment = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,))
    state: dict[str, Any] = {
        "model": {"w": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])},
        "optim": {"state": {"w": {"exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
    }
    dcp.save(state, checkpoint_id=directory / "codes")
    target = DTensor.from_local(blank(3 - rank), mesh, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,))
    found: dict[str, Any] = {
        "model": {"w": distribute_tensor(torch.zeros(5), mesh, [Shard(0)])},
        "optim": {"state": {"w": {"exp_avg": target}}, "param_groups": [{"lr": 0.0, "params": []}]},
    }
    dcp.load(found, checkpoint_id=directory / "codes")
    local = found["optim"]["state"]["w"]["exp_avg"].to_local()
    assert isinstance(local, Coded)
    alone = {"optim": {"state": {"w": {"exp_avg": torch.zeros(5)}}}}
    try:
        dcp.load(alone, checkpoint_id=directory / "codes")
    except CheckpointException as error:
        return [local.codes.tolist(), float(local.scale), told(error)]
    return []


def refused_on_one(rank: int, directory: Path) -> str:
    """Rank 1 has a tensor of another class than was saved: what both are told."""
    if rank == 0:
        dcp.save({"model": {"w": coded()}}, checkpoint_id=directory / "one", no_dist=True)
    dist.barrier()
    state: dict[str, Any] = {"model": {"w": blank(4) if rank == 0 else blank(5)}}
    try:
        dcp.load(state, checkpoint_id=directory / "one")
    except CheckpointException as error:
        return told(error)
    return "nothing"


def of_two_saves(rank: int, directory: Path) -> tuple[str, list[float]]:
    """Rank 1 sees an older tag as the newest: what both are told, and what they have then."""
    for step in range(2):
        dcp.save({"model": {"w": torch.full((3,), float(step))}}, checkpoint_id=directory / f"step_{step}")
    state = {"model": {"w": torch.full((3,), 7.0)}}
    try:
        dcp.load(state, checkpoint_id=directory / f"step_{1 - rank}")
    except CheckpointException as error:
        return told(error), state["model"]["w"].tolist()
    return "nothing", state["model"]["w"].tolist()
