"""OLMo-core, the real one: we read what its functions wrote, and they read what we write."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_ckpt import open_checkpoint
from nxd_ckpt.convert import from_dcp, reshard, to_dcp
from nxd_ckpt.verify import verify_checkpoint
from tests.torch_dcp import ranks

pytestmark = pytest.mark.plain

STAGES = [["up.weight", "up.bias"], ["down.weight", "scale", "steps_seen"]]


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_goes_through_a_tag_of_other_sizes_and_back(tmp_path: Path, flat: bool) -> None:
    """Saved by OLMo-core, as a ZeRO-1 tag of two ranks, resharded, as a DCP directory, loaded by OLMo-core."""
    from tests.torch_dcp import olmo

    expected = olmo.saved(tmp_path / "olmo", flat)
    from_dcp(tmp_path / "olmo", tmp_path / "two", dp=2)
    assert () == verify_checkpoint(tmp_path, "two").problems
    assert expected["model"] == ranks.gathered(open_checkpoint(tmp_path, "two").model_state(0))
    reshard(tmp_path / "two", tmp_path / "three", dp=3, pp=2, stages=STAGES)
    to_dcp(tmp_path / "three", tmp_path / "again", flatten_optimizer_state=flat)
    assert expected == olmo.resumed(tmp_path / "again", flat)
