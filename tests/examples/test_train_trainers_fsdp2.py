"""The examples of accelerate and transformers under FSDP2: torchrun starts them, and what two ranks saved goes on on
four."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nxd_ckpt.emulation.launcher import free_ports
from nxd_ckpt.tag.verify import verify_checkpoint

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]


def shown(example: str, ranks: int, *arguments: str) -> str:
    """What it prints."""
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_ports()[0])]
    command = [sys.executable, *launch, str(ROOT / "examples" / example), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert 0 == ended.returncode, ended.stderr
    return ended.stdout


def expected() -> list[float]:
    """The losses of accelerate's example in one process, without any plug-in."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(1, 5):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_accelerate(tmp_path: Path) -> None:
    """The losses are those of one process that nothing interrupts."""
    example, directory = "train_accelerate_fsdp2.py", ["--directory", str(tmp_path)]
    text = shown(example, 2, *directory, "--steps", "2") + shown(example, 4, *directory, "--steps", "4")
    found = [float(loss) for loss in re.findall(r"step \d loss (\S+)", text)]
    assert expected() == pytest.approx(found, abs=1e-3)
    for name in ("checkpoint_2", "checkpoint_3"):
        assert not verify_checkpoint(tmp_path / "checkpoints" / name).problems


def test_transformers(tmp_path: Path) -> None:
    """It goes on from the last checkpoint, and two stay."""
    example, directory = "train_transformers_fsdp2.py", ["--directory", str(tmp_path)]
    assert "step 2 on 2 ranks" in shown(example, 2, *directory, "--steps", "2")
    assert "step 4 on 4 ranks, went on from step 2" in shown(example, 4, *directory, "--steps", "4")
    assert ["checkpoint-3", "checkpoint-4"] == sorted(path.name for path in tmp_path.glob("checkpoint*"))
    for name in ("checkpoint-3", "checkpoint-4"):
        assert not verify_checkpoint(tmp_path / name).problems
