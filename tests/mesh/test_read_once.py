"""Ranks that hold the same shards, as in HSDP, read and verify each once among them, and get every bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nxd_ckpt import Checkpointer
from nxd_ckpt.options.execution import Verify
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.hugging_face.reference import Model
from tests.hugging_face.saved import live, write_model
from tests.mesh import jobs
from tests.support.damage import flip
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal

AT_MOST = 1.05
PASSES: dict[Verify, int] = {False: 1, "reading": 1, True: 2}
WIDTH = 511
"""Odd: shards are uneven. A bias of one element leaves a shard empty."""


def job(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """HSDP on 2 x 2 ranks, after a step; a buffer and the steps are plain, and equal on all."""
    torch.manual_seed(seed)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
    model = torch.nn.Sequential(*layers)
    model.register_buffer("table", torch.rand(2**16))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [jobs.local(value).clone() for value in (*model.parameters(), *model.buffers(), *state)]


class Meter(HookedStorage):
    """Counts the bytes read of tensors' files."""

    def __init__(self, directory: Path) -> None:
        super().__init__(LocalStorage(directory), self._count)
        self.nbytes = 0

    def _count(self, operation: Operation) -> None:
        if operation.name.startswith("read") and operation.key.endswith((".pt", ".safetensors")):
            self.nbytes += operation.nbytes


def save(rank: int, directory: Path) -> None:
    with Checkpointer(directory, durable=False) as checkpointer:
        checkpointer.save("step_1", *job(0))


def loads(rank: int, directory: Path) -> list[tuple[int, bool]]:
    """The bytes that this rank reads, and whether it gets what it saved: not verified, while reading, before."""
    saved, found = held(*job(0)), []
    for verify in PASSES:
        target, storage = job(1), Meter(directory)
        with Checkpointer(directory, storage=storage) as checkpointer:
            checkpointer.load(None, *target, verify=verify, share_reads=True)
        found.append((storage.nbytes, all(map(torch.equal, saved, held(*target)))))
    return found


def test_shards_of_hsdp_are_read_once(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Each by one of its replicas, of which each reads a share; twice if all is verified before anything changes."""
    gloo_ranks.run(save, tmp_path)
    nbytes = sum(file.stat().st_size for file in tmp_path.rglob("shard_rank_*.pt"))
    by_rank = gloo_ranks.run(loads, tmp_path)
    for number, (verify, passes) in enumerate(PASSES.items()):
        found = [one[number] for one in by_rank]
        assert all(is_equal for _, is_equal in found), verify
        assert nbytes * passes * 0.95 < sum(read for read, _ in found) <= nbytes * passes * AT_MOST, verify
        assert all(read > 0.1 * nbytes * passes for read, _ in found), verify


def failed(rank: int, directory: Path, verify: Verify) -> tuple[str, bool]:
    """The class of a load's error, and whether all is as before."""
    target = job(1)
    before = held(*target)
    checkpointer = Checkpointer(directory, timeout=600.0)
    said = refusal(lambda: checkpointer.load("step_1", *target, verify=verify, share_reads=True))
    return said.partition(":")[0], all(map(torch.equal, before, held(*target)))


@pytest.mark.parametrize("verify", ["reading", True])
def test_damage_that_an_owner_finds_reaches_all(gloo_ranks: RankPool, tmp_path: Path, verify: Verify) -> None:
    """Also those that hold other shards, and share the rest with it."""
    gloo_ranks.run(save, tmp_path)
    for part in ("model", "optim"):
        for file in sorted((tmp_path / "step_1" / part).glob("shard_rank_*.pt"))[::3]:
            flip(file, file.stat().st_size * 3 // 10)  # inside of a tensor
            found = gloo_ranks.run(failed, tmp_path, verify)
            flip(file, file.stat().st_size * 3 // 10)  # inside of a tensor
            assert ["DigestMismatch"] * 4 == [kind for kind, _ in found], file
            assert verify == "reading" or all(kept for _, kept in found)


def plain(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A copy on every rank."""
    return live(state)


def hsdp(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = live(state)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return model


def load_directory(
    rank: int, directory: Path, state: dict[str, torch.Tensor], make: Callable[[Any], torch.nn.Module]
) -> tuple[int, bool]:
    """The bytes that this rank reads of a Hugging Face directory, and whether the model is the saved one."""
    model, storage = make(state), Meter(directory)
    with Checkpointer(directory, storage=storage) as checkpointer:
        checkpointer.load(model=model, share_reads=True)
    whole = {name: jobs.whole(value) for name, value in model.state_dict().items()}
    return storage.nbytes, all(torch.equal(value, whole[name]) for name, value in state.items())


@pytest.mark.parametrize("make", [plain, hsdp])
def test_a_hugging_face_directory_is_read_once(
    gloo_ranks: RankPool, tmp_path: Path, make: Callable[[Any], torch.nn.Module]
) -> None:
    """By the replicas of plain data parallelism, and by those of HSDP."""
    state = write_model(tmp_path, Model(vocab=20_000), shards=2)
    found = gloo_ranks.run(load_directory, tmp_path, state, make)
    assert all(is_equal for _, is_equal in found)
    nbytes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert nbytes * 0.95 < sum(read for read, _ in found) <= nbytes * AT_MOST
