"""SIGKILL to the processes of hosts: nothing visible is lost on any tier, and the next launch goes on."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest

from tests.hosts.campaign import Campaign


@pytest.mark.soak
@pytest.mark.plain
@pytest.mark.once
@pytest.mark.timeout(3600)
def test_hosts_that_are_killed_at_any_instant(tmp_path: Path) -> None:
    """While they load, save, send replicas and drain, alone or several; sometimes the disk is lost, too."""
    seed = time.time_ns()
    print("seed", seed)
    campaign = Campaign(tmp_path, Random(seed))
    campaign.rehearse()
    while campaign.fallen.total() < 60:
        campaign.kill()
    print("killed in", campaign.fallen)
    campaign.rehearse()
