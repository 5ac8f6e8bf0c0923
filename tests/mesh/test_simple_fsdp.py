"""SimpleFSDP, by TorchTitan and by parametrizations, alone and with tensor parallelism, to and from other jobs."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from nxd_ckpt import open_checkpoint, save_checkpoint
from tests.mesh import simple_fsdp
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="TorchTitan is in the plain environment")

PAIRS = [
    ("simple", "fsdp"),
    ("simple x tp", "parametrized"),
    ("parametrized", "simple x tp"),
    ("fsdp", "simple"),
    pytest.param("simple 0.2.2", "simple hsdp", marks=pytest.mark.soak),
    pytest.param("simple hsdp", "plain", marks=pytest.mark.soak),
    pytest.param("fsdp", "parametrized", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
@pytest.mark.one_in(2)
def test_what_a_job_saved_another_loads(gloo_ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    """Bit for bit, on four ranks; names in the tag are the model's own."""
    expected = gloo_ranks.run(simple_fsdp.save, tmp_path, saved)[0]
    found = gloo_ranks.run(simple_fsdp.load, tmp_path, loaded)[0]
    assert None is difference(expected, found)
    assert set(open_checkpoint(tmp_path).model_state()) == set(simple_fsdp.plain(0).state_dict())


@pytest.mark.parametrize("others", [True, False])
def test_torchs_calls_take_it_too(gloo_ranks: RankPool, tmp_path: Path, others: bool) -> None:
    """nxd_ckpt.dcp saves what a Checkpointer loads under FSDP2, and the other way round."""
    expected = gloo_ranks.run(simple_fsdp.save, tmp_path, "simple x tp", others)[0]
    found = gloo_ranks.run(simple_fsdp.load, tmp_path, "fsdp" if others else "simple", not others)[0]
    assert None is difference(expected, found)


def test_tags_of_one_process_go_both_ways(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """neuronx-distributed's files: whole tensors, without a mesh."""
    model, optimizer = simple_fsdp.trained("plain")
    save_checkpoint(tmp_path, "step_1", model, optimizer)
    expected = simple_fsdp.whole(model, optimizer)
    for name in ("simple x tp", "parametrized"):
        assert None is difference(expected, gloo_ranks.run(simple_fsdp.load, tmp_path, name)[0])
    expected = gloo_ranks.run(simple_fsdp.save, tmp_path / "back", "parametrized")[0]
    assert None is difference(expected, simple_fsdp.load(0, tmp_path / "back", "plain"))


def test_names_of_parametrizations_in_older_tags_load(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """They were saved with ``parametrizations.`` in them."""
    found = gloo_ranks.run(simple_fsdp.load_former, tmp_path)[0]
    assert None is difference(found["expected"], found["found"])


def test_parametrizations_that_compute_keep_their_names(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Their parameter has other values than the module's: no plain model may take it for its own."""
    assert [["KeyMismatch"]] * 4 == gloo_ranks.run(simple_fsdp.load_halved, tmp_path)
