"""A job of several processes whose script forgot init_process_group, or called it too late: no rank saves alone."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nxd_ckpt import (
    Checkpointer,
    Tier,
    Topology,
    close_checkpointers,
    dcp,
    has_checkpoint,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.errors import InvalidArgument

STATE = {"w": torch.ones(2)}


@contextmanager
def group(size: int) -> Iterator[None]:
    """Rank 0 of a process group, whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _opened(path: Path) -> None:
    with Checkpointer(path, every=1):
        pass


SAVES: dict[str, Callable[[Path], Any]] = {
    "save_checkpoint": lambda path: save_checkpoint(path, "t", STATE),
    "async": lambda path: save_checkpoint(path, "t", STATE, async_save=True),
    "Checkpointer": lambda path: Checkpointer(path).save("t", STATE),
    "with": _opened,
    "load_latest": lambda path: Checkpointer(path, every=1).load_latest(),
    "dcp.save": lambda path: dcp.save({"model": STATE}, checkpoint_id=path / "t"),
    "dcp.async_save": lambda path: dcp.async_save({"model": STATE}, checkpoint_id=path / "t"),
}


LAUNCHERS = {
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
    "PJRT_LOCAL_PROCESS_COUNT": "torch_xla.launch",
}


@pytest.mark.parametrize(
    ("call", "variable"),
    [*((call, "WORLD_SIZE") for call in SAVES), *(("save_checkpoint", variable) for variable in list(LAUNCHERS)[1:])],
)
def test_one_process_of_several_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, variable: str
) -> None:
    """Else each rank would save its own model as the whole job's. The message says what is missing."""
    monkeypatch.setenv(variable, "4")
    says = rf"^{variable}=4: this process is one of 4 .*{LAUNCHERS[variable]}.*init_process_group\(\) before, or pass "
    with pytest.raises(InvalidArgument, match=f"{says}topology="):
        SAVES[call](tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_said_and_what_only_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topology, no_dist, a group of one, a count of one; and loads, which change nothing on disk."""
    with monkeypatch.context() as environment:
        environment.setenv("WORLD_SIZE", "4")
        save_checkpoint(tmp_path, "one", STATE, topology=Topology())
        dcp.save({"model": STATE}, checkpoint_id=tmp_path / "dcp" / "two", no_dist=True)
        with group(1):
            Checkpointer(tmp_path / "group").save("three", STATE)
        assert has_checkpoint(tmp_path)
        load_checkpoint(tmp_path, None, {})
        remove_checkpoint(tmp_path, "one")
    close_checkpointers()
    for count in ("1", "", "none"):
        monkeypatch.setenv("WORLD_SIZE", count)
        save_checkpoint(tmp_path, f"count {count}", STATE)
    close_checkpointers()


def test_a_handle_from_before_the_group(tmp_path: Path) -> None:
    """It counts as one process, and its ranks would replace each other's tags."""
    checkpointer = Checkpointer(tmp_path / "run")
    with group(2), pytest.raises(InvalidArgument, match=r"made before the process group of 2 ranks.*make it after"):
        checkpointer.save("t", STATE)
    assert not (tmp_path / "run").exists()


def test_a_checkpointer_of_another_group_is_refused(tmp_path: Path) -> None:
    """It would wait for ranks that are there no more, and load without the others; it can be closed."""
    with group(4):
        tiers = (Tier(tmp_path / "run"), Tier(tmp_path / "slow"))
        checkpointer = Checkpointer(tiers=tiers, preemption=signal.SIGUSR2, every_minutes=1)
    calls: list[Callable[[], Any]] = [
        lambda: checkpointer.save("t", STATE),
        lambda: checkpointer.load("t"),
        checkpointer.load_latest,
        checkpointer.latest_step,
        checkpointer.all_steps,
        lambda: checkpointer.best_step("loss"),
        lambda: checkpointer.check_replicas(STATE),
        lambda: checkpointer.remove("t"),
        lambda: checkpointer.step(1),
        lambda: checkpointer.should_save(1),
        lambda: checkpointer.wait(1),
    ]
    with group(3):
        for call in calls:
            with pytest.raises(InvalidArgument, match=r"^this Checkpointer was made as rank 0 of 4, .* 0 of 3 by now"):
                call()
        checkpointer.close()
