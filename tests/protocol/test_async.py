"""Async saves: the caller pays for the copy only, and what was saved is the state at the call."""

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology, close_checkpointers, has_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage
from tests.protocol.hooks import Gate
from tests.protocol.job import HANGS, Job, until
from tests.protocol.states import visible_tags


def saves_and_sleeps(rank: int, path: Path) -> None:
    save_checkpoint(path, "only", {"weight": torch.ones(3)}, async_save=True, topology=Topology(dp=2, rank=rank))
    signal.pause()


def test_an_async_save_appears_by_itself(tmp_path: Path) -> None:
    """The processes only sleep after the call, and ``done`` appears."""
    job = Job(2, saves_and_sleeps, tmp_path, group=True)
    until(lambda: has_checkpoint(tmp_path))
    asleep = [job.alive(rank) for rank in range(2)]
    job.kill_all()
    assert ["only"] == visible_tags(tmp_path)
    assert [True, True] == asleep


def test_changes_after_the_call_are_not_saved(tmp_path: Path) -> None:
    """Scheduler and contents are those at the call; tests/save/test_planner.py has models and optimizers."""
    gate = Gate()
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    content: dict[str, Any] = {"epoch": 1, "seen": [1, 2]}
    own: dict[str, Any] = {"position": 10, "mask": torch.ones(2)}
    expected_scheduler = dict(scheduler.state_dict())
    with Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path), gate)) as saver:
        pending = saver.save("t", model, optimizer, scheduler, content, rank_content=own, async_save=True)
        optimizer.step()
        scheduler.step()
        content["epoch"] = 2
        content["seen"].append(3)
        own["mask"].zero_()
        assert not pending.done()
        gate.open.set()

    saved = open_checkpoint(tmp_path, "t")
    assert expected_scheduler == saved.scheduler_state()
    assert {"epoch": 1, "seen": [1, 2]} == saved.user_content()
    assert torch.equal(torch.ones(2), saved.rank_content(0)["mask"])


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    """There is one staging arena: the second call returns only after the first save was decided."""
    gate = Gate()
    saver = Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path), gate))
    first = saver.save("first", {"weight": torch.ones(3)}, async_save=True)
    timer = threading.Timer(0.3, gate.open.set)
    timer.start()
    saver.save("second", {"weight": torch.zeros(3)}, async_save=True)
    first_was_done = first.done()
    timer.join()
    saver.close()
    assert first_was_done
    assert torch.equal(torch.ones(3), open_checkpoint(tmp_path, "first").model_state()["weight"])


@pytest.mark.parametrize("load", [Checkpointer.load, Checkpointer.load_latest])
def test_a_load_waits_for_the_save_in_flight(tmp_path: Path, load: Callable[..., Any]) -> None:
    """It sees what was saved just before."""
    with Checkpointer(tmp_path) as saver:
        saver.save("step_1", {"weight": torch.ones(3)}, async_save=True)
        model: dict[str, torch.Tensor] = {}
        load(saver, model=model)
    assert torch.equal(torch.ones(3), model["weight"])


# Audit events of work that belongs to the background thread: files, folders, processes, the network, new memory.
_FILES = ("open", "os.", "shutil.", "tempfile.", "glob.", "subprocess.", "socket.", "mmap.", "fcntl.")


def saves_under_audit(rank: int, path: Path, returned: Path) -> tuple[bool, list[str]]:
    """Whether this rank's training thread opened a file in its first async save; what it did in its second one, which
    rank 0 makes after rank 1 is through."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    topology = Topology(dp=2, rank=rank)

    def save_once(tag: str) -> None:
        options: dict[str, Any] = {"rank_content": {"rank": rank}, "topology": topology, "num_kept_ckpts": 1}
        save_checkpoint(path, tag, model, optimizer, scheduler, {"epoch": 1}, async_save=True, **options)

    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    events: list[str] = []
    caller, watched = threading.get_ident(), True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if watched and event.startswith(_FILES) and threading.get_ident() == caller:
            events.append(f"{event} {arguments}")

    sys.addaudithook(audit)
    save_once("first")
    opened_at_first = any(event.startswith("open") for event in events)
    if rank == 0:
        until(returned.exists)
    events.clear()
    save_once("second")
    watched = False
    if rank == 1:
        returned.touch()
    close_checkpointers()
    return opened_at_first, events


def test_the_training_thread_opens_no_file_and_waits_for_no_rank(tmp_path: Path) -> None:
    """From the second async save on: no file, no folder, no new memory; no collective either: the other is late."""
    path, returned = tmp_path / "checkpoints", tmp_path / "rank_1_returned"
    assert [(True, [])] * 2 == Job(2, saves_under_audit, path, returned, group=True).values()
    assert ["second"] == visible_tags(path)


def test_a_save_tells_its_timings_and_bytes(tmp_path: Path) -> None:
    """A save that is done tells seconds by phase and its bytes, the manifest the same for all ranks."""
    with Checkpointer(tmp_path) as saver:
        pending = saver.save("t", {"weight": torch.ones(1000)})
    assert {"stage_seconds", "write_seconds", "commit_seconds"} == set(pending.timings)
    assert all(seconds >= 0 for seconds in pending.timings.values())
    assert sum(file.stat().st_size for file in (tmp_path / "t" / "model").iterdir()) == pending.nbytes
    manifest = open_checkpoint(tmp_path, "t").manifest
    assert manifest is not None
    assert pending.nbytes == manifest.timings["bytes"]


def test_a_pending_save_can_be_waited_for_in_steps(tmp_path: Path) -> None:
    """``wait(timeout)`` gives up with TimeoutError, the save goes on, and a later wait returns."""
    gate = Gate()
    with Checkpointer(tmp_path, storage=HookedStorage(LocalStorage(tmp_path), gate)) as saver:
        pending = saver.save("t", {"weight": torch.ones(3)}, async_save=True)
        assert pending.staged(0)
        with pytest.raises(TimeoutError, match="'t'"):
            pending.wait(0.05)
        gate.open.set()
        pending.wait(HANGS)
    assert pending.done()
    assert None is pending.error
    assert torch.equal(torch.ones(3), open_checkpoint(tmp_path).read("model/weight"))
