"""Disks of hosts that are full to the last page or inode, or that are unmounted: a save fails on all ranks, which say
why, and the next one works."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import Checkpointer
from tests.hosts.jobs import host_of, state
from tests.hosts.three_hosts import HOSTS, newest, outcome, saver_of
from tests.protocol.job import Job
from tests.support.full_disks import FULL, PAGE, inodes_left, pages_left
from tests.support.mounts import needs_mounts
from tests.support.refusals import refusal

pytestmark = needs_mounts()

NUMBERS = 300 * 256
"""Of a model of 300 KiB."""
REPLICAS = 2


@pytest.fixture(params=[0, 1])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """The directory of a job one of whose hosts has a small disk, and which one."""
    folder = host_of(tmp_path, request.param).parent
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=500", "tmpfs", str(folder)], check=True)
    yield tmp_path, request.param
    subprocess.run(["umount", "-l", str(folder)], check=True)


def sweep(rank: int, path: Path, victim: int, by_pages: bool, left: Sequence[int], in_background: bool) -> list[Any]:
    """For each of the amounts a large save, beyond whose data so much is free, and a small one."""
    outcomes, disk = list[Any](), host_of(path, victim).parent
    with saver_of(rank, path, replicas=REPLICAS) as saver:
        outcomes.append(outcome(saver, 1))
        for step, amount in enumerate(left, start=1):
            if rank == victim and by_pages:
                pages_left(disk, REPLICAS * 4 * NUMBERS + amount * PAGE)
            elif rank == victim:
                inodes_left(disk, amount)
            large = save(saver, 100 * step, NUMBERS, in_background)
            if rank == victim and not by_pages:  # a small save needs as many
                for file in sorted(disk.glob("empty-*"))[:100]:
                    file.unlink()
            meet()  # else another rank writes its replica there before
            outcomes.append((amount, large, save(saver, 100 * step + 1, 64, in_background)))
            if rank == victim:
                for file in (*disk.glob("empty-*"), *disk.glob("filler")):
                    file.unlink()
            outcomes.append(outcome(saver, 100 * step + 2))
    return outcomes


def save(saver: Checkpointer, step: int, numbers: int, in_background: bool) -> str:
    """As :func:`outcome`, of a save after which no other tag stays."""
    options: dict[str, Any] = {"user_content": step, "async_save": in_background, "num_kept_ckpts": 1}
    model = state(step, saver.topology.rank, numbers)
    return refusal(lambda: saver.save(f"step_{step}", model, **options).wait()) or "saved"


@pytest.mark.parametrize(
    ("by_pages", "left", "in_background"),
    [
        (True, [-8, -1, 2, 7, 30], True),
        (False, [0, 2, 16], False),
        *(
            pytest.param(*sizes, in_background, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])
            for sizes in ((True, [*range(-8, 65)]), (False, [*range(60)]))
            for in_background in (False, True)
        ),
    ],
)
@pytest.mark.one_in(2)
def test_the_next_save_works(small: tuple[Path, int], by_pages: bool, left: Sequence[int], in_background: bool) -> None:
    """Whatever it was for which there was no space any more, on the host of rank 0 and on another."""
    path, victim = small
    outcomes = Job(HOSTS, sweep, path, victim, by_pages, left, in_background, group=True).values()
    for of_rank in outcomes:
        for one in of_rank:
            large, after = (FULL, one) if isinstance(one, str) else one[1:]
            assert FULL in large or large == "saved", one
            assert after == "saved" or (large == "saved" and FULL in after), one
    assert any(one[1] != "saved" for one in outcomes[0] if not isinstance(one, str)), "no disk was full"
    assert HOSTS * [100 * len(left) + 2] == Job(HOSTS, newest, path, group=True).values()


def unmount(rank: int, path: Path, victim: int, is_replaced: bool) -> list[str]:
    """Three saves. Before the second the disk of a host is unmounted, or another one mounted there; then it is back."""
    disk = host_of(path, victim).parent
    with saver_of(rank, path, replicas=REPLICAS) as saver:
        outcomes = [outcome(saver, 1)]
        meet()  # all have read the verdict, which is on the disk of rank 0
        if rank == victim and is_replaced:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], check=True)
        elif rank == victim:
            subprocess.run(["umount", "-l", str(disk)], check=True)
        meet()
        outcomes.append(outcome(saver, 2))
        below = [str(file) for file in disk.rglob("*") if file.is_file()] if rank == victim else []
        if rank == victim and is_replaced:
            subprocess.run(["umount", "-l", str(disk)], check=True)
        elif rank == victim:
            subprocess.run(["mount", "--bind", str(path / "disk"), str(disk)], check=True)
        meet()
        return [*outcomes, outcome(saver, 3), *below]


def meet() -> None:
    """Of all ranks."""
    import torch.distributed as dist

    dist.barrier()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("is_replaced", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_disk_that_is_unmounted(tmp_path: Path, victim: int, is_replaced: bool) -> None:
    """Nothing is written below the mount point or to what is mounted there, and once it is back, saves go on."""
    (tmp_path / "disk").mkdir()
    folder = host_of(tmp_path, victim).parent
    folder.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(tmp_path / "disk"), str(folder)], check=True)
    try:
        outcomes = Job(HOSTS, unmount, tmp_path, victim, is_replaced, group=True).values()
        for rank, (first, second, third, *below) in enumerate(outcomes):
            assert ["saved", "saved"] == [first, third]
            # Ranks that wait for rank 0 to begin when its disk goes away hear nothing else of it.
            is_waiting = rank > 0 and victim == 0 and "rank 0 did not begin it" in second
            assert is_waiting or ("is not the" in second and "that this job began with" in second)
            assert [] == below
        assert HOSTS * [3] == Job(HOSTS, newest, tmp_path, group=True).values()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
