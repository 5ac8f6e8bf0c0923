"""accelerate's save_state with our checkpoints on two ranks, under DDP and under FSDP2."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_ckpt import open_checkpoint
from tests.integrations import accelerate_run as runs
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module", params=[False, True], ids=["ddp", "fsdp2"])
def sharded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def whole(sharded: bool, pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """Each rank's losses in a run of four steps that nothing interrupts."""
    found = pool.run(runs.whole, tmp_path_factory.mktemp("whole"), sharded)
    assert found[0] != found[1]
    return found


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("*"))


@pytest.mark.parametrize("own", [False, True], ids=["ours", "accelerates"])
def test_a_resumed_run_is_the_same_run(
    own: bool, sharded: bool, tmp_path: Path, pool: RankPool, whole: list[list[float]]
) -> None:
    """Losses of each rank equal those of a run that was not stopped, also from checkpoints that accelerate wrote. With
    FSDP2 a tag has each rank's shards, under the names of a model on one process."""
    assert [losses[2:] for losses in whole] == pool.run(runs.resumed, tmp_path, sharded, own, timeout=60)
    assert ["checkpoint_2", "checkpoint_3"] == names(tmp_path)
    tag = open_checkpoint(tmp_path / "checkpoints" / "checkpoint_3")
    assert {"model/0.weight", "optim/0.weight/exp_avg"} <= tag.metadata.keys()
    assert tag.manifest is not None
    assert sharded == bool(tag.manifest.leaders)


def test_what_would_be_one_ranks_part_is_refused(tmp_path: Path, pool: RankPool) -> None:
    """With what takes its place."""
    for fsdp, registered in pool.run(runs.refused, tmp_path):
        assert "fsdp_version=2" in fsdp
        assert "prepare it as a model" in registered


def test_a_save_of_the_main_process_alone_is_refused_soon(tmp_path: Path, pool: RankPool) -> None:
    """Inside ``if accelerator.is_main_process:``, while the other waits for it. The next save works."""
    said, _ = pool.run(runs.main_process_alone, tmp_path, timeout=120)
    assert "rank 1 has gone on without it" in said
    assert ["checkpoint_0"] == names(tmp_path)
