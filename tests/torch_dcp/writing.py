"""What a rank does with our StorageWriter: saving under FSDP2, with DTensors, in threads and processes, and failing."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from nxd_ckpt.torch_dcp.storage_reader import StorageReader
from nxd_ckpt.torch_dcp.storage_writer import StorageWriter
from tests.bad_input.live import Net
from tests.support.logged import logged
from tests.torch_dcp.ranks import gathered, picture, training

BESIDE = {"note": "hi", "steps": 5, "train_state": {"seen": torch.arange(3), "lists": [[1, 2], (3, "x")]}}
"""What is of neither model nor optimizer."""


def fsdp2_job(lr: float = 0.1, seed: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    """Trained one step under FSDP2 on two ranks; uneven shards, some empty."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    training(model, optimizer)
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), **BESIDE}


def saved_fsdp2(rank: int, directory: Path) -> dict[str, Any]:
    """Save what was trained; what that is, gathered."""
    model, optimizer = fsdp2_job()
    save(state_of(model, optimizer), storage_writer=StorageWriter(directory, "by_save"))
    return picture(model, optimizer)


TENSORS = {"even": (4, 6), "uneven": (5, 3), "short": (1, 4), "scalar": (), "bf16": (7, 2), "empty": (0, 3)}


def whole(name: str) -> torch.Tensor:
    shape = TENSORS[name]
    count = torch.Size(shape).numel()
    return torch.arange(1.0, 1.0 + count).reshape(shape).to(torch.bfloat16 if name == "bf16" else torch.float32)


def placed(name: str, mesh: Any, dim: int | None) -> Any:
    tensor = whole(name)
    if not tensor.dim():
        return tensor
    return distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(min(dim, tensor.dim() - 1))])


def any_placement(rank: int, directory: Path) -> list[str]:
    """Save every tensor as every placement, load it as every other; what came out wrong."""
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for number, dim in enumerate((0, 1, None)):
        state = {"model": {name: placed(name, mesh, dim) for name in TENSORS}}
        save(state, storage_writer=StorageWriter(directory, f"step_{number}"))
        for other in (0, 1, None):
            found = {"model": {name: _blank(name, mesh, other) for name in TENSORS}}
            load(found, storage_reader=StorageReader(directory / f"step_{number}"))
            for name in TENSORS:
                expected = placed(name, mesh, other)
                if gathered(found["model"][name]) != gathered(expected):
                    wrong.append(f"{name} saved along {dim}, loaded along {other}")
    return wrong


def _blank(name: str, mesh: Any, dim: int | None) -> Any:
    tensor = whole(name)
    if not tensor.dim():
        return torch.zeros_like(tensor)
    placement = Replicate() if dim is None else Shard(min(dim, tensor.dim() - 1))
    return zeros(*tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=[placement])


def stages(rank: int, directory: Path) -> None:
    """Each rank has a layer and an optimizer of its own, with options of its own, as pipeline stages have."""
    state = {
        "model": {f"layers.{rank}.weight": torch.full((2, 2), float(rank))},
        "optim": {
            f"state.layers.{rank}.weight.exp_avg": torch.full((2, 2), 10.0 + rank),
            f"param_groups.layers.{rank}.weight.lr": 0.1 * (rank + 1),
        },
        "loader": {f"rank_{rank}": b"at %d" % rank, "world_size": 2},
    }
    save(state, storage_writer=StorageWriter(directory, "stages"))


def chunks(rank: int, directory: Path) -> list[Any]:
    """Each rank has two shards of a ShardedTensor, by turns; the tensor as it comes back."""
    tensor = whole("even")
    local = []
    for row in (rank, rank + 2):
        about = ShardMetadata([row, 0], [1, 6], f"rank:{rank}/cpu")
        local.append(LocalShard(tensor[row : row + 1].clone(), about))
    state = {"model": {"w": init_from_local_shards(local, [4, 6])}}
    save(state, storage_writer=StorageWriter(directory, "chunks"))
    found: dict[str, Any] = {"model": {"w": torch.zeros(4, 6)}}
    load(found, storage_reader=StorageReader(directory / "chunks"))
    return gathered(found["model"]["w"])


