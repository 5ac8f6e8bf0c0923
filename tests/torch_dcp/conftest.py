"""Two ranks with gloo, which all tests of torch DCP share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_pool import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started
