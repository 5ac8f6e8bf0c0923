"""Running a command in this process, and a directory of checkpoints to run it on."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt.cli.main import main
from tests.cli.checkpoints import save_examples


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document that it printed."""
        found: dict[str, Any] = json.loads(self.out)
        return found


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("list", directory, "--json")``."""

    def run_command(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run_command


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What :func:`save_examples` saves. Shared: a test that changes something copies it first."""
    directory = tmp_path_factory.mktemp("cli") / "checkpoints"
    save_examples(directory)
    return directory


@pytest.fixture
def copied(examples: Path, tmp_path: Path) -> Path:
    """A copy of ``examples``, times included, to be changed."""
    shutil.copytree(examples, tmp_path / "copied")
    return tmp_path / "copied"
