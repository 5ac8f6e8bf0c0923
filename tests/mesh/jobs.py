"""Jobs of FSDP2 and tensor parallelism on gloo ranks: a small model on meshes of many kinds, saved and loaded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nxd_ckpt import Checkpointer


class Block(nn.Module):
    def __init__(self, width: int = 6, wide: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """9 x 6 embeddings do not divide by 2 or 4 equally; the head is tied to them."""

    steps: torch.Tensor

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        if stage in (None, 0):
            self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(2) if stage in (None, number)})
        if stage is None:
            self.head = nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.embed(x) if hasattr(self, "embed") else nn.functional.one_hot(x % 6, 6).float()
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


def net(stage: int | None = None, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(stage)


def tensor_parallel(model: Net, mesh: DeviceMesh) -> None:
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sharded(model: Net, mesh: DeviceMesh, **options: Any) -> None:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _plain(seed: int) -> Net:
    return net(seed=seed)


def _fsdp(seed: int) -> Net:
    model = net(seed=seed)
    sharded(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)))
    return model


def _tp(seed: int) -> Net:
    """Tensor parallelism alone: norms and embeddings stay plain tensors."""
    model = net(seed=seed)
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))["tp"])
    return model


def _fsdp_tp(seed: int) -> Net:
    model = net(seed=seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    tensor_parallel(model, mesh["tp"])
    sharded(model, mesh["fsdp"])
    return model


def _hsdp(seed: int) -> Net:
    model = net(seed=seed)
    sharded(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")))
    return model


def _hsdp_tp(seed: int) -> Net:
    model = net(seed=seed)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 4, 2), mesh_dim_names=("replicate", "shard", "tp"))
    tensor_parallel(model, mesh["tp"])
    sharded(model, mesh["replicate", "shard"])
    return model


def _unsharded_fsdp(seed: int) -> Net:
    """Parameters stay whole after a forward pass without a backward one."""
    model = net(seed=seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    sharded(model, mesh, reshard_after_forward=False)
    return model


def _pipeline(seed: int) -> Net:
    """Two stages, each on an FSDP mesh of its own."""
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("pp", "fsdp"))
    model = net(stage=mesh.get_local_rank("pp"), seed=seed)
    sharded(model, mesh["fsdp"])
    return model


JOBS: Mapping[str, Callable[[int], Net]] = {
    "plain": _plain,
    "fsdp": _fsdp,
    "tp": _tp,
    "fsdp x tp": _fsdp_tp,
    "hsdp": _hsdp,
    "hsdp x tp": _hsdp_tp,
    "unsharded fsdp": _unsharded_fsdp,
    "pp x fsdp": _pipeline,
}


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Two param groups, of which one has other options."""
    named = list(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named if "norm" not in name], "lr": 0.1},
        {"params": [parameter for name, parameter in named if "norm" in name], "lr": 0.05, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(torch.arange(4) + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch itself gathers of model and optimizer, on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found: dict[str, Any] = {
        f"model/{name}": value for name, value in get_model_state_dict(model, options=options).items()
    }
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    for name, entries in state.get("state", {}).items():
        found |= {f"optim/{name}/{entry}": value for entry, value in entries.items()}
    groups = [dict(sorted(group.items())) for group in state.get("param_groups", ())]
    return {**dict(sorted(found.items())), "param_groups": groups}


def trained(name: str, seed: int = 0, **options: Any) -> tuple[Net, torch.optim.AdamW]:
    model = JOBS[name](seed)
    optimizer = adamw(model, **options)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.arange(3))  # an evaluation: FSDP may leave parameters unsharded
    return model, optimizer


def save(rank: int, directory: Path, name: str, tag: str = "step_1") -> dict[str, Any]:
    """Train a job and save it; what torch gathers of it."""
    model, optimizer = trained(name)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(tag, model, optimizer, user_content={"job": name}, rank_content={"rank": rank})
    return whole_state(model, optimizer)


def load(rank: int, directory: Path, name: str) -> dict[str, Any]:
    """Load into a fresh job, without state of its optimizer; what torch gathers of it then, and a step later."""
    model = JOBS[name](1)
    optimizer = adamw(model)
    with torch.no_grad():
        model(torch.arange(3))
    with Checkpointer(directory) as checkpointer:
        checkpointer.load(None, model, optimizer)
    return whole_state(model, optimizer)


def stage_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer of this rank's stage, put together by the ranks that hold it."""
    found: dict[str, Any] = {f"model/{name}": whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        found |= {f"optim/{name}/{entry}": whole(value) for entry, value in state.items()}
    groups = optimizer.param_groups
    return {**found, "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups]}


def local(tensor: Any) -> torch.Tensor:
    """What this rank holds of it."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def whole(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().clone()


def pipeline(rank: int, directory: Path, tag: str, load: bool = False) -> dict[str, Any]:
    """Train two stages and save them, or load them anew; what each stage holds."""
    model = JOBS["pp x fsdp"](int(load))
    optimizer = adamw(model)
    if not load:
        inputs = torch.arange(4)
        for _ in range(2):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with Checkpointer(directory) as checkpointer:
        if load:
            checkpointer.load(tag, model, optimizer)
        else:
            checkpointer.save(tag, model, optimizer)
    return stage_state(model, optimizer)
