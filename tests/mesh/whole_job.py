"""A job of DTensors whose whole model and optimizer are those of tests.elastic: what NxD's jobs save, it must load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from nxd_ckpt import Checkpointer, Topology
from tests.elastic.whole import OPTIONS, Layout, Weight, expected


def one_rank(weights: Sequence[Weight]) -> Layout:
    """The whole model on one rank, with a plain optimizer whose groups are in the order of their options."""
    from nxd_ckpt import Partition

    groups = [tuple(w.name for w in weights if w.kind == "parameter" and w.options == number) for number in (0, 1)]
    return Layout(Topology(), {w.name: Partition() for w in weights}, tuple(groups), zero1=False)


class MeshJob:
    """Four ranks, 2 x 2: matrices are placed as ``matrices`` says, vectors cut along one dimension, buffers plain."""

    def __init__(
        self,
        weights: Sequence[Weight],
        dtype: torch.dtype | None = None,
        matrices: Sequence[Placement] = (Shard(1), Shard(0)),
    ) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        self.module = torch.nn.Module()
        for weight in weights:
            if weight.kind == "buffer":
                self.module.register_buffer(weight.name, weight.value)
                continue
            placed: list[Sequence[Placement]] = [[Replicate()] * 2, [Shard(0), Replicate()], matrices]
            value = distribute_tensor(weight.value.to(dtype or weight.dtype), mesh, placed[min(len(weight.shape), 2)])
            parameter = torch.nn.Parameter(value, requires_grad=weight.kind == "parameter")
            self.module.register_parameter(weight.name, parameter)
        trained = {name: held for name, held in self.module.named_parameters() if held.requires_grad}
        groups = one_rank(weights).groups
        own = [{"params": [trained[name] for name in group], **OPTIONS[n]} for n, group in enumerate(groups) if group]
        self.optimizer = torch.optim.AdamW(own)
        self._trained = trained

    def fill_optimizer(self, weights: Sequence[Weight]) -> None:
        for weight in weights:
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
        """As tests.elastic.whole.expected has it, put together of all ranks."""
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


def save(rank: int, directory: Path, weights: Sequence[Weight]) -> None:
    job = MeshJob(weights)
    job.fill_optimizer(weights)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("step_1", job.module, job.optimizer, user_content={"saved": 1})


def load(rank: int, directory: Path, weights: Sequence[Weight], dtype: torch.dtype | None = None) -> dict[str, Any]:
    job = MeshJob(weights, dtype)
    job.scramble()
    with Checkpointer(directory) as checkpointer:
        assert {"saved": 1} == checkpointer.load(None, job.module, job.optimizer)
    return job.held()


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
