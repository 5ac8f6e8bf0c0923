"""DTensors that no checkpoint can hold: refused on all ranks, by name, before anything is written or changed."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from nxd_ckpt import Checkpointer
from tests.mesh import jobs
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal, refusals


def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def cut(dtype: torch.dtype = torch.float32, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """8 x 2, cut over the first dimension of the mesh, without communication: ranks may differ."""
    mesh = mesh or whole_mesh()
    local = torch.ones(8 // mesh.shape[0], 2, dtype=dtype)
    return DTensor.from_local(local, mesh, [Shard(0), Replicate()][: mesh.ndim], run_check=False)


def partial(rank: int) -> dict[str, Any]:
    return {"w": DTensor.from_local(torch.ones(4), whole_mesh(), [Partial()])}


def one_partial(rank: int) -> dict[str, Any]:
    """On one rank alone: the others have nothing to refuse."""
    placement = Partial() if rank == 2 else Replicate()
    return {"w": DTensor.from_local(torch.ones(4), whole_mesh(), [placement], run_check=False)}


def other_shape(rank: int) -> dict[str, Any]:
    mesh = whole_mesh()
    rows = 8 if rank else 12
    local = torch.ones(rows // 4, 2)
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size([rows, 2]), stride=(2, 1))}


def other_dtype(rank: int) -> dict[str, Any]:
    return {"w": cut(dtype=torch.float64 if rank == 3 else torch.float32)}


def twins(rank: int) -> dict[str, Any]:
    """Sharded on one half of the ranks, plain on the other."""
    half = DeviceMesh("cpu", [0, 1])
    return {"w": cut(mesh=half) if rank < 2 else torch.ones(8, 2), "other": torch.ones(2)}


def not_there(rank: int) -> dict[str, Any]:
    return {"w": cut(), **({"extra": cut()} if rank == 1 else {})}


def other_mesh(rank: int) -> dict[str, Any]:
    """One rank cuts over another mesh of the same ranks."""
    meshes = [init_device_mesh("cpu", shape) for shape in ((2, 2), (4,))]
    return {"w": cut(mesh=meshes[rank > 0])}


def descending(rank: int) -> dict[str, Any]:
    return {"w": cut(mesh=DeviceMesh("cpu", [3, 2, 1, 0]))}


def outside(rank: int) -> dict[str, Any]:
    """A mesh that leaves ranks out, which hold the DTensor all the same."""
    return {"w": distribute_tensor(torch.ones(8, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)}


def on_meta(rank: int) -> dict[str, Any]:
    local = torch.empty(2, 2, device="meta") if rank == 1 else torch.ones(2, 2)
    return {"w": DTensor.from_local(local, whole_mesh(), [Shard(0)], run_check=False)}


def refused(rank: int, directory: Path, state: Callable[[int], dict[str, Any]]) -> str:
    """The error of a save, which every rank gets; nothing is there afterwards."""
    with Checkpointer(directory) as checkpointer:
        model = state(rank)
        return refusal(lambda: checkpointer.save("step_1", model))


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (partial, "UnsupportedState", "model/w is a DTensor with the placement Partial"),
        (one_partial, "UnsupportedState", "model/w is a DTensor with the placement Partial"),
        (other_shape, "RanksDisagree", "model/w is a DTensor placed"),
        (other_dtype, "RanksDisagree", "model/w is a DTensor placed"),
        (twins, "RanksDisagree", "model/w is a DTensor placed"),
        (not_there, "RanksDisagree", "model/extra is"),
        (other_mesh, "RanksDisagree", "DTensor"),
        (descending, "UnsupportedState", "do not ascend"),
        (outside, "UnsupportedState", "which this rank is not in"),
        (on_meta, "UnsupportedState", "model/w is on the meta device"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_no_tag_can_hold_is_refused(
    gloo_ranks: RankPool, tmp_path: Path, state: Callable[[int], dict[str, Any]], error: str, words: str
) -> None:
    """Every rank raises the same class; the message names the tensor, and no tag is there."""
    found = gloo_ranks.run(refused, tmp_path, state)
    assert all(said.startswith(f"{error}: ") and words in said for said in found), found
    assert [] == [path.name for path in tmp_path.glob("step_*")]


def with_strange_optimizer(rank: int, directory: Path, load: bool) -> tuple[str, bool]:
    """An optimizer that was made before FSDP replaced the parameters: the error, and whether nothing changed."""
    model = jobs.net()
    optimizer = jobs.adamw(model)
    jobs.sharded(model, whole_mesh())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Checkpointer(directory) as checkpointer:
        if load:
            said = refusal(lambda: checkpointer.load(None, model, optimizer))
        else:
            said = refusal(lambda: checkpointer.save("step_2", model, optimizer))
    same = (torch.equal(jobs.local(before[name]), jobs.local(now)) for name, now in model.state_dict().items())
    return said, all(same)


@pytest.mark.parametrize("load", [False, True])
def test_an_optimizer_of_other_parameters_is_refused(gloo_ranks: RankPool, tmp_path: Path, load: bool) -> None:
    """Parameters that are not the model's would be saved under no name, and loaded into nothing that is trained."""
    gloo_ranks.run(jobs.save, tmp_path, "fsdp")
    for said, same in gloo_ranks.run(with_strange_optimizer, tmp_path, load):
        assert said.startswith("OptimizerMismatch: ")
        assert "is not one of the model's" in said
        assert same


def of_fsdp1(rank: int, directory: Path) -> list[str]:
    """Answers of saves of FSDP1's optimizer, and of state dicts that rank 0 gathered."""
    wrapped: Any = FullyShardedDataParallel(jobs.net(), use_orig_params=True, device_id=torch.device("cpu"))
    there = {"w": torch.ones(2)} if rank == 0 else {}
    gathered: Any = {"state": {}, "param_groups": [{"params": [0]}]} if rank == 0 else {}
    calls = [{"model": wrapped}, {"optimizer": jobs.adamw(wrapped)}, {"model": there}, {"optimizer": gathered}]
    with Checkpointer(directory) as checkpointer:
        return refusals(functools.partial(checkpointer.save, "t", **objects) for objects in calls)


def test_what_fsdp1_cuts_is_refused_with_what_to_do(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Flat parameters, pieces of a rank's own, and dicts that one rank has."""
    for model, optimizer, there, gathered in gloo_ranks.run(of_fsdp1, tmp_path):
        assert "FSDP1" in model
        assert "optimizer: its parameters are FSDP1's" in optimizer
        assert "use fully_shard (FSDP2)" in optimizer
        assert "gather it on all" in there
        assert "optimizer: an empty dict on this rank" in gathered


def beside_the_model(rank: int, directory: Path) -> list[str]:
    """Answers of saves of DTensors as content, and of torch's flattened state dict of an optimizer."""
    model = jobs.net()
    jobs.sharded(model, whole_mesh())
    optimizer: Any = get_optimizer_state_dict(
        model, jobs.adamw(model), options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    content: list[dict[str, Any]] = [{"user_content": {"own": [cut()]}}, {"rank_content": {"own": cut()}}]
    with Checkpointer(directory) as checkpointer:
        calls = [*content, {"optimizer": optimizer}]
        return refusals(functools.partial(checkpointer.save, "t", **objects) for objects in calls)


def test_dtensors_beside_the_model_are_named(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """No place was named, or no word said that the state dict is a flattened one."""
    for user, own, optimizer in gloo_ranks.run(beside_the_model, tmp_path):
        assert "user_content/own/0 is a DTensor" in user
        assert "rank_content/own is a DTensor" in own
        assert "flatten_optimizer_state_dict=True" in optimizer
