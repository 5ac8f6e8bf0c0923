"""The pools of ranks that the emulation tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nxd_ckpt.testing.workers import WorkerPool


@pytest.fixture(scope="package")
def xla_ranks() -> Iterator[WorkerPool]:
    """Four emulated CPU-XLA ranks."""
    with WorkerPool(nproc=4, xla=True) as pool:
        yield pool


@pytest.fixture(scope="package")
def cpu_ranks() -> Iterator[WorkerPool]:
    """Two plain CPU ranks."""
    with WorkerPool(nproc=2) as pool:
        yield pool
