"""SIGKILL to a rank in the middle of a save: nothing good is lost, nothing incomplete shows, nothing hangs."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.protocol.campaign import PHASES, Campaign


@pytest.mark.plain
@pytest.mark.once
def test_what_is_visible_after_a_kill_in_any_phase_is_complete(tmp_path: Path) -> None:
    """A few kills, each at a random operation of another phase; after each, a new run loads and saves."""
    seed = time.time_ns()
    print("seed", seed)
    random = Random(seed)
    campaign = Campaign(tmp_path, random)
    campaign.rehearse(overwrite=False)
    moments = campaign.rehearse(overwrite=True)
    for rank, phase in sorted(PHASES):
        here = [moment for at, when, moment in moments if (at, when) == (rank, phase)]
        campaign.kill_at(rank, random.choice(here), overwrite=True)
    print("killed in", campaign.fallen)
    assert sorted(PHASES) == sorted(campaign.fallen)
    campaign.rehearse(overwrite=False)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_kills_at_random_times(tmp_path: Path) -> None:
    """Kills from outside, at any time of a save slowed down; until there were fifty, and some in every phase."""
    seed = time.time_ns()
    print("seed", seed)
    random = Random(seed)
    campaign = Campaign(tmp_path, random)
    campaign.rehearse(overwrite=False)
    lasts = campaign.lasts()
    while len(campaign.fallen) < 50 or set(campaign.fallen) != PHASES:
        assert len(campaign.fallen) < 200, f"phases never hit: {PHASES - set(campaign.fallen)}"
        rank = random.choice([0, 0, 1])
        until = lasts[rank] * random.choice([1.0, 1.0, 0.1])  # a third of the kills at the very beginning
        campaign.kill_after(rank, random.uniform(0.0, until), overwrite=random.random() < 0.7)
    print("killed in", Counter(campaign.fallen))
    campaign.rehearse(overwrite=False)
