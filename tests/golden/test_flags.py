"""Tags of version 0.1 whose manifests have a flag as a caller passed it, as an int, a string or null: they load."""

from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer, load_checkpoint, open_checkpoint
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.tag.equality import difference


@pytest.mark.parametrize("flag", ["1", "0", "null", "True"])
def test_a_tag_with_a_flag_that_is_no_bool(golden_of_flags: Path, flag: str) -> None:
    """AWS' llama script passes an int as ``use_xser``; nothing of these tags loaded with the version that wrote them.

    They were made by it: ``save_checkpoint(flag, "step_1", model, optimizer, None, {"steps": 1}, use_xser=flag)``.
    """
    directory = golden_of_flags / flag
    expected = torch.load(golden_of_flags / f"{flag}.pt", weights_only=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert {"steps": 1} == load_checkpoint(directory, None, model, optimizer)
    assert None is difference(expected, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert () == verify_checkpoint(directory).problems
    assert (flag in ("1", "True")) is open_checkpoint(directory).opened.parts.use_xser
    with Checkpointer(directory) as checkpointer:
        assert [1] == checkpointer.all_steps()
