"""Threads that write: many small files at once, an error in one of them, the end of a job."""

import asyncio
import concurrent.futures
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, PendingSave, open_checkpoint
from nxd_ckpt.errors import InvalidArgument, SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import HookedStorage, Operation, failing
from tests.support.processes import run_program

COUNT = 150
FOLDER = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors"


def weights(start: float) -> dict[str, torch.Tensor]:
    """Many small tensors, none equal to another."""
    return {f"w{number}": torch.full((number % 7, 5), start + number) for number in range(COUNT)}


@pytest.fixture
def no_new_threads() -> Iterator[None]:
    """No thread of ours is left of the test. What other tests left in this process may go on, or end."""
    before = our_threads()
    yield
    assert set() == our_threads() - before


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("nxd_ckpt")}


@pytest.mark.usefixtures("no_new_threads")
def test_every_file_is_written(tmp_path: Path) -> None:
    """By several threads, each file by one, in every save; none is left after the close."""
    seen: dict[str, set[str]] = {}

    def note(operation: Operation) -> None:
        if operation.name in ("create", "write_at", "close") and "tensor_" in operation.key:
            seen.setdefault(operation.key, set()).add(threading.current_thread().name)

    with Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path, durable=False), note)) as saver:
        for number in range(3):
            saver.save(f"{number}", weights(1000.0 * number), use_xser=True, async_save=True)
    assert 3 * COUNT == len(seen)
    assert {1} == {len(threads) for threads in seen.values()}
    assert 1 < len(set.union(*seen.values()))
    for number in range(3):
        assert () == verify_checkpoint(tmp_path, f"{number}").problems
        found = open_checkpoint(tmp_path, f"{number}").model_state()
        assert all(torch.equal(value, found[name]) for name, value in weights(1000.0 * number).items())


@pytest.mark.usefixtures("no_new_threads")
@pytest.mark.parametrize("operation", ["create", "write_at", "close"])
@pytest.mark.parametrize("number", [0, 77, COUNT - 1])
@pytest.mark.one_in(2)
def test_an_error_names_its_file(tmp_path: Path, operation: str, number: int) -> None:
    """The save fails with it, nothing becomes visible, and the next one succeeds."""
    hook = failing(operation, f"*-1/{FOLDER}/tensor_{number}.pt", OSError(errno.EIO, "Input/output error"))
    storage = HookedStorage(LocalStorage(tmp_path, durable=False), hook)
    with Checkpointer(tmp_path, storage=storage) as saver:
        with pytest.raises(SaveFailed, match=rf"writing {FOLDER}/tensor_{number}\.pt: OSError: .*Input/output error"):
            saver.save("failed", weights(0.0), use_xser=True)
        saver.save("good", weights(1.0), use_xser=True)
    assert ["good"] == [entry.name for entry in tmp_path.iterdir() if entry.name != ".nxd_ckpt"]
    assert () == verify_checkpoint(tmp_path, "good").problems


def test_a_failed_save_writes_nothing_more(tmp_path: Path) -> None:
    """By the time that it is reported, no thread still looks into memory that the next save uses."""
    after: list[str] = []
    reported = threading.Event()
    broken = failing("write_at", f"*-1/{FOLDER}/*", OSError(errno.EIO, "Input/output error"), after=20)

    def hook(operation: Operation) -> None:
        if reported.is_set() and operation.name in ("create", "write_at", "close") and "tensor_" in operation.key:
            after.append(operation.key)
        broken(operation)

    with Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path, durable=False), hook)) as saver:
        pending = saver.save("failed", weights(0.0), use_xser=True, async_save=True)
        pending.wait_decided()
        reported.set()
        with pytest.raises(SaveFailed):
            saver.wait()
    assert [] == after


