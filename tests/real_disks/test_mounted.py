"""Real processes, threads and system calls on a disk that loses power and fails, mounted for the test: nothing good is
lost, nothing incomplete shows, all ranks are told the same, and the next job works."""

import time
from pathlib import Path

import pytest

from tests.real_disks.campaign import campaign
from tests.support.mounts import needs_mounts

pytestmark = needs_mounts("/dev/fuse")


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.one_in(2)
def test_power_cuts_and_errors(tmp_path: Path, swaps: bool) -> None:
    """A few, on a file system that can exchange two names and has links, and on one that cannot."""
    campaign(tmp_path, time.time_ns(), swaps=swaps, cuts=2, errors=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("swaps", [True, False])
def test_hundreds_of_power_cuts_and_errors(tmp_path: Path, swaps: bool) -> None:
    campaign(tmp_path, time.time_ns(), swaps=swaps, cuts=300, errors=50)