def alone(rank: int, directory: Path) -> None:
    """Each rank saves to a directory of its own."""
    save(
        {"model": {"w": torch.full((3,), float(rank))}},
        no_dist=True,
        storage_writer=StorageWriter(directory / str(rank), "one"),
    )


def cached_plans(rank: int, directory: Path) -> list[Any]:
    """Three saves with plans of the first, into two directories; what each holds."""
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for number, place in enumerate(("a", "b", "a")):
        state: dict[str, Any] = {"model": {"w": placed("uneven", mesh, 0) * (number + 1)}, "step": number}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(state, planner=planner, storage_writer=StorageWriter(directory / place, f"step_{number}"))
        read: dict[str, Any] = {"model": {"w": torch.zeros(5, 3)}, "step": -1}
        load(read, storage_reader=StorageReader(directory / place / f"step_{number}"))
        found.append([read["model"]["w"].tolist(), read["step"]])
    return found


class Failing(DefaultSavePlanner):
    """Cannot give the data of one rank."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self._fails = fails

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self._fails and write_item.index.fqn.endswith("uneven"):
            raise OSError("the device is gone")
        return super().resolve_data(write_item)


def failed(rank: int, directory: Path, how: str) -> str:
    """What DCP raises where rank 1 cannot read its data, or cannot write them; then a save that succeeds."""
    mesh = init_device_mesh("cpu", (2,))
    state = {"model": {name: placed(name, mesh, 0) for name in TENSORS}}

    def full(operation: Operation) -> None:
        if rank == 1 and operation.name == "create":
            raise OSError(28, "No space left on device")

    storage = HookedStorage(LocalStorage(directory), full) if how == "writing" else None
    planner = Failing(how == "reading" and rank == 1)
    try:
        save(state, planner=planner, storage_writer=StorageWriter(directory, "bad", storage=storage))
    except CheckpointException as error:
        words = "; ".join(str(problem) for problem, _ in error.failures.values())
    else:
        words = "nothing"
    assert not (directory / "bad").exists()
    save(state, storage_writer=StorageWriter(directory, "good"))
    return words


def killed(rank: int, directory: Path, at: str) -> None:
    """Rank 1 is killed before the first operation of this name; or rank 0, before the tag is renamed into place."""
    mesh = init_device_mesh("cpu", (2,))
    state = {"model": {name: placed(name, mesh, 0) for name in TENSORS}}

    def kill(operation: Operation) -> None:
        victim = 0 if at == "rename" else 1
        if rank == victim and operation.name == at and (at != "rename" or operation.key.endswith("step_1")):
            os.kill(os.getpid(), signal.SIGKILL)

    storage = HookedStorage(LocalStorage(directory), kill)
    save(state, storage_writer=StorageWriter(directory, "step_1", timeout=30, storage=storage))


def differing_tensors(rank: int, directory: Path) -> list[str]:
    """Two saves of plain tensors of which some differ between the ranks; what this rank was warned of."""
    state = {"model": {"w": torch.ones(2), "seen": torch.tensor(rank)}, "generator": torch.full((5000,), rank)}
    with logged() as messages:
        for tag in ("one", "two"):
            save({**state, "equal": torch.arange(3)}, storage_writer=StorageWriter(directory, tag))
    return messages


def differing_values(rank: int, directory: Path) -> tuple[Any, list[str]]:
    """Two saves of values that differ between the ranks; what the first holds, and what this rank was warned of."""
    state = {"model": {"w": torch.ones(2)}, "step": 5, "loader": {"seen": 100 + rank}, "random": b"of %d" % rank}
    state |= {"names": {f"name_{number}" for number in range(20)}, f"only_{rank}": rank}
    with logged() as messages:
        for tag in ("one", "two"):
            save(state, storage_writer=StorageWriter(directory, tag))
    read = {"loader": {"seen": 0}, "random": b"", "only_0": -1, "only_1": -1, "step": -1}
    load(read, storage_reader=StorageReader(directory / "one"))
    return read, messages
