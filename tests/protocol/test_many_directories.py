"""A directory for each save, as optimum-neuron and transformers name them: what the process keeps stays the same."""

import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, close_checkpointers, errors, finalize_checkpoint, load_checkpoint, save_checkpoint
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation, failing
from tests.protocol.hooks import Gate
from tests.protocol.job import Job
from tests.protocol.states import visible_tags
from tests.support.processes import run_program

MIB = 2**20

# Saves of 4 MiB of the same state, each in a directory of its own; after each, the process's memory in MiB, its
# threads and its descriptors.
SAVES = """
import os, sys, threading, torch
from nxd_ckpt import finalize_checkpoint, save_checkpoint

path, count = sys.argv[1], int(sys.argv[2])
state = {"weight": torch.ones(2**20)}
torch.set_num_threads(1)

def used():
    resident = int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20
    return resident, threading.active_count(), len(os.listdir("/proc/self/fd"))

for number in range(count):
    save_checkpoint(f"{path}/checkpoint-{number}", "shards", state, async_save=number % 4 > 0, durable=False)
    if number + 1 in (20, count):
        finalize_checkpoint()
        print(*used())
"""


def test_eighty_directories(tmp_path: Path) -> None:
    """Memory, threads and descriptors are those of twenty; each state is 4 MiB."""
    done = run_program(SAVES, tmp_path, 80)
    assert 0 == done.returncode, done.stderr
    early, late = ([int(number) for number in line.split()] for line in done.stdout.splitlines())
    assert late[0] - early[0] < 16, f"MiB {early[0]} -> {late[0]}"
    assert late[1] <= early[1], "threads"
    assert late[2] <= early[2] + 2, "descriptors"
    assert 80 == len([tag for path in tmp_path.iterdir() for tag in visible_tags(path)])


def test_options_of_a_later_call_that_have_no_effect_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a save and of a load; those of the directory's first save count until it is given back."""
    state = {"weight": torch.ones(3)}
    try:
        save_checkpoint(tmp_path, "1", state, durable=False, timeout="60 s")
        save_checkpoint(tmp_path, "2", state, durable=False)
        assert not caplog.messages
        save_checkpoint(tmp_path, "3", state, durable=True, storage_options={"key": "secret"})
        load_checkpoint(tmp_path, "3", {}, timeout=20)
        close_checkpointers()
        save_checkpoint(tmp_path, "4", state, durable=True)
    finally:
        close_checkpointers()
    said = [message.partition(" has no effect")[0].partition(": ")[2] for message in caplog.messages]
    assert ["storage_options, durable=True (False stays)", "timeout=20.0 (60.0 stays)"] == said, caplog.text


def test_an_idle_directory_is_given_back(tmp_path: Path) -> None:
    """The process keeps the leases of the last four. It may save to the others again, and another process may."""
    state = {"weight": torch.ones(3)}
    try:
        for number in range(7):
            save_checkpoint(tmp_path / str(number), "one", state)
        held = [path.parent.parent.name for path in tmp_path.glob("*/.nxd_ckpt/lease.json")]
        assert ["3", "4", "5", "6"] == sorted(held)
        save_checkpoint(tmp_path / "0", "two", state, async_save=True)
        finalize_checkpoint()
        assert ["one", "two"] == visible_tags(tmp_path / "0")
        with Checkpointer(tmp_path / "1") as other:
            other.save("two", state)
    finally:
        close_checkpointers()


def test_a_failure_in_a_directory_that_was_given_back_is_still_raised(tmp_path: Path) -> None:
    """Once, by finalize_checkpoint; saves in other directories do not raise it."""
    taken = tmp_path / "0" / "two"
    state = {"weight": torch.ones(3)}
    try:
        save_checkpoint(tmp_path / "0", "one", state)
        taken.write_text("a file in the place of the tag")
        save_checkpoint(tmp_path / "0", "two", state, async_save=True)
        for number in range(1, 7):
            save_checkpoint(tmp_path / str(number), "one", state)
        with pytest.raises(errors.CheckpointError, match="two"):
            finalize_checkpoint()
        finalize_checkpoint()
    finally:
        close_checkpointers()


def saves_by_turns(rank: int, path: Path) -> list[list[str]]:
    """Two ranks, six directories in turn, so that each save finds its directory given back."""
    for step in range(2):
        for number in range(6):
            save_checkpoint(path / str(number), f"step_{step}", {"weight": torch.ones(3)}, async_save=True)
    finalize_checkpoint()
    close_checkpointers()
    return [visible_tags(path / str(number)) for number in range(6)]


