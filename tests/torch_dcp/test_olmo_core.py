"""OLMo-core, the real one: we read what its functions wrote, and they read what we write."""

from pathlib import Path

import pytest

from nxd_ckpt import convert, open_checkpoint
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.torch_dcp import ranks

pytestmark = pytest.mark.both

STAGES = [["up.weight", "up.bias"], ["down.weight", "scale", "steps_seen"]]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.one_in(2)
def test_a_checkpoint_goes_through_a_tag_of_other_sizes_and_back(tmp_path: Path, flat: bool) -> None:
    """Saved by OLMo-core, as a ZeRO-1 tag of two ranks, resharded, as a DCP directory, loaded by OLMo-core."""
    from tests.torch_dcp import olmo

    expected = olmo.saved(tmp_path / "olmo", flat)
    convert(tmp_path / "olmo", tmp_path / "two", to="tag", dp=2, optimizer_form="zero1")
    assert () == verify_checkpoint(tmp_path, "two").problems
    assert expected["model"] == ranks.gathered(open_checkpoint(tmp_path, "two").model_state(0))
    convert(tmp_path / "two", tmp_path / "three", to="tag", dp=3, pp=2, stages=STAGES)
    convert(tmp_path / "three", tmp_path / "again", to="dcp", flatten_optimizer_state=flat)
    assert expected == olmo.resumed(tmp_path / "again", flat)
