"""Steps that were counted while the optimizer stood still: the run lost them, and the tag says so."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import examine_checkpoint, open_checkpoint, save_checkpoint
from nxd_ckpt.cli.main import main


def save_twice(
    directory: Path, optimizer: type[torch.optim.Optimizer], contents: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Two tags of one state after ten steps, which differ in their user content alone."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    live = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
    for _ in range(10):
        live.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
        live.step()
    for tag, content in zip(("a", "b"), contents, strict=True):
        save_checkpoint(directory, tag, model, live, user_content=content)


def severities(directory: Path) -> list[tuple[str, str]]:
    examination = examine_checkpoint(open_checkpoint(directory, "b"), before=open_checkpoint(directory, "a"))
    return [(one.severity, one.kind) for one in examination.findings]


@pytest.mark.parametrize(
    "contents",
    [
        ({"steps": 10}, {"steps": 20}),
        ({"steps": 1010}, {"steps": 1120}),
        ({"trainer": {"globalStep": 10}}, {"trainer": {"globalStep": 11}}),
        ({"micro_step": 80}, {"micro_step": 88}),
    ],
    ids=str,
)
def test_a_counter_that_moves_alone_is_a_problem(tmp_path: Path, contents: tuple[dict[str, Any], ...]) -> None:
    """The optimizer's state is that of the tag before, though a step or more were counted since."""
    save_twice(tmp_path, torch.optim.AdamW, contents)  # type: ignore[arg-type]
    assert ("problem", "steps") in severities(tmp_path)
    assert 1 == main(["doctor", str(tmp_path), "--quiet"])


def test_without_counts_of_the_optimizer_the_weights_show_it(tmp_path: Path) -> None:
    """SGD counts no steps: not one weight moved, though the user content counted ten."""
    save_twice(tmp_path, torch.optim.SGD, ({"steps": 10}, {"steps": 20}))
    assert [("problem", "weights")] == severities(tmp_path)


@pytest.mark.parametrize(
    "contents",
    [
        ({"micro_step": 80}, {"micro_step": 83}),  # within one step of eight batches each
        ({"save_steps": 10}, {"save_steps": 20}),  # a setting
        ({"steps": 10, "scaler": {"scale": 2.0}}, {"steps": 11, "scaler": {"scale": 1.0}}),  # a step that was skipped
        ({}, {}),
    ],
    ids=str,
)
def test_a_reason_makes_it_a_doubt(tmp_path: Path, contents: tuple[dict[str, Any], ...]) -> None:
    """Doubts are shown, and fail the command with --strict only."""
    save_twice(tmp_path, torch.optim.AdamW, contents)  # type: ignore[arg-type]
    assert [("doubt", "steps")] == [one for one in severities(tmp_path) if one[1] == "steps"]
    assert 1 == main(["doctor", str(tmp_path), "--quiet", "--strict"])
