"""transformers' Trainer with our checkpoints on two ranks, under DDP and under FSDP2."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import load_checkpoint, open_checkpoint
from tests.integrations import transformers_ranks as runs
from tests.integrations.transformers_run import Tiny, TinyConfig
from tests.support.rank_pool import RankPool

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as started:
        yield started


@pytest.fixture(scope="module", params=["ddp", "sharded", "full"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, form: str) -> Path:
    return tmp_path_factory.mktemp(form)


@pytest.fixture(scope="module")
def whole(form: str, pool: RankPool, directory: Path) -> list[runs.Seen]:
    """What each rank sees in a run that nothing interrupts."""
    return pool.run(runs.whole, directory, form, timeout=100)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint*"))


@pytest.mark.parametrize("own", [False, True], ids=["ours", "transformers"])
def test_a_resumed_run_is_the_same_run(
    own: bool, form: str, tmp_path: Path, pool: RankPool, whole: list[runs.Seen]
) -> None:
    """Losses, and the weights that each rank holds, equal those of a run that was not stopped, also from checkpoints
    that transformers wrote."""
    if own and form == "ddp":
        pytest.skip("transformers cannot resume its own there: it loads to the device cpu:0, which torch refuses")
    assert whole == pool.run(runs.resumed, tmp_path, form, own, timeout=100)
    assert ["checkpoint-4"] == names(tmp_path)


def test_what_a_checkpoint_holds(form: str, directory: Path, whole: list[Any]) -> None:
    """Hugging Face's files, unless FSDP's are sharded; with FSDP the tag has the model too, by shards."""
    place = directory / "checkpoint-4"
    tag = open_checkpoint(place)
    assert "optim/net.0.weight/exp_avg" in tag.metadata
    assert (form != "ddp") == ("model/net.0.weight" in tag.metadata)
    assert (form != "sharded") == (place / "model.safetensors").is_file()
    model = Tiny(TinyConfig()) if form == "sharded" else Tiny.from_pretrained(place)
    if form == "sharded":
        load_checkpoint(directory, "checkpoint-4", model)
    held = [rank[1] for rank in whole]
    saved = [parameter.flatten().tolist() for parameter in model.parameters()]
    assert saved == (held[0] if form == "ddp" else [first + second for first, second in zip(*held, strict=True)])


def test_the_best_model_is_loaded_at_the_end(form: str, tmp_path: Path, pool: RankPool) -> None:
    """From the checkpoint that is called the best, which stays."""
    for name, held in pool.run(runs.best, tmp_path, form, timeout=100):
        assert name in names(tmp_path)
        assert held
