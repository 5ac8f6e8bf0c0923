import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def work_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, of this test alone."""
    path = tmp_path_factory.mktemp("work")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path
