"""Pages that begin with a whole script: each runs, and goes on where it was when it is run again."""

import os
import re
import signal
from pathlib import Path

import pytest

from nxd_ckpt import Checkpointer
from tests.docs.markdown import DOCS, code_blocks
from tests.support.processes import run_ranks


def test_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On four ranks, then on two."""
    monkeypatch.chdir(tmp_path)
    (script,) = code_blocks(DOCS / "tutorial-fsdp2.md", "python")
    losses = []
    for ranks, steps in ((4, "1 to 4"), (2, "5 to 8")):
        ended = run_ranks(script, *[[]] * ranks)
        assert [0] * ranks == [rank.returncode for rank in ended], ended
        (printed,) = re.findall(rf"^steps {steps} on {ranks} ranks: loss (\S+)$", ended[0].stdout, re.MULTILINE)
        losses.append(float(printed))
    assert losses[1] < losses[0]


def test_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On two ranks, twice; the second run goes on after the first. Then what reads a tag without TorchTitan."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: see the Makefile")
    monkeypatch.chdir(tmp_path)
    script = (DOCS.parent / "examples" / "train_torchtitan.py").read_text()
    (reading,) = code_blocks(DOCS / "torchtitan.md", "python")
    for steps in ("1 to 4", "5 to 8"):
        ended = run_ranks(script, [], [])
        assert [0, 0] == [rank.returncode for rank in ended], ended
        assert re.search(rf"^steps {steps} on 2 ranks: loss \S+$", ended[0].stdout, re.MULTILINE)
    assert {"step-6", "step-8"} == {path.name for path in Path("outputs/checkpoint").glob("step-*")}
    exec(compile(reading, "page", "exec"), {"__name__": "page"})
    assert "True 500\n" == capsys.readouterr().out


def test_a_script_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It stops at a signal, passes over the damaged tag of that step, and goes on to its end; rules keep the tags."""
    monkeypatch.chdir(tmp_path)
    (script,) = code_blocks(DOCS / "whole-script.md", "python")
    step = Checkpointer.step

    def signalled(checkpointer: Checkpointer, number: int) -> bool:
        if number == 120:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(checkpointer, number)

    monkeypatch.setattr(Checkpointer, "step", signalled)
    exec(compile(script, "page", "exec"), {"__name__": "page"})
    (file,) = Path("checkpoints/step_120/model").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(compile(script, "page", "exec"), {"__name__": "page"})
    assert ["steps 1 to 120", "steps 101 to 400"] == capsys.readouterr().out.splitlines()
    with Checkpointer("checkpoints") as checkpointer:
        best, steps = checkpointer.best_step("loss"), checkpointer.all_steps()
    assert {200, 300, 350, 400, best} <= {*steps}
