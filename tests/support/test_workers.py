"""``pytest --workers``: nothing that goes wrong in a worker is lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.plain, pytest.mark.once]

FILES = {
    "conftest.py": "import pytest\n@pytest.fixture(scope='session')\ndef shared():\n yield 1\n raise OSError('late')\n",
    "test_a.py": "def test_well(shared, tmp_path): assert shared\ndef test_wrong(): assert 3 == 4\n",
    "test_b.py": "import os\ndef test_dies(): os._exit(0)\ndef test_after(): pass\n",
    "test_c.py": "import pytest, warnings\ndef test_skips(): pytest.skip('x')\ndef test_warns(): warnings.warn('')\n",
    "test_d.py": "def test_well(): print('seen')\n",
}


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "pytest", "-p", "tests.support.workers", "-p", "no:cacheprovider", "-ra"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [*program, f"--rootdir={directory}", *arguments, str(directory)]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def test_what_goes_wrong_in_a_worker_is_reported(tmp_path: Path) -> None:
    """Failures, also of what the session shares, a worker that dies, skips and warnings; the others go on."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    ended = run(tmp_path, "--workers", "2")
    assert 1 == ended.returncode, ended.stdout + ended.stderr
    failed = dict(re.findall(r"^FAILED (\S+) - (.*)$", ended.stdout, re.MULTILINE))
    assert "assert 3 == 4" == failed.pop("test_a.py::test_wrong")
    assert "the worker process ended" == failed.pop("test_b.py::test_dies")
    assert 1 == len(failed), failed  # the test that its worker ran last
    assert "OSError: late" in ended.stdout
    assert "SKIPPED [1] test_c.py:2: x" in ended.stdout
    assert "UserWarning" in ended.stdout
    assert "3 failed, 3 passed, 1 skipped, 1 warning" in ended.stdout


def test_the_first_failure_ends_all_workers_on_request(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_wrong(): assert 3 == 4\n")
    (tmp_path / "test_b.py").write_text("import time\ndef test_long(): time.sleep(600)\n")
    ended = run(tmp_path, "--workers", "2", "-x")
    assert (1, True) == (ended.returncode, "stopping after 1 failures" in ended.stdout), ended.stdout + ended.stderr
