"""What save returns is a future of the standard library: it is waited for, awaited, and called back from."""

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import (
    Checkpointer,
    PendingSave,
    close_checkpointers,
    has_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.errors import CheckpointError, InvalidArgument, SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation, failing
from tests.protocol.hooks import Gate
from tests.protocol.job import HANGS

STATE = {"weight": torch.ones(3)}


def held(path: Path) -> tuple[Gate, Checkpointer]:
    """A Checkpointer whose saves are held until the gate is opened."""
    gate = Gate()
    return gate, Checkpointer(path, storage=HookedStorage(LocalStorage(path), gate))


def failed(path: Path) -> tuple[Checkpointer, PendingSave]:
    """An async save that fails for a full disk."""
    hook = failing("close", "*/model/*", OSError(28, "No space left on device"))
    saver = Checkpointer(path, storage=HookedStorage(LocalStorage(path), hook))
    return saver, saver.save("t", STATE, async_save=True)


def test_the_function_returns_the_save(tmp_path: Path) -> None:
    """An async one is under way, a synchronous one done."""
    pending = save_checkpoint(tmp_path, "first", STATE, async_save=True)
    pending.result(HANGS)
    assert has_checkpoint(tmp_path)
    assert [True, True] == [pending.done(), save_checkpoint(tmp_path, "second", STATE).done()]
    close_checkpointers()


def test_a_save_is_waited_for_among_other_futures(tmp_path: Path) -> None:
    """``wait`` and ``as_completed`` take it; until it is decided it is running, and cannot be cancelled."""
    gate, saver = held(tmp_path)
    with saver, futures.ThreadPoolExecutor(1) as pool:
        pending = saver.save("t", STATE, async_save=True)
        other = pool.submit(int)
        both: list[futures.Future[Any]] = [pending, other]
        first = next(futures.as_completed(both, HANGS))
        assert other is first
        assert (True, False, False) == (pending.running(), pending.cancel(), pending.done())
        assert {pending} == futures.wait([pending], 0).not_done
        gate.open.set()
        assert {pending} == futures.wait([pending], HANGS).done
    assert None is pending.exception()


def test_callbacks_are_called_once_it_is_visible(tmp_path: Path) -> None:
    """In order; one that raises, or exits, hinders neither the others nor later saves."""
    gate, saver = held(tmp_path)
    seen: list[Any] = []

    def leave(pending: futures.Future[None]) -> None:
        raise SystemExit(3)

    with saver:
        pending = saver.save("first", STATE, async_save=True)
        pending.add_done_callback(lambda done: seen.append((done, has_checkpoint(tmp_path))))
        pending.add_done_callback(lambda done: seen.append(1 // 0))
        pending.add_done_callback(leave)
        pending.add_done_callback(lambda done: seen.append("after an exit"))
        gate.open.set()
        saver.save("second", STATE, async_save=True).result(HANGS)
    pending.add_done_callback(seen.append)
    assert [(pending, True), "after an exit", pending] == seen


def test_a_callback_that_would_wait_is_told(tmp_path: Path) -> None:
    """On the thread that writes it would wait for itself, for ever, while a close waits for that; others it may use."""
    gate, saver = held(tmp_path / "run")
    closing = threading.Event()
    refused: list[str] = []

    def call_all(done: futures.Future[None]) -> None:
        closing.wait(HANGS)
        save_checkpoint(tmp_path / "mirror", "first", STATE)
        for call in (
            lambda: saver.save("second", STATE),
            lambda: saver.save("second", STATE, async_save=True),
            lambda: saver.load("first", {}),
            lambda: saver.load_latest({}),
            lambda: saver.remove("first"),
            lambda: saver.all_steps(),
            lambda: later.result(HANGS),
            saver.wait,
            saver.rest,
            saver.close,
        ):
            with pytest.raises(InvalidArgument, match="would wait for itself") as error:
                call()
            refused.append(str(error.value))

    with saver:
        pending = saver.save("first", STATE, async_save=True)
        pending.add_done_callback(call_all)
        threading.Timer(0.2, gate.open.set).start()
        later = saver.save("later", STATE, async_save=True)
        threading.Timer(0.2, closing.set).start()
    assert 10 == len(refused)
    assert "the save of 'later', which goes on" in refused[6]
    assert ["later", "first"] == [open_checkpoint(path).tag for path in (tmp_path / "run", tmp_path / "mirror")]


@pytest.mark.parametrize("exits", [asyncio.CancelledError, SystemExit])
@pytest.mark.parametrize(("name", "key"), [("make_dir", "*"), ("create", "*"), ("close", "*"), ("rename", "*")])
def test_an_exit_out_of_a_storage_fails_the_save(
    name: str, key: str, exits: type[BaseException], tmp_path: Path
) -> None:
    """Nobody waits for ever: the save ends with an error, and the next one works."""
    armed = [True]

    def hook(operation: Operation) -> None:
        if armed and operation.name == name and threading.current_thread() is not threading.main_thread():
            armed.clear()
            raise exits("from the storage")

    with Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path), hook)) as saver:
        pending = saver.save("first", STATE, async_save=True)
        error = pending.exception(HANGS)
        saver.save("second", STATE)
    assert isinstance(error, CheckpointError)
    assert exits.__name__ in str(error)


def test_a_save_is_awaited(tmp_path: Path) -> None:
    """The loop goes on meanwhile, and one that gives up waiting leaves the save under way."""
    gate, saver = held(tmp_path)

    async def train() -> list[bool]:
        pending = saver.save("t", STATE, async_save=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pending, 0.01)
        before = pending.done()
        asyncio.get_running_loop().call_soon(gate.open.set)
        await pending
        return [before, pending.done(), has_checkpoint(tmp_path)]

    with saver:
        assert [False, True, True] == asyncio.run(train())


async def _await(pending: PendingSave) -> None:
    await pending


@pytest.mark.parametrize(
    "told",
    [PendingSave.result, PendingSave.wait, lambda pending: asyncio.run(_await(pending))],
    ids=["result", "wait", "await"],
)
def test_a_failure_is_raised_once(tmp_path: Path, told: Callable[[PendingSave], None]) -> None:
    """By whatever waits for it first; then the Checkpointer has nothing more to report."""
    saver, pending = failed(tmp_path)
    with pytest.raises(SaveFailed, match="No space left"):
        told(pending)
    saver.close()


def test_who_asks_for_the_exception_is_told(tmp_path: Path) -> None:
    """``exception()`` is a report, ``error`` a look."""
    saver, pending = failed(tmp_path)
    pending.wait_decided()
    looked = pending.error
    with pytest.raises(SaveFailed):
        saver.wait()
    assert isinstance(looked, SaveFailed)
    assert looked is pending.exception()

    saver, pending = failed(tmp_path / "other")
    assert isinstance(pending.exception(), SaveFailed)
    saver.close()
