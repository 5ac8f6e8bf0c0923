"""Every mesh loads what every other one saved: on eight real ranks, in a run that has time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layout.equality import difference
from tests.mesh import jobs
from tests.rigs.rank_pool import RankPool

pytestmark = [pytest.mark.plain, pytest.mark.once, pytest.mark.soak]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(nproc=4) as four, RankPool(nproc=8) as eight:
        yield {4: four, 8: eight}


WHOLE = [name for name in jobs.JOBS if "pp" not in name]
MESHES = [(ranks, name) for ranks in (4, 8) for name in WHOLE][:12]


@pytest.mark.parametrize("saved", MESHES, ids=lambda mesh: f"{mesh[0]} {mesh[1]}")
def test_every_mesh_loads_it(pools: dict[int, RankPool], tmp_path: Path, saved: tuple[int, str]) -> None:
    """Model and optimizer, bit for bit, on meshes of as many ranks and of others."""
    expected = pools[saved[0]].run(jobs.save, tmp_path, saved[1])[0]
    for ranks, name in MESHES:
        found = pools[ranks].run(jobs.load, tmp_path, name)[0]
        assert None is difference(expected, found), (ranks, name)
