"""The demo: it succeeds, and it would not if the resumed run differed."""

import ast
import os
import subprocess
import sys
from argparse import Namespace
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
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("demo_compare")


@pytest.mark.soak
@pytest.mark.xla
@pytest.mark.timeout(1520)
@pytest.mark.parametrize("store", [[], ["--store", "s3"]], ids=["local", "s3"])
def test_a_run_that_is_killed_in_a_save_resumes_as_the_same_run(tmp_path: Path, store: list[str]) -> None:
    """The demo, shortened: losses and the last checkpoint are equal, on other sizes and under FSDP2 too, and nothing is
    left behind."""
    work = tmp_path / "work"
    work.mkdir()
    steps = 6
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--steps", str(steps), "--save_every", "1", "--layers", "1"]
    environment = os.environ | {"TMPDIR": str(work), "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command + store, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert (0, "") == (ended.returncode, ended.stderr), ended.stdout
    whole, *elsewhere = (
        [line.split() for line in part.splitlines() if line.strip()[:1].isdigit() and len(line.split()) > 3]
        for part in ended.stdout.split("relative difference")
    )
    assert [str(step) for step in range(1, steps + 1)] == [row[0] for row in whole if "yes" in row]
    # On other sizes, under FSDP2, and back, where it goes on one step later.
    assert [["5", "6"], ["5", "6"], ["6"]] == [[row[0] for row in rows] for rows in elsewhere]
    # 12 in the model, two of them tied; and for each of 11 parameters three states and a step.
    assert 3 == ended.stdout.count("the same 56 global tensors")
    assert [] == list(work.glob("nxd_ckpt_demo_*"))


@pytest.mark.both
def test_a_tensor_that_differs_in_one_bit_is_found(compare: ModuleType, tmp_path: Path) -> None:
    """The last checkpoints are compared by value and dtype, tensor by tensor."""
    first = {"a": torch.ones(3), "b": torch.zeros(2), "c": torch.ones(2)}
    second = {"a": torch.ones(3), "b": torch.tensor([0.0, 1e-45]), "c": torch.ones(2, dtype=torch.bfloat16)}
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    for name, model in (("first", first), ("second", second)):
        with nxd_ckpt.Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save("step_1", model, optimizer)
    opened = [nxd_ckpt.open_checkpoint(tmp_path / name) for name in ("first", "second")]
    expected = (3, ["rank 0: model_state: b", "rank 0: model_state: c"])
    assert expected == compare.tensors_that_differ(*opened)


def test_a_checkpoint_that_is_removed_while_it_is_looked_at_is_passed_over(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may remove it between the listing and the look, on a busy machine."""
    job = import_module("demo_job").Job("killed", tmp_path, str(tmp_path / "run"), [], module=["this"])
    nxd_ckpt.save_checkpoint(tmp_path / "run", "step_2", {"w": torch.ones(2)})
    monkeypatch.setattr(job, "complete_tags", lambda: ["step_1", "step_2"])
    with job:
        job.wait()
    assert ["step_2"] == list(job.saves)


@pytest.mark.both
def test_other_sizes_must_give_the_same_tensors_and_losses(compare: ModuleType) -> None:
    """One tensor, or one loss beyond the tolerance, and the demo says that the crossing failed."""
    report = import_module("demo").report_crossing
    expected = {3: (2.0).hex(), 4: (2.0).hex()}
    rounded = expected | {3: (2 + compare.LOSS_TOLERANCE).hex()}
    wrong = expected | {4: (2 + 3 * compare.LOSS_TOLERANCE).hex()}
    cases = [([], rounded), (["model/a"], rounded), ([], wrong), ([], {3: expected[3]})]
    found = [report("dp4 x tp1", 4, 2, 1, tensors, expected, losses) for tensors, losses in cases]
    assert [True, False, False, False] == found


@pytest.mark.both
def test_parameters_of_fsdp2_are_the_master_weights(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are compared with these, and rounded with the weights; one bit, or a tensor that is missing, is found."""
    weight, moment, step = torch.tensor([1.0, 1.0 + 2**-20]), torch.randn(2), torch.tensor(3.0)
    by_hand = {"model/w": weight.bfloat16(), "optim/w/master_weights": weight, "optim/w/exp_avg": moment}
    monkeypatch.setattr(compare, "global_tensors", lambda *_: by_hand | {"optim/w/step": step})
    for name, saved in (("same", weight), ("other", weight.bfloat16().float())):
        state = {"state": {0: {"exp_avg": moment, "step": step}}, "param_groups": [{"params": [0]}]}
        with nxd_ckpt.Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save("step_1", {"w": saved}, state)
    opened = [nxd_ckpt.open_checkpoint(tmp_path / name, saved_param_names=[[["w"]]]) for name in ("same", "other")]
    found = [compare.fsdp2_tensors_that_differ(tmp_path, nxd_ckpt.Topology(), one) for one in opened]
    assert [(4, []), (4, ["optim/w/master_weights"])] == found


@pytest.mark.xla
def test_a_run_resumes_from_another_directory_until_its_own_has_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same command starts the crossing to other sizes, and goes on after it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    find_checkpoint = import_module("train_llama").find_checkpoint
    own, other = str(tmp_path / "own"), str(tmp_path / "other")

    def found(loading_step: str) -> Any:
        return find_checkpoint(Namespace(checkpoint_dir=own, resume_from=other, loading_step=loading_step))

    assert (own, None) == found("latest_if_exists")
    save_step(other, 1)
    save_step(other, 2)
    assert (other, "step_2") == found("latest_if_exists")
    assert (other, "step_1") == found("1")
    assert (own, None) == found("-1")
    save_step(own, 3)
    assert (own, "step_3") == found("latest_if_exists")


def save_step(directory: str, step: int) -> None:
    with nxd_ckpt.Checkpointer(directory) as checkpointer:
        checkpointer.save(f"step_{step}", {"weight": torch.ones(1)})


@pytest.mark.both
@pytest.mark.parametrize("script", ["train_llama.py", "llama.py", "llama_training.py", "parallel_layers.py"])
def test_the_training_script_knows_nothing_of_emulation(script: str) -> None:
    """It imports what exists on Trainium too: the emulation is around it, not in it."""
    imports = [
        name
        for node in ast.walk(ast.parse((EXAMPLES / script).read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    ]
    assert [] == [name for name in imports if "emulation" in name]
