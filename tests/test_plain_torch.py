"""Plain CPU torch is enough: nothing outside the XLA adapter and the emulation needs torch-xla or NxD."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.plain, pytest.mark.once]

REPOSITORY = Path(__file__).parents[1]

# Leads the program of a fresh interpreter: imports of these are noted and fail, as on a machine without them.
BLOCKER = """
import importlib, sys

tried = []

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch_xla", "torch_neuronx", "libneuronxla", "neuronx_distributed"}:
            tried.append(name)
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Absent())
"""


def _run_without_xla(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + program, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_package_imports_without_torch_xla() -> None:
    """``import nxd_ckpt`` works without torch-xla and neuronx-distributed, and does not try for them."""
    outcome = _run_without_xla("import nxd_ckpt\nprint(tried)")
    assert (0, "[]\n") == (outcome.returncode, outcome.stdout), outcome.stderr


def test_every_reader_and_tool_imports_without_torch_xla() -> None:
    """Each module but the emulation, the XLA adapter, integrations and the ``__main__`` entry points does the same."""
    others = ("nxd_ckpt.emulation", "nxd_ckpt.live.torch_xla", "nxd_ckpt.integrations.")
    names = (
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((REPOSITORY / "nxd_ckpt").rglob("*.py"))
    )
    plain = [name for name in names if not name.startswith(others) and not name.endswith("__main__")]
    assert "nxd_ckpt.errors" in plain
    outcome = _run_without_xla(
        "for name in sys.argv[1:]: importlib.import_module(name)\nprint(tried)", *plain
    )
    assert (0, "[]\n") == (outcome.returncode, outcome.stdout), outcome.stderr


def test_torch_xla_cannot_be_imported_where_it_is_blocked() -> None:
    """The interpreter of the tests above cannot import torch-xla even where it is installed."""
    outcome = _run_without_xla("import torch_xla")
    assert "blocked: torch_xla" in outcome.stderr
