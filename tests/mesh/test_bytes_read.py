"""A load onto another mesh, and between meshes and NxD's jobs, reads what each rank holds and little else; the ranks of
a mesh share the verifying."""

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from nxd_ckpt import Checkpointer, Partition, Topology
from nxd_ckpt.options.execution import Verify
from nxd_ckpt.storage import progress
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import Hook, HookedStorage, Operation, recording
from tests.interop.saving import save_as_every_rank
from tests.mesh import jobs
from tests.support.damage import flip
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal
from tests.support.terminal import Terminal

AT_MOST = 1.15
"""Of the bytes that a rank holds."""

WITH_GAPS = {"rows to columns": 4, "nxd to both": 2}
"""The bytes of a rank's columns with the few KiB between those of two rows, as a multiple of what it holds."""

SHAPES = {"rows": (1536, 1024), "columns": (1024, 1536)}
"""6 MiB each, with two moments: one and a half blocks of digests."""

CUTS = {"rows": Partition(0, num_partitions=2), "columns": Partition(1, num_partitions=2)}

HOW: dict[str, Verify] = {"not verified": False, "verified while reading": "reading", "verified before": True}

PLACEMENTS: dict[str, Sequence[Placement]] = {
    "rows": (Shard(0), Shard(0)),
    "columns": (Shard(1), Shard(1)),
    "both": (Shard(1), Shard(0)),
    "replicated rows": (Replicate(), Shard(0)),
}


