"""Forked children: they are refused what is their parent's, may make their own, and harm nobody."""

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nxd_ckpt import Checkpointer, Topology, api, close_checkpointers, finalize_checkpoint, save_checkpoint
from nxd_ckpt.coordination import lease
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage
from tests.protocol.hooks import Gate
from tests.protocol.job import Job, lead_a_group
from tests.protocol.states import checkpointer, save, saved_value, visible_tags

STATE = {"weight": torch.ones(3)}


def in_child(call: Callable[[], Any]) -> str:
    """What ``call`` raised in a forked child, as class and message, or "" ."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        outcome = ""
        try:
            call()
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(sink, pickle.dumps(outcome))
        os._exit(0)
    os.close(sink)
    os.waitpid(pid, 0)
    with os.fdopen(source, "rb") as file:
        return str(pickle.loads(file.read()))


def holder(path: Path) -> int | None:
    held = lease.read(LocalStorage(path))
    return None if held is None else held.pid


def uses_of_a_parents(rank: int, path: Path) -> dict[str, str]:
    """What each call on the parent's objects says in a child, while a save of the parent's is in flight."""
    gate = Gate()
    saver = Checkpointer(path, storage=HookedStorage(LocalStorage(path), gate))
    pending = saver.save("t", STATE, async_save=True)

    def leaves_the_block() -> None:
        with saver:
            pass

    calls = {
        "save": lambda: saver.save("child", STATE),
        "load": lambda: saver.load(model={}),
        "wait": saver.wait,
        "close": saver.close,
        "abandon": saver.abandon,
        "pending.wait": pending.wait,
        "with": leaves_the_block,
        "finalize_checkpoint": finalize_checkpoint,
        "close_checkpointers": close_checkpointers,
    }
    outcomes = {name: in_child(call) for name, call in calls.items()}
    assert os.getpid() == holder(path)
    gate.open.set()
    saver.close()
    return outcomes


def test_a_child_is_refused_its_parents_checkpointer(tmp_path: Path) -> None:
    """At once, by an error that says so; what has nothing of the child's to do does nothing. The parent goes on."""
    (outcomes,) = Job(1, uses_of_a_parents, tmp_path).values()
    refused = {name for name, outcome in outcomes.items() if "CheckpointError" in outcome and "forked" in outcome}
    assert {"save", "load", "wait", "close", "pending.wait"} == refused
    assert {""} == {outcome for name, outcome in outcomes.items() if name not in refused}
    assert ["t"] == visible_tags(tmp_path)


def makes_its_own(rank: int, path: Path) -> tuple[str, str]:
    """A child saves through the four functions, in its own directory and in its parent's, while these are in use."""

    def saves_and_closes() -> None:
        save_checkpoint(path / "child", "t", STATE)
        close_checkpointers()

    save_checkpoint(path / "parent", "t", STATE)
    with api._lock:  # held by another thread, for all that the child knows
        own = in_child(saves_and_closes)
        same = in_child(lambda: save_checkpoint(path / "parent", "child", STATE))
    close_checkpointers()
    return own, same


def test_a_child_makes_its_own(tmp_path: Path) -> None:
    """In another directory it saves; its parent's is another live job's."""
    ((own, same),) = Job(1, makes_its_own, tmp_path).values()
    assert "" == own
    assert same.startswith("DirectoryInUse")
    assert (["t"], ["t"]) == (visible_tags(tmp_path / "parent"), visible_tags(tmp_path / "child"))


def forks_in_a_group(rank: int, path: Path) -> tuple[str, str]:
    """A child of one of two ranks saves with its parent's topology, and alone."""
    saver = checkpointer(path / "parent", rank, 2)
    save(saver, "first", 1)
    as_rank = in_child(lambda: save(checkpointer(path / "child", rank, 2), "t", 2))

    def alone() -> None:
        with Checkpointer(path / f"child_{rank}", topology=Topology()) as own:
            own.save("t", STATE)

    by_itself = in_child(alone)
    save(saver, "second", 2)
    saver.close()
    return as_rank, by_itself


def test_a_child_of_a_rank_is_not_that_rank(tmp_path: Path) -> None:
    """It is refused its parent's process group, whose words it would take; alone it may save."""
    for as_rank, by_itself in Job(2, forks_in_a_group, tmp_path, group=True).values():
        assert "forked" in as_rank
        assert "" == by_itself
    assert 2 == saved_value(tmp_path / "parent", None, 2)


def loads_data(rank: int, path: Path) -> list[int]:
    """A data loader's forked workers run and end while a save is in flight, and another thread holds our locks."""
    lead_a_group()
    gate = Gate()
    found = []
    with Checkpointer(path, storage=HookedStorage(LocalStorage(path), gate)) as saver:
        saver.save("t", STATE, async_save=True)
        thread = threading.Thread(target=saver.save, args=("u", STATE))  # waits for its turn with the arena
        thread.start()
        numbers: Any = range(8)
        for batch in torch.utils.data.DataLoader(numbers, num_workers=2, multiprocessing_context="fork"):
            found += batch.tolist()
        assert os.getpid() == holder(path)
        gate.open.set()
        thread.join()
    return found


def test_a_data_loaders_workers_are_unharmed(tmp_path: Path) -> None:
    """They deliver, end, and leave saves and the lease alone."""
    assert [list(range(8))] == Job(1, loads_data, tmp_path).values()
    assert ["t", "u"] == visible_tags(tmp_path)
