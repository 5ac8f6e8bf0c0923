"""accelerate and transformers with ``any_world_size``: what two ranks saved goes on on one, and the other way round."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nxd_ckpt.errors import IncompatibleState
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.integrations import accelerate_run, transformers_ranks
from tests.support.rank_pool import RankPool, WorkerError

pytestmark = pytest.mark.soak

Pools = dict[int, RankPool]
"""By world size."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with RankPool(1) as one, RankPool(2) as two:
        yield {1: one, 2: two}


@pytest.fixture(params=[(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    """The world that saved, and the one that goes on."""
    before, after = request.param
    return before, after


def require_refused(outcomes: list[object], before: int, after: int) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, WorkerError)
        assert isinstance(outcome.cause, IncompatibleState)
        assert f"saved with world size {before}, and this run has {after}" in str(outcome.cause)
        assert "any_world_size" in str(outcome.cause)


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_accelerate(sharded: bool, sizes: tuple[int, int], tmp_path: Path, pools: Pools) -> None:
    """Refused without the option. With it each rank has the saved parameters and optimizer, and what it saves then is
    complete, and of its own world size."""
    before, after = sizes
    state, *_ = pools[before].run(accelerate_run.saved, tmp_path, sharded, timeout=100)
    again = (accelerate_run.taken_over, tmp_path, sharded)
    require_refused(pools[after].run(*again, False, return_errors=True, timeout=100), before, after)
    assert [state] * after == pools[after].run(*again, True, timeout=100)
    assert not verify_checkpoint(tmp_path / "checkpoints" / "checkpoint_2").problems
    pools[after].run(*again, False, timeout=100)


@pytest.mark.parametrize("form", ["ddp", "sharded"])
def test_transformers(form: str, sizes: tuple[int, int], tmp_path: Path, pools: Pools) -> None:
    """The same of its Trainer."""
    before, after = sizes
    state, *_ = pools[before].run(transformers_ranks.saved, tmp_path, form, timeout=100)
    again = (transformers_ranks.taken_over, tmp_path, form)
    require_refused(pools[after].run(*again, False, return_errors=True, timeout=100), before, after)
    assert [state] * after == pools[after].run(*again, True, timeout=100)
    assert not verify_checkpoint(tmp_path / "checkpoint-4").problems
