"""Hosts that are full, and jobs that share their hosts' directories: real processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_ckpt import Checkpointer, Topology
from tests.hosts.jobs import TIMEOUT, host_of, tier
from tests.hosts.three_hosts import HOSTS, newest, outcome, saver_of
from tests.protocol.job import Job, until
from tests.support.mounts import needs_mounts

pytestmark = [pytest.mark.plain, pytest.mark.once]

LARGE = 3 * 2**19
"""Numbers of a model of 6 MiB."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Host 1's directory on a file system of 4 MiB."""
    folder = host_of(tmp_path, 1)
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(folder)], check=True)


def fill(rank: int, path: Path) -> list[str]:
    saver = saver_of(rank, path, replicas=2)
    outcomes = [outcome(saver, 1), outcome(saver, 2, LARGE), outcome(saver, 3)]
    saver.close()
    return outcomes


@needs_mounts()
def test_a_host_whose_disk_is_full(small_disk: Path) -> None:
    """The save fails on all ranks, which name what is full, and leaves nothing; the next, smaller one is saved."""
    for first, second, third in Job(HOSTS, fill, small_disk, group=True).values():
        assert ["saved", "saved"] == [first, third]
        assert "No space left on device" in second
        assert "host 1 (" in second or "rank 1 failed" in second
    for rank in range(HOSTS):
        assert ["step_1", "step_3"] == sorted(tag.name for tag in host_of(small_disk, rank).glob("step_*"))
    assert HOSTS * [3] == Job(HOSTS, newest, small_disk, group=True).values()


def stay(rank: int, path: Path) -> list[str]:
    """A save, and another once a second job was there."""
    saver = saver_of(rank, path)
    found = [outcome(saver, 1)]
    (path / f"saved_{rank}").touch()
    until((path / "came").exists)
    found.append(outcome(saver, 2))
    saver.close()
    return found


def come(rank: int, path: Path, shift: int) -> str:
    """A second job, whose ranks may be on other hosts."""
    place = Topology(tp=HOSTS, rank=rank)
    with Checkpointer(tiers=[tier(path, (rank + shift) % HOSTS)], topology=place, timeout=TIMEOUT) as saver:
        return outcome(saver, 9)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.one_in(2)
def test_two_jobs_on_the_same_hosts(tmp_path: Path, shift: int) -> None:
    """The second is refused on all ranks, wherever its rank 0 is, and the first goes on."""
    first = Job(HOSTS, stay, tmp_path, group=True)
    until(lambda: all((tmp_path / f"saved_{rank}").exists() for rank in range(HOSTS)))
    refused = Job(HOSTS, come, tmp_path, shift, group=True).values()
    (tmp_path / "came").touch()
    assert all("DirectoryInUse" in one for one in refused), refused
    assert HOSTS * [["saved", "saved"]] == first.values()
    assert HOSTS * [2] == Job(HOSTS, newest, tmp_path, group=True).values()
