"""The demo: it succeeds, and it would not if the resumed run differed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nxd_ckpt

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("demo")


@pytest.mark.xla
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_in_a_save_resumes_as_the_same_run(tmp_path: Path) -> None:
    """The demo, shortened: every step's loss and the last checkpoint are equal, and nothing is left behind."""
    work = tmp_path / "work"
    work.mkdir()
    steps = 6
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--steps", str(steps), "--save_every", "1", "--layers", "1"]
    environment = os.environ | {"TMPDIR": str(work), "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert (0, "") == (ended.returncode, ended.stderr), ended.stdout
    table = [line.split() for line in ended.stdout.splitlines() if line.strip()[:1].isdigit() and "yes" in line]
    assert [str(step) for step in range(1, steps + 1)] == [row[0] for row in table]
    assert [] == list(work.glob("nxd_ckpt_demo_*"))


@pytest.mark.plain
def test_a_loss_that_differs_or_is_missing_is_found(demo: ModuleType) -> None:
    """A step counts as equal only if both runs have it, with the same bits."""
    expected = {1: "0x1.0p+0", 2: "0x1.1p+0", 3: "0x1.2p+0", 4: "0x1.3p+0"}
    actual = {1: "0x1.8p+0", 2: "0x1.1p+0", 3: "0x1.2000000000001p+0"}
    assert [3, 4, 5] == demo.steps_that_differ(expected, actual, 2, 5)


@pytest.mark.plain
def test_a_tensor_that_differs_in_one_bit_is_found(demo: ModuleType, tmp_path: Path) -> None:
    """The last checkpoints are compared by value and dtype, tensor by tensor."""
    first = {"a": torch.ones(3), "b": torch.zeros(2), "c": torch.ones(2)}
    second = {"a": torch.ones(3), "b": torch.tensor([0.0, 1e-45]), "c": torch.ones(2, dtype=torch.bfloat16)}
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    for name, model in (("first", first), ("second", second)):
        with nxd_ckpt.Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save("step_1", model, optimizer)
    opened = [nxd_ckpt.open_checkpoint(tmp_path / name) for name in ("first", "second")]
    expected = (3, ["rank 0: model_state: b", "rank 0: model_state: c"])
    assert expected == demo.tensors_that_differ(*opened)


@pytest.mark.plain
@pytest.mark.parametrize("script", ["train_llama.py", "llama.py", "parallel_layers.py"])
def test_the_training_script_knows_nothing_of_emulation(script: str) -> None:
    """It imports what exists on Trainium too: the emulation is around it, not in it."""
    imports = [
        name
        for node in ast.walk(ast.parse((EXAMPLES / script).read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    ]
    assert [] == [name for name in imports if "emulation" in name]
