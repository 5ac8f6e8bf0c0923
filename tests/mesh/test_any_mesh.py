"""FSDP2 and tensor parallelism on real gloo ranks: what one mesh saved, another one loads, bit for bit."""

from pathlib import Path

import pytest

from nxd_ckpt import open_checkpoint
from nxd_ckpt.cli.inspection import View, inspection
from tests.mesh import jobs
from tests.support.rank_pool import RankPool
from tests.tag.equality import difference


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("fsdp", "fsdp x tp"),
        ("fsdp x tp", "hsdp"),
        ("hsdp", "tp"),
        ("tp", "unsharded fsdp"),
        ("unsharded fsdp", "hsdp x tp"),
        ("hsdp x tp", "plain"),
        ("plain", "fsdp x tp"),
    ],
)
@pytest.mark.one_in(3)
def test_what_a_mesh_saved_another_loads(gloo_ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    """Model and AdamW, with two param groups, tied and uneven tensors and a buffer."""
    expected = gloo_ranks.run(jobs.save, tmp_path, saved)[0]
    found = gloo_ranks.run(jobs.load, tmp_path, loaded)[0]
    assert None is difference(expected, found)


def test_stages_are_put_together(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """What two pipeline stages saved, each on a mesh of its own, is one model: the same stages load it, and a reader
    has the tensors of both, and both meshes."""
    expected = gloo_ranks.run(jobs.pipeline, tmp_path, "step_1")
    found = gloo_ranks.run(jobs.pipeline, tmp_path, "step_1", True)
    for one, other in zip(expected, found, strict=True):
        assert None is difference(one, other)
    stages = {**expected[0], **expected[2]}
    model = {name.removeprefix("model/"): value for name, value in stages.items() if name.startswith("model/")}
    held = open_checkpoint(tmp_path).model_state()
    assert None is difference(dict(sorted(model.items())), dict(sorted(held.items())))
    assert [{"names": ["fsdp"], "shape": [2], "count": 2}] == inspection(str(tmp_path), None, View())["meshes"]
