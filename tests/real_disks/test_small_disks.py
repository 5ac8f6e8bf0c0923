"""Real file systems that are full, read-only or broken: a save fails on all ranks, which say why, and
leaves what was; as soon as the disk takes it, the next one works."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import (
    Checkpointer,
    Partition,
    Topology,
    close_checkpointers,
    finalize_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation
from tests.protocol.job import Job, until
from tests.protocol.states import PATIENCE, SHORT, lose_patience
from tests.support.full_disks import FULL, PAGE, inodes_left, pages_left
from tests.support.mounts import needs_mounts
from tests.support.refusals import refusal

pytestmark = needs_mounts("/dev/loop-control")

WORLD = 2
MIB = 2**20
STAGED = "staging/first-2/"
PIECE = 2**14
"""Numbers of a tensor of 64 KiB: its file goes through the page cache, so that a sync finds what is wrong."""


def soak(value: int) -> Any:
    return pytest.param(value, marks=pytest.mark.soak, id=f"soak-{value}")


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@contextmanager
def mounted(what: Path | str, at: Path, *options: str) -> Iterator[Path]:
    at.mkdir()
    run("mount", *options, what, at)
    try:
        yield at
    finally:
        run("umount", at)


def image_of(path: Path) -> Path:
    """A file of 64 MiB with an ext4 file system, all of whose own blocks are written, and none is kept for root."""
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", "-m", "0", path)
    return path


def weights(step: int, rank: int, nbytes: int) -> dict[str, torch.Tensor]:
    count = max(nbytes // (4 * PIECE), 1)
    return {f"weight.{number}": torch.full((PIECE,), 100.0 * step + rank) for number in range(count)}


def saver_of(rank: int, path: Path, launch: str) -> Checkpointer:
    return Checkpointer(path, topology=Topology(tp=WORLD, rank=rank), run_id=launch, timeout=PATIENCE)


def outcome(saver: Checkpointer, step: int, nbytes: int = 0) -> str:
    """What becomes of a save of so many bytes for each rank."""
    model = weights(step, saver.topology.rank, nbytes)
    return refusal(lambda: saver.save(f"step_{step}", model, user_content=step)) or "saved"


def saves(rank: int, path: Path, large: int, patience: tuple[float, float], gates: Path | None = None) -> list[str]:
    """A small save, one of ``large`` bytes, and a small one. ``patience`` is how many seconds the last two wait for a
    rank that cannot even say that it failed. ``gates`` are files: the job says what it has done, and waits until it may
    go on."""
    found = []
    with saver_of(rank, path, "first") as saver:
        for step, nbytes in enumerate([0, large, 0], start=1):
            if step > 1:
                lose_patience(saver, patience[step - 2])
            if gates is not None:
                until((gates / f"before_{step}").exists)
            found.append(outcome(saver, step, nbytes))
            if gates is not None:
                (gates / f"after_{step}.{rank}").touch()
    return found


def resumed(rank: int, path: Path) -> list[Any]:
    """Another launch: the newest step that is there, bit for bit, and what becomes of a save."""
    model: dict[str, torch.Tensor] = {}
    with saver_of(rank, path, "second") as saver:
        step = saver.load(model=model)
        assert {float(tensor[0]) for tensor in model.values()} == {100.0 * step + rank}
        return [step, outcome(saver, 9)]


def check_full(path: Path, large: int) -> None:
    """The second save fails on all ranks, and the third does not; then another job goes on."""
    for first, second, third in Job(WORLD, saves, path, large, (PATIENCE, PATIENCE)).values():
        assert ["saved", "saved"] == [first, third]
        assert FULL in second
        assert str(path) in second, "the message names no file"
    assert ["step_1", "step_3"] == sorted(tag.name for tag in path.glob("step_*"))
    assert WORLD * [[3, "saved"]] == Job(WORLD, resumed, path).values()


def test_a_full_tmpfs(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m") as disk:
        check_full(disk / "run", 8 * MIB)


def saved_by_all(path: Path, tag: str, ranks: int, kib: int, value: float) -> bool:
    """False if a save by so many ranks of this process failed for lack of space; ``kib`` are of each rank."""
    states = [{"w": torch.full((kib * 256,), value + rank)} for rank in range(ranks)]
    try:
        for rank, state in enumerate(states):
            save_checkpoint(
                path, tag, state, topology=Topology(tp=ranks, rank=rank), run_id="all", async_save=True, timeout=20.0,
                partitions={"w": Partition(partition_dim=0, num_partitions=ranks)},
            )  # fmt: skip
        finalize_checkpoint()
    except CheckpointError as error:
        if FULL not in str(error):
            raise
        return False
    return True


def check_the_next_save(
    disk: Path, ranks: int, left: Callable[[], None], freed: Callable[[], None] = lambda: None
) -> None:
    """After a large save that may have failed, a smaller one works, and what was there is as it was."""
    path = disk / "run"
    try:
        assert saved_by_all(path, "one", ranks, 60, 1.0)
        left()
        if not saved_by_all(path, "two", ranks, 300, 10.0):
            freed()
            assert saved_by_all(path, "three", ranks, 60, 20.0), sorted(map(str, path.rglob("*")))
    finally:
        close_checkpointers()
    for rank in range(ranks):
        state: dict[str, torch.Tensor] = {}
        load_checkpoint(path, "one", state, topology=Topology(tp=ranks, rank=rank))
        assert torch.equal(torch.full((60 * 256,), 1.0 + rank), state["w"])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("pages", [-2, 1, 2, 3, 4, 6, 9, 12, *(soak(pages) for pages in range(-8, 65))])
def test_a_disk_that_is_full_to_the_last_page(tmp_path: Path, ranks: int, pages: int) -> None:
    """Not even index, vote or verdict of the save that failed fit beside its data: what it staged goes at once."""
    with mounted("tmpfs", tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m") as disk:
        check_the_next_save(disk, ranks, lambda: pages_left(disk, ranks * 300 * 1024 + pages * PAGE))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("count", [0, 13, 17, *(soak(count) for count in range(40))])
def test_a_disk_without_inodes(tmp_path: Path, ranks: int, count: int) -> None:
    """A smaller save needs as many of them: it works once some are free."""

    def freed() -> None:
        for file in sorted(disk.glob("empty-*"))[:60]:
            file.unlink()

    with mounted("tmpfs", tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m,nr_inodes=300") as disk:
        check_the_next_save(disk, ranks, lambda: inodes_left(disk, count), freed)


def slow_to_leave(rank: int, path: Path, gate: Path) -> list[str]:
    """Three saves, the second too large. Rank 1 writes for it once rank 0 has given up, and clears away late."""

    def hook(operation: Operation) -> None:
        if rank == 1 and STAGED in operation.key and operation.name == "write_at":
            until(gate.exists)
            pages_left(path.parent, 0)  # as its own file takes all space until it is closed
            time.sleep(1.0)
            (path.parent / "filler").unlink()

    storage = HookedStorage(LocalStorage(path), hook)
    topology = Topology(tp=WORLD, rank=rank)
    with Checkpointer(path, storage=storage, topology=topology, run_id="first", timeout=PATIENCE) as saver:
        outcomes = [outcome(saver, 1), outcome(saver, 2, 8 * MIB)]
        if rank == 0:
            gate.touch()
            until(lambda: os.statvfs(path.parent).f_bavail == 0)
        return [*outcomes, outcome(saver, 3)]


def test_a_rank_that_leaves_a_failed_save_late(tmp_path: Path) -> None:
    """Its files take all space when rank 0 comes to the next save, which waits for it."""
    with mounted("tmpfs", tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m") as disk:
        for first, second, third in Job(WORLD, slow_to_leave, disk / "run", tmp_path / "gate").values():
            assert ["saved", "saved"] == [first, third]
            assert FULL in second


def test_a_full_ext4(tmp_path: Path) -> None:
    with mounted(image_of(tmp_path / "image"), tmp_path / "disk", "-o", "loop") as disk:
        check_full(disk / "run", 64 * MIB)


def test_a_disk_that_breaks(tmp_path: Path) -> None:
    """What was written to it is lost, as a sync says once; then the kernel takes nothing more. Repaired, it holds what
    was saved."""
    with mounted("tmpfs", tmp_path / "under", "-t", "tmpfs", "-o", "size=12m") as under:
        image = image_of(under / "image")
        with mounted(image, tmp_path / "disk", "-o", "loop") as disk:
            outcomes = Job(WORLD, saves, disk / "run", 16 * MIB, (SHORT, SHORT)).values()
            first, second, third = zip(*outcomes, strict=True)
            assert WORLD * ("saved",) == first
            assert re.search(f"Input/output error|{FULL}", str(second)), second
            assert "saved" not in (*second, *third)
            assert ["step_1"] == [tag.name for tag in (disk / "run").glob("step_*")]
        run("mount", "-o", "remount,size=100m", under)
        subprocess.run(["fsck.ext4", "-fy", str(image)], check=False, capture_output=True)
        with mounted(image, tmp_path / "repaired", "-o", "loop") as disk:
            assert WORLD * [[1, "saved"]] == Job(WORLD, resumed, disk / "run").values()


def test_a_disk_that_becomes_read_only(tmp_path: Path) -> None:
    """Between two saves; and writable again."""
    gates = tmp_path / "gates"
    gates.mkdir()
    with mounted("tmpfs", tmp_path / "disk", "-t", "tmpfs") as disk, ExitStack() as stack:
        job = Job(WORLD, saves, disk / "run", 0, (SHORT, PATIENCE), gates)
        stack.callback(job.kill_all)
        for step, mode in ((1, "rw"), (2, "ro"), (3, "rw")):
            run("mount", "-o", f"remount,{mode}", disk)
            (gates / f"before_{step}").touch()
            until(lambda step=step: all((gates / f"after_{step}.{rank}").exists() for rank in range(WORLD)))  # type: ignore[misc]
        for first, second, third in job.values():
            assert ["saved", "saved"] == [first, third]
            assert "Read-only file system" in second
        assert WORLD * [[3, "saved"]] == Job(WORLD, resumed, disk / "run").values()
