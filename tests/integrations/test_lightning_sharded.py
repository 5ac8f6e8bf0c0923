"""Lightning's ModelParallelStrategy (FSDP2) with our checkpoints: on one rank, and on two."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nxd_ckpt import open_checkpoint
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations import lightning_sharded_run as runs
from tests.integrations.lightning_run import BATCHES, every_epoch, fit, weights
from tests.support.rank_pool import RankPool

LAST = "epoch=2-step=3.ckpt"
"""Of two ranks, which share an epoch's batches."""


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is the one rank of a group."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**runs.LAUNCHED, **ranks}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(runs.RANKS, env=runs.LAUNCHED) as started:
        yield started


@pytest.fixture(scope="module")
def whole(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Each rank's losses and weights in a run that nothing interrupts."""
    return pool.run(runs.whole, tmp_path_factory.mktemp("whole"))


def tags(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def joined(ranks: list[Any]) -> list[Any]:
    """The parameters of which two ranks hold the first and the last elements."""
    return [first + second for first, second in zip(*ranks, strict=True)]


def test_lightnings_tuner_saves_and_restores(tmp_path: Path, pool: RankPool, whole: list[Any]) -> None:
    """Under a hidden name, as Lightning's own strategy; nothing of that is left."""
    assert whole == pool.run(runs.tuned, tmp_path, timeout=300)
    assert [] == [path.name for path in tmp_path.glob(".lr_find*")]


def rest(whole: list[Any]) -> list[Any]:
    """What a run has from the third epoch on."""
    return [(losses[2:], held) for losses, held in whole]


@pytest.mark.usefixtures("alone")
def test_a_resumed_run_of_one_rank_is_the_same_run(tmp_path: Path) -> None:
    """Losses and weights equal those of a run that was not stopped; ModelCheckpoint says what stays. The tag's names
    are those of a run that is not sharded."""
    losses, held = runs.whole(0, tmp_path / "whole")
    assert (losses[2 * BATCHES :], held) == runs.resumed(0, tmp_path / "resumed")
    assert ["epoch=2-step=6.ckpt", "last.ckpt"] == tags(tmp_path / "resumed")
    tag = open_checkpoint(tmp_path / "resumed", "last.ckpt")
    assert {"model/net.0.weight", "optim/net.0.weight/exp_avg"} <= tag.metadata.keys()


@pytest.mark.usefixtures("alone")
def test_another_run_is_refused(tmp_path: Path) -> None:
    """Another precision or optimizer, before anything is loaded."""
    before, refused = runs.refused_to_go_on(tmp_path)
    for (complaint, held), expected in zip(refused, ["precision 32-true", "optimizers ['AdamW']"], strict=True):
        assert f"was saved with {expected}" in complaint
        assert before == held


@pytest.mark.soak
def test_the_data_of_ranks_in_the_middle_of_an_epoch(tmp_path: Path, pool: RankPool) -> None:
    """Lightning has the first rank's position for all of them. A warning says so."""
    for said in pool.run(runs.in_the_middle, tmp_path, timeout=300):
        assert "with other data than the saved run" in said


def test_copies_that_see_two_checkpoints_are_refused(tmp_path: Path, pool: RankPool) -> None:
    """With DDP each rank reads for itself; nothing is loaded."""
    for said, is_unchanged in pool.run(runs.of_two_saves, tmp_path, timeout=300):
        assert "rank 0 loads step 2 of epoch 1, rank 1 step 1 of epoch 0" in said
        assert is_unchanged


@pytest.mark.soak
def test_a_resumed_run_is_the_same_run(tmp_path: Path, pool: RankPool, whole: list[Any]) -> None:
    """Losses and weights of each rank equal those of a run that was not stopped, and a tag has each rank's shards."""
    assert rest(whole) == pool.run(runs.resumed, tmp_path)
    assert [LAST, "last.ckpt"] == tags(tmp_path)
    assert not verify_checkpoint(tmp_path, LAST).problems
    manifest = open_checkpoint(tmp_path, "last.ckpt").manifest
    assert manifest is not None
    assert runs.RANKS == manifest.topology.dp


@pytest.mark.soak
def test_a_run_of_lightnings_own_checkpoints_goes_on(tmp_path: Path, pool: RankPool, whole: list[Any]) -> None:
    """Its directories are read and dropped; one whose name a tag gets stays under another."""
    assert [held for _, held in whole] == [held for _, held in pool.run(runs.continued, tmp_path)]
    assert [LAST, "last-replaced.ckpt", "last.ckpt"] == tags(tmp_path)


@pytest.mark.soak
def test_checkpoints_go_from_one_process_to_ranks_and_back(tmp_path: Path, pool: RankPool) -> None:
    """Model and optimizer are cut, and put together again."""
    one = fit(every_epoch(tmp_path / "one"), epochs=2)
    ranks = pool.run(runs.loaded, tmp_path / "ranks", tmp_path / "one" / "last.ckpt")
    assert weights(one) == joined(ranks)
    saved = tmp_path / "ranks" / "again.ckpt"
    again = fit(every_epoch(tmp_path / "again"), epochs=2, ckpt_path=saved, callbacks=[])
    assert weights(one) == weights(again)
    assert open_checkpoint(tmp_path / "ranks", "weights.ckpt").parts.optimizer is None
    assert 2 * BATCHES == open_checkpoint(tmp_path / "one", "last.ckpt").user_content()["global_step"]


@pytest.mark.soak
def test_what_cannot_be_saved_is_refused(tmp_path: Path, pool: RankPool) -> None:
    """Rather than saved as something else."""
    expected = ["2 optimizers", "a hook has changed", "CheckpointIO is TorchCheckpointIO"]
    for found in pool.run(runs.refused, tmp_path):
        assert [True] * 3 == [part in message for part, message in zip(expected, found, strict=True)]


@pytest.mark.soak
def test_the_example_runs_and_goes_on(tmp_path: Path, pool: RankPool) -> None:
    """examples/train_lightning_fsdp2.py, twice."""
    pool.run(runs.example, tmp_path)
    assert ["epoch 1", "epoch 2"] == [line[:7] for line in pool.log(0).splitlines() if line[:5] == "epoch"]
    assert ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "last.ckpt"] == tags(tmp_path)