@pytest.mark.usefixtures("no_new_threads")
def test_no_thread_is_left_after_an_exception(tmp_path: Path) -> None:
    """The with statement finishes what is in flight, and ends the threads."""

    def fail_while_saving() -> None:
        with Checkpointer(tmp_path, durable=False) as saver:
            saver.save("t", weights(0.0), use_xser=True, async_save=True)
            raise LookupError("no batch")

    with pytest.raises(LookupError):
        fail_while_saving()
    assert () == verify_checkpoint(tmp_path, "t").problems


async def awaited(pending: PendingSave) -> None:
    await pending


@pytest.mark.parametrize(
    "wait",
    [
        lambda saver, pending: pending.wait(),
        lambda saver, pending: saver.wait(),
        lambda saver, pending: saver.save("next", {"w": torch.ones(4)}),
        lambda saver, pending: asyncio.run(awaited(pending)),
        lambda saver, pending: saver.abandon(),
    ],
    ids=["future", "wait", "save", "await", "abandon"],
)
def test_a_limited_save_is_slow_until_somebody_waits(
    tmp_path: Path, wait: Callable[[Checkpointer, PendingSave], None]
) -> None:
    """It begins at once, goes on at its rate while the training looks at it, and then ends as fast as it can."""
    model = {f"w{number}": torch.rand(5 * 2**18) for number in range(2)}
    with Checkpointer(tmp_path, durable=False) as saver:
        saver.save("first", model, max_bytes_per_second="100KB")  # no async save: its caller waits
        pending = saver.save("slow", model, async_save=True, max_bytes_per_second="100KB")  # takes minutes
        with pytest.raises(concurrent.futures.TimeoutError):
            next(concurrent.futures.as_completed([pending], timeout=0.15))
        wait(saver, pending)
        assert pending.done()
    assert () == verify_checkpoint(tmp_path, "slow").problems


def test_only_what_nobody_waits_for_is_limited(tmp_path: Path) -> None:
    """A state that does not fit at once is written at full speed, but for its last part. Other limits are refused."""
    model = {f"w{number}": torch.rand(5 * 2**18) for number in range(3)}
    with Checkpointer(tmp_path, durable=False, memory_cap=12 * 2**20) as saver:
        for limit, why in (("fast", "must be a number of bytes"), ("1KB", "so long that a rank counts as lost")):
            with pytest.raises(InvalidArgument, match=rf"max_bytes_per_second.*{why}"):
                saver.save("refused", model, async_save=True, max_bytes_per_second=limit)
        pending = saver.save("slow", model, async_save=True, max_bytes_per_second="100KB")
        with pytest.raises(concurrent.futures.TimeoutError):
            next(concurrent.futures.as_completed([pending], timeout=0.15))
    assert () == verify_checkpoint(tmp_path, "slow").problems


PROGRAM = """
import sys, torch
from nxd_ckpt import Checkpointer
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, delaying

path = sys.argv[1]
storage = HookedStorage(LocalStorage(path), delaying("close", "*-2/model/*", 0.02))
saver = Checkpointer(path, storage=storage)
optimizer = {"state": {}, "param_groups": [{"params": [], "lr": 1}]}
for lr, tag in ((1, "first"), (300, "second")):
    optimizer["param_groups"][0]["lr"] = lr
    model = {f"w{number}": torch.full((3,), float(number + lr)) for number in range(100)}
    pending = saver.save(tag, model, optimizer, use_xser=True, async_save=True)
print(pending.done())
"""


def test_the_interpreter_exits_with_many_files_in_flight(tmp_path: Path) -> None:
    """Of a second save, whose pickle is still to be made: all of it is finished."""
    ended = run_program(PROGRAM, tmp_path)
    assert (0, "False\n", "") == (ended.returncode, ended.stdout, ended.stderr)
    assert () == verify_checkpoint(tmp_path, "second").problems
    saved = open_checkpoint(tmp_path, "second")
    assert 300 == saved.optimizer_state()["param_groups"][0]["lr"]
    found = saved.model_state()
    assert [number + 300.0 for number in range(100)] == [found[f"w{number}"][2].item() for number in range(100)]
