"""Ranks of a gloo process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rigs.rank_pool import RankPool


@pytest.fixture(scope="package")
def _gloo_pool() -> Iterator[RankPool]:
    with RankPool(nproc=4) as pool:
        yield pool


@pytest.fixture
def gloo_ranks(_gloo_pool: RankPool) -> RankPool:
    """Four ranks, one pool for all tests here; started anew after a test that broke it."""
    if not _gloo_pool.healthy:
        _gloo_pool.restart()
    return _gloo_pool
