"""Commands that look at our own tags, check, copy, keep or remove them import no torch, and run where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nxd_ckpt import Checkpointer
from nxd_ckpt.cli.main import main

RUN = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, Absent())
from nxd_ckpt.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
raise SystemExit(code)
"""
"""Runs a command in an interpreter that has no torch."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory of three tags with user content."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path / "run") as saver:
        for step in range(3):
            saver.save(step, model, optimizer, user_content={"loss": 0.5}, metrics={"loss": 0.5})
    return tmp_path / "run"


def without_torch(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *map(str, words)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["list", "."], "3 tags, 3 complete"),
        (["inspect", "./step_2"], "loss"),
        (["verify", "--all", "."], "ok"),
        (["watch", "--once", "."], "step_2"),
        (["cp", "./step_1", "./copy"], "copied to"),
        (["prune", ".", "--last", "1"], "step_1"),
        (["pin", ".", "step_0"], "is pinned"),
        (["unpin", ".", "step_0"], "was not pinned"),
        (["rm", ".", "step_0"], "step_0 is removed"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_needs_no_torch(run: Path, words: list[str], says: str) -> None:
    """So a laptop or a login node can look, check and copy; it also takes a tenth of the time and of the memory."""
    done = without_torch(*(word.replace(".", str(run), 1) if word.startswith(".") else word for word in words))
    assert (0, "") == (done.returncode, done.stderr)
    assert says in done.stdout


def test_a_report_needs_none_once_the_values_are_counted(run: Path, tmp_path: Path) -> None:
    """The statistics that an earlier report stored are enough; without them it says what it needs, as ``diff`` does."""
    page = tmp_path / "page.html"
    for code, done in (
        (1, without_torch("report", run, "-o", page)),
        (2, without_torch("diff", run / "step_1", run / "step_2")),
    ):
        assert code == done.returncode
        assert "needs torch, which is not installed" in done.stderr
        assert "Traceback" not in done.stderr
    assert 0 == main(["report", str(run), "-o", str(page), "--quiet"])
    again = without_torch("report", run, "-o", page)
    assert (0, "", "3 tags, 0 problems" in again.stdout) == (again.returncode, again.stderr, True)
