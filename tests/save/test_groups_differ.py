"""Param groups of replicas that are cut otherwise, or in another order, come back to their rank."""

import tarfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import torch

from nxd_ckpt import Checkpointer, Topology
from nxd_ckpt.coordination.control_files import appeal_file, rank_file, verdict_dir, verdict_file
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.support.rank_pool import RankPool
from tests.support.refusals import refusal

GOLDEN = Path(__file__).parent.parent / "golden"


def _made(rank: int, cut: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.2}]
    if rank == 2 and cut:
        groups = [{"params": [first, others[0]], "lr": 0.1}, {"params": others[1:], "lr": 0.2}]
    elif rank == 2:
        groups.reverse()
    return model, torch.optim.SGD(groups)


def saved(rank: int, directory: Path, cut: bool) -> Any:
    model, optimizer = _made(rank, cut)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, model, optimizer)
        again, other = _made(rank, cut)
        for group in other.param_groups:
            group["lr"] = 9.0
        checkpointer.load(1, again, other)
    return [group["lr"] for group in other.param_groups]


def test_groups_of_other_parameters_come_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """With the optimizer of that rank; the save was refused."""
    assert [[0.1, 0.2]] * 4 == gloo_ranks.run(saved, tmp_path, True)


def test_groups_in_another_order_come_back(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Each rank's own options, in its own order: the load took them for those of rank 0's order."""
    assert [[0.1, 0.2], [0.1, 0.2], [0.2, 0.1], [0.1, 0.2]] == gloo_ranks.run(saved, tmp_path, False)


def test_an_older_tag_does_not_say_in_which_order_a_rank_had_its_groups(tmp_path: Path) -> None:
    """It has the options by the rank's own numbers. They are given to no other group."""
    with tarfile.open(GOLDEN / "nxd_ckpt-0.1-groups.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")

    model, optimizer = _made(2, False)  # as its rank 1 was
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    with Checkpointer(tmp_path / "groups", topology=Topology(dp=2, rank=1)) as checkpointer:
        refused = refusal(lambda: checkpointer.load(1, model, optimizer))
    assert "the live param groups are in another order than the tag's: an older version saved it" in refused
    assert [9.0, 9.0] == [group["lr"] for group in optimizer.param_groups]


def test_a_rank_that_still_answers_reports_the_cause_too(tmp_path: Path) -> None:
    """What it writes stays until it has voted again: it reported that its index was gone."""
    store, cleaned = LocalStorage(tmp_path), Event()

    def late(operation: Operation) -> None:
        if "/index/" in operation.key and store.is_file(appeal_file("run-1")):
            assert cleaned.wait(60)

    def save(rank: int) -> str:
        storage = HookedStorage(store, late if rank == 1 else lambda operation: None)
        at = Topology(dp=3, rank=rank)
        with Checkpointer("run", storage=storage, topology=at, run_id="run") as checkpointer:
            refused = refusal(lambda: checkpointer.save(1, {} if rank == 2 else {"weight": torch.ones(2)}))
        if rank == 0:
            cleaned.set()
        return refused

    with ThreadPoolExecutor(3) as threads:
        for message in threads.map(save, range(3)):
            assert "the model has no tensors on this rank, and some on rank 0; build both alike" in message


def test_a_rank_that_sees_the_verdict_before_the_appeal_delays_no_save(tmp_path: Path) -> None:
    """It answers nothing, and says that: the next save waited for its answer until the timeout, ten minutes."""
    store = LocalStorage(tmp_path)

    def late(operation: Operation) -> None:
        while (
            verdict_dir("run-2") in operation.key
            and store.is_file(rank_file("run-2", 1, "vote"))
            and not store.is_file(verdict_file("run-2"))
        ):
            sleep(0.01)

    def save(rank: int) -> list[str]:
        storage = HookedStorage(store, late if rank == 1 else lambda operation: None)
        at = Topology(dp=3, rank=rank)
        models = [{"weight": torch.ones(2 + (step == 2 and rank == 2))} for step in (1, 2, 3)]
        with Checkpointer("run", storage=storage, topology=at, run_id="run") as checkpointer:
            save = partial(checkpointer.save, use_xser=True)
            return [refusal(partial(save, step, model)) for step, model in enumerate(models, 1)]

    with ThreadPoolExecutor(3) as threads:
        for first, second, third in threads.map(save, range(3)):
            assert ("", "") == (first, third)
            assert "a plain tensor of float32 (2,) on rank 0, and a plain tensor of float32 (3,) on rank 2" in second