def job(place: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Four ranks, 2 x 2; matrices and their moments hold the numbers of their ranks."""
    mesh, placements = init_device_mesh("cpu", (2, 2)), PLACEMENTS[place]
    module = torch.nn.Module()
    for name, shape in SHAPES.items():
        own = list(shape)
        for placement in placements:
            if isinstance(placement, Shard):
                own[placement.dim] //= 2
        local = torch.full(own, float(dist.get_rank()))
        module.register_parameter(name, torch.nn.Parameter(DTensor.from_local(local, mesh, placements)))
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
    return module, optimizer


def hooked(directory: Path, hook: Hook) -> Checkpointer:
    return Checkpointer(directory, storage=HookedStorage(LocalStorage(directory), hook))


def read(log: Sequence[Operation]) -> int:
    return sum(operation.nbytes for operation in log if operation.name.startswith("read"))


def load(directory: Path, place: str, verify: Verify, *, model_only: bool = False) -> tuple[int, int]:
    """Bytes read, and bytes held."""
    module, optimizer = job(place)
    log: list[Operation] = []
    with hooked(directory, recording(log)) as checkpointer:
        checkpointer.load(None, module, None if model_only else optimizer, verify=verify)
    held = [*module.parameters()]
    if not model_only:
        held += [value for state in optimizer.state.values() for value in state.values()]
    return read(log), sum(jobs.local(one).nbytes for one in held)


def loads(rank: int, directory: Path) -> dict[str, tuple[int, int]]:
    """Save two jobs, and load each in other places, verified first or not."""
    for place in ("rows", "both"):
        with Checkpointer(directory / place, durable=False) as checkpointer:
            checkpointer.save("step_1", *job(place))
    found = {
        f"{source} to {place}, {how}": load(directory / source, place, verify)
        for source, place in (("rows", "columns"), ("both", "replicated rows"))
        for how, verify in HOW.items()
    }
    found["nxd to both"] = load(directory / "nxd", "both", False, model_only=True)
    return found


def test_loads_read_what_ranks_hold(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Without verifying, each rank its own bytes; where everything is verified, each byte is read once for that, by any
    of the ranks, however the tensors were cut. That is a second time where it is done before; while reading it is so
    only for who wants a part of a block."""
    whole = {name: torch.rand(shape) for name, shape in SHAPES.items()}

    def what(rank: int) -> dict[str, Any]:
        cut = {name: tensor.chunk(2, CUTS[name].partition_dim or 0)[rank] for name, tensor in whole.items()}
        return {"model": cut, "partitions": CUTS}

    topologies = [Topology(tp=2, rank=rank) for rank in range(2)]
    save_as_every_rank(tmp_path / "nxd", "step_1", topologies, what, durable=False)
    by_rank = gloo_ranks.run(loads, tmp_path)
    saved = 3 * sum(tensor.nbytes for tensor in whole.values())
    for name in by_rank[0]:
        found = [one[name] for one in by_rank]
        needed = [held * WITH_GAPS.get(name.split(",")[0], 1) for _, held in found]
        if name.endswith("verified before") or name == "rows to columns, verified while reading":
            assert sum(nbytes for nbytes, _ in found) <= AT_MOST * (sum(needed) + saved), name
        else:
            assert all(nbytes <= AT_MOST * own for (nbytes, _), own in zip(found, needed, strict=True)), (name, found)

    log: list[Operation] = []
    storage = HookedStorage(LocalStorage(tmp_path / "rows"), recording(log))
    with Checkpointer(tmp_path / "rows", topology=topologies[1], storage=storage) as checkpointer:
        model: dict[str, torch.Tensor] = {}
        checkpointer.load(None, model, verify=False, partitions=CUTS)
    assert read(log) <= AT_MOST * (model["rows"].nbytes + 2 * model["columns"].nbytes)


def reads_of_rows(rank: int, directory: Path) -> list[int]:
    """Bytes read of the files of tensors by a load of three rows onto four ranks, not verified, and while reading."""
    mesh = init_device_mesh("cpu", (4,))

    def model(dim: int) -> torch.nn.Module:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(distribute_tensor(torch.rand(3, 4096), mesh, [Shard(dim)]))
        return module

    with Checkpointer(directory, durable=False) as checkpointer:
        checkpointer.save("step_1", model(1))
    found = []
    for verify in (HOW["not verified"], HOW["verified while reading"]):
        log: list[Operation] = []
        with hooked(directory, recording(log)) as checkpointer:
            checkpointer.load(None, model(0), verify=verify)
        found.append(read([operation for operation in log if "/model/" in operation.key]))
    return found


def test_a_rank_that_holds_nothing_of_a_tensor_reads_nothing_of_it(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Three rows on four ranks leave the last one without any: it reads what they are called, and nothing of them."""
    *others, last = gloo_ranks.run(reads_of_rows, tmp_path)
    row = 4096 * 4
    assert all(nbytes < row / 16 for nbytes in last)
    assert all(row <= nbytes for found in others for nbytes in found)


def last_of_bar(rank: int, directory: Path) -> str:
    """What rank 0's bar of the verification shows in the end."""
    with Checkpointer(directory, durable=False) as checkpointer:
        checkpointer.save("step_1", *job("rows"))
    terminal = Terminal()

    def wait_for_bar(operation: Operation) -> None:
        deadline = time.monotonic() + 600
        watched = rank == 0 and operation.name == "read_ranges" and "shard_rank" in operation.key
        while watched and "verify" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)

    with pytest.MonkeyPatch.context() as patches, hooked(directory, wait_for_bar) as checkpointer:
        patches.setattr(progress, "_PATIENCE", 0.0)
        patches.setattr("sys.stderr", terminal)
        checkpointer.load(None, *job("columns"))
    return terminal.getvalue()


def test_the_bar_of_a_shared_verification_ends_full(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """It counts the bytes that its own rank verifies."""
    shown = gloo_ranks.run(last_of_bar, tmp_path)[0]
    assert "verify: 100%" == re.findall(r"verify: +\d+%", shown)[-1]


def refused_of_copies(rank: int, directory: Path) -> list[str]:
    """What two hosts' loads of copies of one tag say of damage in the second host's, in each of some files."""
    own, other = directory / "own", directory / "other"
    with Checkpointer(own, durable=False) as checkpointer:
        checkpointer.save("step_1", *job("rows"))
    dist.barrier()  # until all have given the directory back
    if rank == 0:
        shutil.copytree(own, other)  # as cp -a does, with the times of the files
    dist.barrier()
    said: list[str] = []
    module, optimizer = job("columns")
    with Checkpointer(other if rank % 2 else own, durable=False) as checkpointer:
        for number in range(4):
            file = other / "step_1" / "model" / f"shard_rank_{number:05}.pt"
            for _ in range(2):
                dist.barrier()
                if rank == 0:
                    flip(file, file.stat().st_size * 3 // 10)
                dist.barrier()
                if len(said) == number:
                    said.append(refusal(lambda: checkpointer.load(None, module, optimizer)).partition(":")[0])
    return said


def test_ranks_that_look_at_different_copies_do_not_share(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Each host has copies on a disk of its own: damage in one of them is seen, though the save is the same."""
    assert [["DigestMismatch"] * 4] * 4 == gloo_ranks.run(refused_of_copies, tmp_path)
