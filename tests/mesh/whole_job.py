"""A job of DTensors whose whole model and optimizer are those of tests.reshard: what NxD's jobs save, it must load."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from nxd_ckpt import Checkpointer, Topology
from tests.reshard.transformer import layout_of
from tests.reshard.whole import OPTIONS, Layout, Weight, expected
from tests.tag.equality import difference


def one_rank(weights: Sequence[Weight]) -> Layout:
    """The whole model on one rank, with a plain optimizer whose groups are in the order of their options."""
    from nxd_ckpt import Partition

    groups = [tuple(w.name for w in weights if w.kind == "parameter" and w.options == number) for number in (0, 1)]
    return Layout(Topology(), {w.name: Partition() for w in weights}, tuple(groups), zero1=False)


@cache
def mesh_of(sizes: str) -> DeviceMesh:
    """``pp2fsdp4`` as a mesh of all ranks."""
    named = [(name, int(size)) for name, size in re.findall(r"([a-z]+)(\d+)", sizes)]
    return init_device_mesh("cpu", tuple(size for _, size in named), mesh_dim_names=tuple(name for name, _ in named))


def placement(weight: Weight, dim: str) -> Placement:
    """How a weight lies along a dimension of the mesh: matrices are cut by tensor parallelism the other way than by
    FSDP, vectors by FSDP alone, experts whole by expert parallelism, over whose ranks all else is sharded too."""
    dims = len(weight.shape)
    if dim == "dp" or dims == 0 or (dim == "tp" and dims == 1):
        return Replicate()
    if dims == 1:
        return Shard(0)
    if dims == 3:
        return Shard({"ep": 0, "fsdp": 1, "tp": 2}[dim])
    return Shard(0 if weight.name.endswith("down") != (dim == "tp") else 1)


class MeshJob:
    """The ranks of a mesh with these ``sizes``; pipeline stages are meshes of their own. Buffers are plain."""

    def __init__(self, weights: Sequence[Weight], dtype: torch.dtype | None = None, sizes: str = "fsdp2tp2") -> None:
        mesh = mesh_of(sizes)
        names = mesh.mesh_dim_names or ()
        if "pp" in names:
            stages = mesh.size(names.index("pp"))
            at = Topology(pp=stages, rank=mesh.get_local_rank("pp"))
            weights = layout_of(f"pp{stages}", weights).of_stage(weights, at)
            names = tuple(name for name in names if name != "pp")
            mesh = mesh[names]
        self.weights = weights
        self.module = torch.nn.Module()
        for weight in weights:
            if weight.kind == "buffer":
                self.module.register_buffer(weight.name, weight.value)
                continue
            placements = [placement(weight, name) for name in names]
            value = distribute_tensor(weight.value.to(dtype or weight.dtype), mesh, placements)
            parameter = torch.nn.Parameter(value, requires_grad=weight.kind == "parameter")
            self.module.register_parameter(weight.name, parameter)
        trained = {name: held for name, held in self.module.named_parameters() if held.requires_grad}
        groups = one_rank(weights).groups
        own = [{"params": [trained[name] for name in group], **OPTIONS[n]} for n, group in enumerate(groups) if group]
        self.optimizer = torch.optim.AdamW(own)
        self._trained = trained

    def fill_optimizer(self) -> None:
        for weight in self.weights:
            if weight.kind == "parameter" and weight.step is not None:
                held: Any = self._trained[weight.name]
                self.optimizer.state[held] = {"step": torch.tensor(float(weight.step))} | {
                    key: distribute_tensor(value, held.device_mesh, held.placements)
                    for key, value in weight.state().items()
                }

    def scramble(self) -> None:
        with torch.no_grad():
            for held in (*self.module.parameters(), *self.module.buffers()):
                held.fill_(77)

    def held(self) -> dict[str, Any]:
        """As tests.reshard.whole.expected has it, put together of all ranks."""
        optimizer: dict[str, Any] = {}
        groups = self.optimizer.param_groups
        for name, parameter in sorted(self._trained.items()):
            state = self.optimizer.state.get(parameter, {})
            group = next(group for group in groups if any(parameter is one for one in group["params"]))
            options = [{option: group[option] for option in OPTIONS[0]}]
            optimizer[name] = {**{key: whole(value) for key, value in state.items()}, "options": options}
        model = {name: whole(value.detach()) for name, value in sorted(self.module.state_dict().items())}
        return {"model": model, "optimizer": optimizer}


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def save(rank: int, directory: Path, weights: Sequence[Weight], sizes: str = "fsdp2tp2") -> None:
    job = MeshJob(weights, sizes=sizes)
    job.fill_optimizer()
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("step_1", job.module, job.optimizer, user_content={"saved": 1})


def load(rank: int, directory: Path, weights: Sequence[Weight], dtype: torch.dtype | None = None) -> dict[str, Any]:
    job = MeshJob(weights, dtype)
    job.scramble()
    with Checkpointer(directory) as checkpointer:
        assert {"saved": 1} == checkpointer.load(None, job.module, job.optimizer)
    return job.held()


def wrong(rank: int, directory: Path, weights: Sequence[Weight], sizes: str) -> str | None:
    """What is not as it was saved, after a load into a mesh of these sizes."""
    job = MeshJob(weights, sizes=sizes)
    job.scramble()
    with Checkpointer(directory) as checkpointer:
        assert {"saved": 1} == checkpointer.load(None, job.module, job.optimizer)
    return difference(loaded(job.weights), job.held())


def loaded(weights: Sequence[Weight], *, masters: bool = False) -> dict[str, Any]:
    """What :func:`load` is to give; with ``masters``, where float32 parameters take the master weights."""
    found = expected(weights, one_rank(weights), Topology())
    if masters:
        found["model"] |= {weight.name: weight.master for weight in weights if weight.kind == "parameter"}
        found["model"] = dict(sorted(found["model"].items()))
    for entry in found["optimizer"].values():
        if isinstance(entry.get("step"), int):
            entry["step"] = torch.tensor(float(entry["step"]))
    return found
