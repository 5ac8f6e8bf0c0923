"""What each of two ranks does with torch DCP: loading a tag into DTensors, into FSDP2, and back from conversions."""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from tests.bad_input.live import Net
from tests.cli.checkpoints import CUTS, whole

NAMES = [name for name in CUTS if name != "lost"]


def placements(rank: int, directory: Path) -> list[str]:
    """Load every tensor of the tag ``cut`` into DTensors of every placement; the names of those that came out wrong."""
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for placement, dtype in itertools.product((Shard(0), Shard(1), Replicate()), (torch.float32, torch.bfloat16)):
        tensors = {name: whole(name) for name in NAMES if placement != Shard(1) or whole(name).dim() > 1}
        state = {
            name: zeros(*tensor.shape, dtype=dtype, device_mesh=mesh, placements=[placement])
            for name, tensor in tensors.items()
        }
        load({"model": state}, storage_reader=StorageReader(directory / "cut"))
        for name, tensor in tensors.items():
            expected = distribute_tensor(tensor.to(dtype), mesh, [placement]).to_local()
            if not torch.equal(expected, state[name].to_local()):
                wrong.append(f"{name} as {placement} {dtype}")
    return wrong


def training(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
    optimizer.step()


def fsdp2(rank: int, directory: Path, tag: str, flat: bool) -> dict[str, Any]:
    """Resume a tag under FSDP2 and train on: the whole model and optimizer, before and after."""
    mesh = init_device_mesh("cpu", (2,))
    model = Net()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=9.0)
    resume(StorageReader(directory / tag), model, optimizer, flat)
    before = picture(model, optimizer)
    training(model, optimizer)
    return {"before": before, "after": picture(model, optimizer)}


def resume(reader: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, flat: bool = False) -> None:
    """As torch's tutorial has it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model, options=options),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    load(state, storage_reader=reader)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)


def picture(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer, gathered, by name."""
    state: dict[str, Any] = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    for group in state["optim"]["param_groups"]:
        group.pop("initial_lr", None)  # of a scheduler, which is not everywhere
    return gathered(state)


def gathered(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().tolist()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: gathered(child) for key, child in value.items()}
    return [gathered(child) for child in value] if isinstance(value, (list, tuple)) else value


def save_fsdp2(rank: int, directory: Path) -> dict[str, Any]:
    """Train under FSDP2 and save with torch's own writer; the whole model and optimizer."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    model = Net()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    training(model, optimizer)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "note": "hi",
        "steps": 5,
    }
    save(state, checkpoint_id=directory)
    return picture(model, optimizer)
