"""After a host was lost and replaced by one with an empty disk: its replicas are read, and nothing else."""

import shutil
from itertools import combinations
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, Tier
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.hosts.jobs import RANKS, TIMEOUT, host_of, of, state, tier
from tests.protocol.job import Job

NUMBERS = 3 * 2**19
"""Of each rank's model: 6 MiB. Files of up to 4 MiB are read once more, to verify them as a whole."""


def save(rank: int, path: Path, replicas: int) -> None:
    """Two tags, on the hosts and on the store."""
    tiers = [tier(path, rank, replicas=replicas), Tier(path / "store")]
    with Checkpointer(tiers=tiers, topology=of(rank), timeout=TIMEOUT) as saver:
        for step in (1, 2):
            saver.save(f"step_{step}", state(step, rank, NUMBERS), user_content=step, rank_content=rank)
        saver.wait(tier=1)


def load(rank: int, path: Path, replicas: int) -> tuple[int, int, list[str]]:
    """The step that is loaded, bit-exact; the bytes that other hosts sent; which files were read from the store."""
    read: list[str] = []

    def note(operation: Operation) -> None:
        if operation.key.endswith("manifest.json"):  # which a listing looks into: it has the order time
            return
        if operation.name in ("open", "read_into") or (operation.name == "read" and operation.key.endswith(".pt")):
            read.append(operation.key)

    store = HookedStorage(LocalStorage(path / "store"), note)
    tiers = [tier(path, rank, replicas=replicas), Tier("store", storage=store)]
    loader = Checkpointer(tiers=tiers, topology=of(rank), timeout=TIMEOUT)
    model: dict[str, torch.Tensor] = {}
    step: int = loader.load(model=model)
    assert all(value.equal(model[name]) for name, value in state(step, rank, NUMBERS).items())
    return step, loader.storage.received, read  # type: ignore[attr-defined]


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_whatever_hosts_are_replaced_the_store_is_not_read(tmp_path: Path, replicas: int) -> None:
    """Of four, any number below that of replicas: the others send what the newcomers need, and a tenth more at most."""
    Job(RANKS, save, tmp_path, replicas, group=True).values()
    for lost in combinations(range(RANKS), replicas - 1):
        folders = [host_of(tmp_path, rank).parent for rank in lost]
        for folder in folders:
            folder.rename(folder.with_suffix(".kept"))
        needs = 4 * NUMBERS * len(lost)  # tensors; of the rest of their files an index tells
        outcomes = Job(RANKS, load, tmp_path, replicas, group=True).values()
        assert RANKS * [(2, [])] == [(step, read) for step, _, read in outcomes]
        assert needs <= sum(received for _, received, _ in outcomes) <= 1.1 * needs
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_suffix(".kept").rename(folder)
