"""Every mesh loads what every other one saved, and every job of NxD, and the reverse: on up to eight real ranks, in a
run that has time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh import whole_job
from tests.reshard.ranks import fresh, load_rank, save_job
from tests.reshard.transformer import layout_of, weights_of
from tests.reshard.whole import Layout, expected
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(nproc=4) as four, RankPool(nproc=8) as eight:
        yield {4: four, 8: eight}


KINDS = {
    **dict.fromkeys(("dp4", "fsdp4", "tp4", "fsdp2tp2", "dp2fsdp2", "pp2fsdp2", "ep2fsdp2"), 4),
    **dict.fromkeys(("fsdp8", "dp2fsdp2tp2", "pp2fsdp2tp2", "ep2fsdp2tp2", "pp2ep2fsdp2"), 8),
}
"""Twelve meshes, and their ranks."""

NXD = ("dp4", "tp4", "dp2tp2", "tp2pp2", "dp2pp2", "dp2ep2tp2", "dp2ep2pp2")
"""With ZeRO-1 if they have data-parallel ranks."""

WEIGHTS = weights_of(experts=True)


def nxd(sizes: str) -> Layout:
    return layout_of(sizes, WEIGHTS, zero1="dp" in sizes, master_weights=False)


def differing(pools: dict[int, RankPool], directory: Path) -> list[str]:
    """Into which meshes the tag does not load as it was saved."""
    found = {sizes: pools[ranks].run(whole_job.wrong, directory, WEIGHTS, sizes) for sizes, ranks in KINDS.items()}
    return [f"{sizes}: {what}" for sizes, whats in found.items() for what in whats if what is not None]


@pytest.mark.parametrize("sizes", KINDS)
def test_every_kind_of_mesh_is_loaded_by_every_kind_and_by_nxd(
    pools: dict[int, RankPool], tmp_path: Path, sizes: str
) -> None:
    """Data, sharded, tensor, pipeline and expert parallelism, and what they make together: model and optimizer, on
    each rank, bit for bit."""
    pools[KINDS[sizes]].run(whole_job.save, tmp_path, WEIGHTS, sizes)
    assert [] == differing(pools, tmp_path)
    for live in map(nxd, NXD):
        for at in live.ranks:
            rank = fresh(WEIGHTS, live, at, stepped=at.rank % 2 == 1)
            assert {"saved": 1} == load_rank(tmp_path, rank, partitions=live.partitions)
            assert None is difference(expected(WEIGHTS, live, at), rank.held()), at


@pytest.mark.parametrize("sizes", NXD)
def test_every_kind_of_mesh_loads_a_job_of_nxd(pools: dict[int, RankPool], tmp_path: Path, sizes: str) -> None:
    save_job(tmp_path, WEIGHTS, nxd(sizes))
    assert [] == differing(pools, tmp_path)
