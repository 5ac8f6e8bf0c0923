"""docs/filters.md is true: its code runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nxd_ckpt
from tests.docs.markdown import REPOSITORY, code_blocks

pytestmark = [pytest.mark.plain, pytest.mark.once]

PAGE = REPOSITORY / "docs" / "filters.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, and print what their comments say."""
    monkeypatch.chdir(tmp_path)
    page = "\n".join(code_blocks(PAGE, "python"))
    try:
        exec(compile(page, str(PAGE), "exec"), {"__name__": "page"})
    finally:
        nxd_ckpt.close_checkpointers()
    assert re.findall(r"^ *print\(.*\)  # (.*)$", page, re.MULTILINE) == capsys.readouterr().out.splitlines()
