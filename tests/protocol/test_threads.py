"""Several threads of a process that save and load: one call at a time, in the order of the calls; nothing mixes."""

import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology, close_checkpointers, load_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, delaying
from tests.protocol.job import Job
from tests.protocol.states import checkpointer, save, visible_tags, weights
from tests.support.refusals import refusal
from tests.support.threads import in_threads

SAVES = 15


def state(number: int) -> dict[str, torch.Tensor]:
    """Several tensors that all hold the number; no two states are of one structure more often than by chance."""
    return {f"layer.{i}": torch.full((100_000,), float(number)) for i in range(4)}


@pytest.mark.parametrize("async_save", [False, True])
def test_two_threads_that_save_to_one_directory_do_not_mix(tmp_path: Path, async_save: bool) -> None:
    """Every tag holds what was given under it, and nothing of another."""

    def saves(thread: int) -> None:
        for number in range(SAVES):
            save_checkpoint(tmp_path, f"t{thread}_{number}", state(100 * thread + number), async_save=async_save)

    in_threads(lambda: saves(1), lambda: saves(2))
    close_checkpointers()
    expected = {f"t{thread}_{number}": 100 * thread + number for thread in (1, 2) for number in range(SAVES)}
    assert expected.keys() == set(visible_tags(tmp_path))
    found = {}
    for tag in expected:
        assert () == verify_checkpoint(tmp_path, tag).problems
        tensors = open_checkpoint(tmp_path, tag).model_state().values()
        (found[tag],) = {float(value) for tensor in tensors for value in tensor.unique()}
    assert expected == found


def test_loads_and_saves_of_several_threads_take_turns(tmp_path: Path) -> None:
    """A load returns one save's values, whatever other threads save meanwhile."""
    save_checkpoint(tmp_path, "first", state(0))

    def saves() -> None:
        for number in range(1, SAVES):
            save_checkpoint(tmp_path, f"t{number}", state(number), async_save=True)

    def loads() -> None:
        for _ in range(SAVES):
            model: dict[str, torch.Tensor] = {}
            load_checkpoint(tmp_path, model=model)
            assert 1 == len({float(value) for tensor in model.values() for value in tensor.unique()})

    in_threads(saves, loads)
    close_checkpointers()


def test_a_thread_that_waits_does_not_let_saves_mix(tmp_path: Path) -> None:
    """What is begun while another thread waits for earlier saves is waited for by the next save all the same."""
    storage = HookedStorage(LocalStorage(tmp_path), delaying("write_at", "*", 0.005))
    saver, over = Checkpointer(tmp_path, storage=storage), threading.Event()

    def saves() -> None:
        for number in range(2 * SAVES):
            saver.save(f"t{number}", state(number), async_save=True)
        over.set()

    def waits() -> None:
        while not over.is_set():
            saver.wait()

    in_threads(saves, waits, waits)
    saver.close()
    found = [
        {float(value) for tensor in tensors for value in tensor.unique()}
        for tensors in (open_checkpoint(tmp_path, f"t{number}").model_state().values() for number in range(2 * SAVES))
    ]
    assert [{float(number)} for number in range(2 * SAVES)] == found


def test_saves_go_on_beside_threads_that_close(tmp_path: Path) -> None:
    """A directory that was given back in between is taken again; none stays taken by a Checkpointer nobody knows."""
    over = threading.Event()

    def saves() -> None:
        for number in range(SAVES):
            save_checkpoint(tmp_path, f"t{number}", state(number), async_save=number % 2 == 0)
        over.set()

    def closes() -> None:
        while not over.is_set():
            close_checkpointers()

    in_threads(saves, closes, closes)
    close_checkpointers()
    assert {f"t{number}" for number in range(SAVES)} == set(visible_tags(tmp_path))
    with Checkpointer(tmp_path) as other:
        other.save("last", state(0))


def test_a_first_save_that_fails_leaves_no_threads(tmp_path: Path) -> None:
    """Nobody may close what never held the directory."""
    before = set(threading.enumerate())
    with Checkpointer(tmp_path) as holder:
        holder.save("t", state(0))
        held = set(threading.enumerate())
        for _ in range(3):
            with pytest.raises(DirectoryInUse):
                Checkpointer(tmp_path).save("t", state(0))
        assert not set(threading.enumerate()) - held
    assert not set(threading.enumerate()) - before


