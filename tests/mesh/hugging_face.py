"""Models of Hugging Face's names on meshes: loaded from a directory, saved, and what they hold, put together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.placement_types import Placement

from nxd_ckpt import Checkpointer
from tests.hugging_face.saved import live
from tests.mesh import jobs
from tests.support.refusals import refusal

State = Mapping[str, torch.Tensor]


def sharded(state: State) -> torch.nn.Module:
    """FSDP2 on all ranks, which cuts some dimensions unevenly."""
    model = live(dict(state))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def crossed(state: State) -> torch.nn.Module:
    """Matrices cut along both dimensions of a 2 x 2 mesh, norms plain on each rank; bfloat16."""
    mesh, model = init_device_mesh("cpu", (2, 2)), live(dict(state), dtype=torch.bfloat16)
    placements: Sequence[Placement] = (Shard(1), Shard(0))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 2:
                placed = distribute_tensor(parameter.detach(), mesh, placements)
                module.register_parameter(name, torch.nn.Parameter(placed))
    return model


def staged(state: State) -> torch.nn.Module:
    """Two pipeline stages, each on an FSDP mesh of its own; the second has the norm and the head."""
    half = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("pp", "fsdp"))
    stage = mesh.get_local_rank("pp")
    first = ("model.embed_tokens", "model.layers.0.")
    model = live({name: value for name, value in state.items() if name.startswith(first) == (stage == 0)})
    fully_shard(model, mesh=mesh["fsdp"])
    return model


JOBS = {"sharded": sharded, "crossed": crossed, "staged": staged}


def loaded(rank: int, directory: Path, state: State, name: str, saved: Path) -> dict[str, torch.Tensor] | str:
    """What this rank's stage holds after a load of the directory, once it has saved that; or what the load raised."""
    model = JOBS[name](state)
    with Checkpointer(directory) as checkpointer:
        said = refusal(lambda: checkpointer.load(model=model))
    if said:
        kept = all(bool((jobs.local(one) == -1).all()) for one in model.parameters())
        return said if kept else "changed"
    with Checkpointer(saved, durable=False) as checkpointer:
        checkpointer.save("step_1", model)
    return {name: jobs.whole(value) for name, value in model.state_dict().items()}


def trained(rank: int, state: State, name: str, rate: float, saved: Path) -> dict[str, torch.Tensor]:
    """One step of AdamW, whose rate is a tensor, is saved; the first moments of this rank's stage, put together."""
    model = JOBS[name](state)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=torch.tensor(rate), foreach=False)
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    with Checkpointer(saved, durable=False) as checkpointer:
        checkpointer.save("step_1", model, optimizer)
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in parameters.items()}
    return {name: jobs.whole(value) for name, value in moments.items()}


def read_by_torch(rank: int, directory: Path, state: State) -> dict[str, Any]:
    """The directory by torch's own reader, into DTensors and plain tensors."""
    mesh = init_device_mesh("cpu", (2, 2))
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        placements: Sequence[Placement] = (Replicate(), Shard(0)) if value.dim() == 1 else (Shard(1), Shard(0))
        found[name] = zeros(*value.shape, device_mesh=mesh, placements=placements)
    dcp_load(found, storage_reader=HuggingFaceStorageReader(str(directory)))
    return {name: value.full_tensor() for name, value in found.items() if isinstance(value, DTensor)}
