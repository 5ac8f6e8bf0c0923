"""What ckpt-chaos says of our plug-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.plain, pytest.mark.once, pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.mark.parametrize("target", ["hf_trainer", "accelerate_loop", "lightning_trainer"])
def test_a_run_goes_on_from_the_newest_whole_checkpoint_wherever_a_save_is_killed(target: str, tmp_path: Path) -> None:
    """With the weights of a run that nothing interrupted."""
    from tests.judges.chaos import judged  # only here: it imports three frameworks

    assert {"PASS"} == {*judged(target, tmp_path, ours=True)}
