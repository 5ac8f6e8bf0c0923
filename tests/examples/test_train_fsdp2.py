"""examples/train_fsdp2.py: a run on one mesh goes on from another one's checkpoint."""

import re
from pathlib import Path

import pytest
import torch

from examples.train_fsdp2 import Block
from tests.support.processes import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fsdp2.py"


def losses(directory: Path, ranks: int, *options: str) -> dict[int, float]:
    """The losses by step that rank 0 shows."""
    ended = run_ranks(EXAMPLE.read_text(), *[["--directory", directory, *options]] * ranks)
    assert [0] * ranks == [rank.returncode for rank in ended], ended
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", ended[0].stdout)}


def expected() -> dict[int, float]:
    """The same training in one process, without any mesh."""
    found = {}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), Block(), Block(), torch.nn.Linear(32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).reshape(2, 8) * 7 % 64
    for step in range(4):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[step + 1] = loss.item()
    return found


def test_a_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    """Four ranks of FSDP x TP, then two of FSDP alone: the losses are those of a run that nothing interrupted."""
    before = losses(tmp_path, 4, "--tp", "2", "--steps", "2")
    after = losses(tmp_path, 2, "--steps", "4")
    assert ([1, 2], [3, 4]) == (list(before), list(after))
    assert expected() == pytest.approx({**before, **after}, abs=2e-3)
