"""Saves of a mesh job: later ones ask nobody, replicas share the writing, names are torch's."""

import json
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from nxd_ckpt import Checkpointer
from nxd_ckpt.core.mesh import Layout, Mesh, MeshGroup, Placed, Shard
from nxd_ckpt.formats.state import State, StateTensor
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.saving.mesh_plan import WORTH_A_WRITER, MeshPlan
from tests.mesh import jobs
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference


def save_before_others(rank: int, directory: Path, name: str) -> dict[str, Any]:
    """Save before there is any state of the optimizer; then train, and let rank 0 save before the others may begin."""
    model = jobs.JOBS[name](0)
    optimizer = jobs.adamw(model)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("step_0", model, optimizer)
        for tag in ("step_1", "step_2"):
            jobs.train(model, optimizer)
            dist.barrier()
            ready = directory / f"rank 0 has staged {tag}"
            while rank > 0 and not ready.exists():
                time.sleep(0.01)
            checkpointer.save(tag, model, optimizer, async_save=True)
            if rank == 0:
                ready.touch()
    return jobs.whole_state(model, optimizer)


def test_later_saves_wait_for_nobody(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 stages while the others have not begun: also where the optimizer has got its state meanwhile."""
    expected = gloo_ranks.run(save_before_others, tmp_path, "fsdp x tp")[0]
    found = gloo_ranks.run(jobs.load, tmp_path, "fsdp")[0]
    assert None is difference(expected, found)


def wrapped(rank: int, directory: Path, offload: bool) -> tuple[list[str], list[str], bool]:
    """Compiled, checkpointed activations, bfloat16 computation, offloaded: names, and whether values come back."""

    def build(seed: int) -> nn.Module:
        model: Any = jobs.net(seed=seed)
        for number, block in model.blocks.items():
            model.blocks[number] = checkpoint_wrapper(block)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
        options |= {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
        fully_shard(model, mesh=mesh, **options)
        return cast("nn.Module", torch.compile(model, backend="eager"))

    model, other = build(0), build(1)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save("step_1", model, torch.optim.AdamW(model.parameters(), fused=True))
        checkpointer.load(None, other, torch.optim.AdamW(other.parameters(), foreach=True))
    ours = json.loads((directory / "step_1" / "manifest.json").read_bytes())["parameters"]
    one, two = get_model_state_dict(model), get_model_state_dict(other)
    same = all(torch.equal(jobs.local(one[name]), jobs.local(two[name])) for name in one)
    return sorted(ours), sorted(one), same


@pytest.mark.parametrize("offload", [False, True])
def test_names_are_those_of_torch(gloo_ranks: RankPool, tmp_path: Path, offload: bool) -> None:
    """No wrapper shows in a name; parameters that wait on the host are saved and loaded as others."""
    for ours, torchs, same in gloo_ranks.run(wrapped, tmp_path, offload):
        assert torchs == ours
        assert same


def planned(rank: int, groups: MeshGroup, hsdp: Layout) -> MeshPlan:
    """A model of large replicated shards, and a small one that every rank holds, as the rank holds it."""
    coordinate = hsdp.mesh.coordinate_of(rank)
    assert coordinate is not None
    tree: dict[str, Any] = {"step": Assembly("float32", (), ())}
    about = {("step",): StateTensor("model/step")}
    for number in range(8):
        shape = (WORTH_A_WRITER // 16, 4)
        tree[f"w{number}"] = Assembly("float32", hsdp.local_shape(shape, coordinate), ())
        about[f"w{number}",] = StateTensor(f"model/w{number}", placed=Placed(hsdp, shape, coordinate))
    return MeshPlan({"model": State(tree, lambda: about)}, groups, rank)


def test_replicas_share_the_writing() -> None:
    """Each shard is written once, each replica writes as much, and what is small is written by few."""
    mesh = Mesh(("replicate", "shard"), (4, 2), tuple(range(8)))
    hsdp = Layout(mesh, (None, Shard(0)))
    group = MeshGroup(mesh.ranks, (Mesh(("", *mesh.names), (1, *mesh.shape), mesh.ranks),))
    plans = [planned(rank, group, hsdp) for rank in range(8)]
    written = [[entry for file in plan.files() for entry in file.tensors] for plan in plans]
    assert [3, *[2] * 7] == [len(entries) for entries in written]
    boxes = [(entry.name, piece.box) for entries in written for entry in entries for piece in entry.pieces or ()]
    assert len(boxes) == len(set(boxes)) == 8 * 2 + 1
    assert len({plan.digest for plan in plans}) == 1
