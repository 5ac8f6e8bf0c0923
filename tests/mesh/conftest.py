"""Ranks of a gloo process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.rank_pool import RankPool


@pytest.fixture(scope="package")
def gloo_ranks() -> Iterator[RankPool]:
    """Four ranks, one pool for all tests here."""
    with RankPool(nproc=4) as pool:
        yield pool