def test_a_signal_handler_may_save_while_the_functions_open_the_directory(tmp_path: Path) -> None:
    """It does not wait for the thread that it interrupted, and both save through one Checkpointer."""

    class Interrupting(PurePosixPath):
        asked = 0

        def __fspath__(self) -> str:
            Interrupting.asked += 1
            signal.raise_signal(signal.SIGUSR1)
            return super().__fspath__()

    def handler(*_: Any) -> None:
        if Interrupting.asked == 3:  # the storage is being opened
            save_checkpoint(tmp_path, "by the handler", state(1))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        save_checkpoint(Interrupting(tmp_path), "t", state(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    close_checkpointers()
    assert ["by the handler", "t"] == visible_tags(tmp_path)


def test_a_signal_handler_may_not_save_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """It would wait for the very thread that it interrupted; it is refused at once, and the save is whole."""
    refused: list[str] = []

    def handler(*_: Any) -> None:
        refused.append(refusal(lambda: saver.save("last", {"weight": torch.zeros(3)})))

    class Interrupting(torch.nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return super().state_dict(*args, **options)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with Checkpointer(tmp_path) as saver:
            saver.save("t", Interrupting(2, 2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert 1 == len(refused)
    assert "signal handler" in refused[0]
    assert ["t"] == visible_tags(tmp_path)


def kind_of_refusal(call: Callable[[], Any]) -> str:
    """Of one that is made in a thread of its own."""
    said: list[str] = []
    in_threads(lambda: said.append(refusal(call).partition(":")[0]))
    return said[0]


def saves_in_another_order(rank: int, path: Path, begun: bool) -> list[str]:
    """Two threads save two states of one structure, on rank 1 in another order; how that ended, by order of calls."""
    saver = checkpointer(path, rank, 2)
    if begun:
        save(saver, "zero", 0)
    order = [("a", 1), ("b", 2)] if rank == 0 else [("b", 2), ("a", 1)]
    outcomes = [kind_of_refusal(partial(save, saver, tag, value)) for tag, value in order]
    save(saver, "after", 3)
    saver.close()
    return outcomes


@pytest.mark.parametrize("begun", [False, True], ids=["first save", "later save"])
def test_threads_in_another_order_on_another_rank_are_refused(tmp_path: Path, begun: bool) -> None:
    """Both fail on every rank, at once; nothing is mixed, and what all save next works.

    Once a rank's tag tells that it is ahead, the save that it did not make fails as left out.
    """
    outcomes = Job(2, saves_in_another_order, tmp_path, begun, group=True).values()
    assert ["RanksDisagree"] * 2 == [first for first, _ in outcomes]
    assert {second for _, second in outcomes} <= {"RanksDisagree", "SaveFailed"}
    assert ["zero", "after"][1 - begun :] == visible_tags(tmp_path)


def loads_in_another_order(rank: int, path: Path, same_directory: bool) -> list[str]:
    """Two threads load two saves of one structure, on rank 1 in another order."""
    saves = [(path / "one", "t0"), (path / "one", "t1") if same_directory else (path / "two", "t0")]
    for number, (directory, tag) in enumerate(saves):
        with checkpointer(directory, rank, 2) as saver:
            save(saver, tag, number)
    outcomes = []
    for directory, tag in saves if rank == 0 else reversed(saves):
        model = {name: torch.zeros_like(tensor) for name, tensor in weights(0, rank).items()}
        topology = Topology(tp=2, rank=rank)
        outcomes.append(kind_of_refusal(partial(load_checkpoint, directory, tag, model, topology=topology)))
        assert all(not tensor.any() for tensor in model.values())
    return outcomes


@pytest.mark.parametrize("same_directory", [True, False])
def test_loads_in_another_order_on_another_rank_are_refused(tmp_path: Path, same_directory: bool) -> None:
    """No rank gets another save's values than the others, be it of another directory; nothing is changed."""
    outcomes = Job(2, loads_in_another_order, tmp_path, same_directory, group=True).values()
    assert [["RanksDisagree"] * 2] * 2 == outcomes


def a_save_against_a_load(rank: int, path: Path) -> str:
    """Rank 0 saves to one directory while rank 1 loads from another."""
    with checkpointer(path / "one", rank, 2) as saver:
        save(saver, "t", 0)
    if rank == 0:
        return kind_of_refusal(lambda: save(checkpointer(path / "two", rank, 2), "t", 1))
    return kind_of_refusal(lambda: load_checkpoint(path / "one", model={}, topology=Topology(tp=2, rank=rank)))


def test_a_save_does_not_take_a_load_for_its_like(tmp_path: Path) -> None:
    """Both are refused, at once."""
    assert ["RanksDisagree"] * 2 == Job(2, a_save_against_a_load, tmp_path, group=True).values()
