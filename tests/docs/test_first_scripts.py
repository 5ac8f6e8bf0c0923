"""Pages that begin with a whole script: each runs, and goes on where it was when it is run again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import DOCS, code_blocks
from tests.support.processes import run_ranks

pytestmark = [pytest.mark.plain, pytest.mark.once]


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
    script, reading = code_blocks(DOCS / "torchtitan.md", "python")
    for steps in ("1 to 4", "5 to 8"):
        ended = run_ranks(script, [], [])
        assert [0, 0] == [rank.returncode for rank in ended], ended
        assert re.search(rf"^steps {steps} on 2 ranks: loss \S+$", ended[0].stdout, re.MULTILINE)
    assert {"step-6", "step-8"} == {path.name for path in Path("outputs/checkpoint").glob("step-*")}
    exec(compile(reading, "page", "exec"), {"__name__": "page"})
    assert "True 500\n" == capsys.readouterr().out


def test_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("pytorch_lightning")
    monkeypatch.chdir(tmp_path)
    transformers, lightning = code_blocks(DOCS / "integrations.md", "python")
    for script in (transformers, transformers, lightning):
        exec(compile(script, "page", "exec"), {"__name__": "page"})
    printed = [line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"steps? \d.*", line)]
    assert ["steps 1 to 4", "steps 5 to 8", "step 8", "step 16"] == printed