def test_several_ranks_give_back_the_same_directories(tmp_path: Path) -> None:
    """Else one would wait for the other."""
    for outcome in Job(2, saves_by_turns, tmp_path, group=True).values():
        assert [["step_0", "step_1"]] * 6 == outcome


def faults(call: Callable[[], Any]) -> int:
    """Pages that ``call`` touched for the first time."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def pages_of_a_second_directory(rank: int, path: Path) -> list[int]:
    state = {"weight": torch.ones(16 * MIB)}
    touched = []
    savers = [Checkpointer(path / str(number), durable=False) for number in range(4)]  # unheld ones give memory back
    for saver in savers:
        saver.save("zero", {"weight": torch.ones(1)})  # takes the directory
        touched.append(faults(lambda saver=saver: saver.save("one", state, async_save=True)))  # type: ignore[misc]
        saver.wait()
    close_checkpointers()
    return touched


def test_a_state_goes_into_the_memory_of_another_directory_s(tmp_path: Path) -> None:
    """Fresh pages cost several times as much as the copy: of 64 MiB, 16384 pages or 32 huge ones. A busy system may
    take pages from the process, which then touches them anew: not in each of three saves."""
    (touched,) = Job(1, pages_of_a_second_directory, tmp_path).values()
    assert min(touched[1:]) < 32, touched


def in_flight_together(rank: int, path: Path, cap: int | None) -> list[float]:
    """The first save is held back while the second is made; their values."""
    gate = Gate()
    first = Checkpointer(path / "a", storage=HookedStorage(LocalStorage(path / "a"), gate), memory_cap=cap)
    second = Checkpointer(path / "b", memory_cap=cap)
    for value in (1.0, 2.0):
        gate.open.clear()
        pending = first.save(f"t{value}", {"weight": torch.full((MIB,), value)}, async_save=True)
        opened = threading.Timer(0.3, gate.open.set)
        opened.start()
        second.save(f"t{value}", {"weight": torch.full((MIB,), 10 * value)}, async_save=True).wait()
        pending.wait()
        opened.join()
    first.close()
    second.close()
    values = []
    for name, tag in (("a", "t1.0"), ("a", "t2.0"), ("b", "t1.0"), ("b", "t2.0")):
        model: dict[str, torch.Tensor] = {}
        load_checkpoint(path / name, tag, model=model)
        values += model["weight"].unique().tolist()
    return values


@pytest.mark.parametrize("cap", [None, 6 * MIB], ids=["two buffers", "no room for a second"])
def test_two_directories_in_flight_at_once(tmp_path: Path, cap: int | None) -> None:
    """Each has memory of its own; where the cap, which counts for the process, allows only one, the second waits."""
    (values,) = Job(1, in_flight_together, tmp_path, cap).values()
    assert [1.0, 2.0, 10.0, 20.0] == values


def test_a_directory_that_is_removed_while_it_is_idle(tmp_path: Path) -> None:
    """It stays removed, also when it is given back: trainers remove their oldest checkpoints."""
    state = {"weight": torch.ones(3)}
    try:
        for number in range(7):
            save_checkpoint(tmp_path / str(number), "one", state)
            if number:
                shutil.rmtree(tmp_path / str(number - 1))
        finalize_checkpoint()
        assert ["6"] == os.listdir(tmp_path)
    finally:
        close_checkpointers()
    assert ["6"] == os.listdir(tmp_path)


def test_a_failed_save_gives_its_memory_back(tmp_path: Path) -> None:
    """A later save, here or elsewhere, has it."""

    def hook(operation: Operation) -> None:
        failing("write_at", "*-2/model/*", OSError(28, "No space left on device"))(operation)

    storage = HookedStorage(LocalStorage(tmp_path / "a"), hook)
    state = {"weight": torch.ones(MIB)}
    with Checkpointer(tmp_path / "a", storage=storage, memory_cap=6 * MIB) as saver:
        saver.save("one", state)
        with pytest.raises(errors.SaveFailed):
            saver.save("two", state)
        with Checkpointer(tmp_path / "b", memory_cap=6 * MIB) as other:
            other.save("one", state)
        saver.save("three", state)
    assert ["one", "three"] == visible_tags(tmp_path / "a")
