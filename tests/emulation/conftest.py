"""The pools of ranks that the emulation tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nxd_ckpt.testing.workers import RankPool


@pytest.fixture(scope="package")
def xla_ranks() -> Iterator[RankPool]:
    """Four emulated CPU-XLA ranks."""
    with RankPool(nproc=4, xla=True) as pool:
        yield pool


@pytest.fixture(scope="package")
def cpu_ranks() -> Iterator[RankPool]:
    """Two plain CPU ranks."""
    with RankPool(nproc=2) as pool:
        yield pool
