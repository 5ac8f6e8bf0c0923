"""What ckpt-chaos says of our plug-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.plain, pytest.mark.once, pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.mark.parametrize(
    ("target", "verdicts"),
    [
        ("hf_trainer", {"PASS"}),
        ("accelerate_loop", {"PASS"}),
        # Its "last" is a second checkpoint, saved after the numbered one.
        ("lightning_trainer", {"PASS", "LOST_WORK"}),
    ],
)
def test_a_run_goes_on_wherever_a_save_is_killed(target: str, verdicts: set[str], tmp_path: Path) -> None:
    """From the newest checkpoint that is whole, with the weights of a run that nothing interrupted."""
    from tests.chaos.chaos import judged  # only here: it imports three frameworks

    assert verdicts == {*judged(target, tmp_path, ours=True)}
