"""OLMo-core, the real one: we read what its functions wrote, and they read what we write."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from nxd_ckpt import convert, open_checkpoint
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.support.rank_pool import RankPool
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


@pytest.mark.once
def test_ranks_under_fsdp2_exchange_checkpoints_with_it(tmp_path: Path, pair: RankPool) -> None:
    """Ours resume from what its function wrote, it from a tag of a mesh, model and optimizer; and torch's own
    ``dcp_to_torch_save`` makes one file of that."""
    from tests.torch_dcp import olmo

    expected = pair.run(olmo.saved_on_ranks, tmp_path)[0]
    convert(tmp_path / "olmo", tmp_path / "of_olmo" / "step_1", to="tag", optimizer_form="plain")
    convert(tmp_path / "ours" / "step_1", tmp_path / "dcp", to="dcp")
    assert [[expected] * 2] * 2 == pair.run(olmo.resumed_on_ranks, tmp_path)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert expected["model"] == ranks.gathered(whole["model"])
    assert expected["optim"]["state"] == ranks.gathered(whole["optim"]["state"])
