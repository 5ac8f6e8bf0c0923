"""What commands print is readable on a terminal of 80 columns, and one line for each thing where no terminal is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.golden.checkpoints import saved


def test_every_command_fits_80_columns(
    run: Run, examples: Path, golden: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lines are broken at spaces, and rows of tables between columns; no word is lost, whatever the width."""
    nxd = saved(golden, "f_dp2_tp2_bf16_master_avoid_lp_xser").directory
    commands: list[tuple[str | Path, ...]] = [
        ("list", examples),
        *(("inspect", directory) for directory in (nxd, examples)),
        *(("inspect", directory, "--tensors") for directory in (nxd, examples)),
        *(("inspect", directory, "--by-prefix") for directory in (nxd, examples)),
        ("verify", nxd),
        ("diff", nxd, examples, "--quiet"),
        ("doctor", nxd),
        ("watch", nxd, "--once"),
        ("prune", examples, "--last", "1", "--dry-run"),
        ("convert", nxd / "step_3", tmp_path / "whole", "--to", "files", "--dry-run"),
    ]
    wide = [run(*command).out for command in commands]
    _on_a_terminal(monkeypatch)
    for command, expected in zip(commands, wide, strict=True):
        narrow = run(*command).out
        too_long = [line for line in narrow.splitlines() if len(line) > 80 and " " in line.strip()]
        assert [] == too_long, command
        if command[0] not in ("list", "diff"):  # a list leaves columns out, and ages change
            assert _words(expected) == _words(narrow), command


def _on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def _words(text: str) -> list[str]:
    """But for ages."""
    return sorted(word for word in text.split() if not word.isdigit() and word not in ("s", "min", "h", "d"))


def test_a_row_goes_on_below(run: Run, examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal; what is piped to another program is one line."""
    assert "FILE" in _row(run("inspect", examples, "--tensors").out, "NAME")
    _on_a_terminal(monkeypatch)
    lines = run("inspect", examples, "--tensors").out.splitlines()
    head = next(number for number, line in enumerate(lines) if "NAME" in line)
    assert "FILE" not in lines[head]
    assert lines[head + 1].startswith("      FILE")
    assert any(line.startswith("      model/") for line in lines)


def _row(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)
