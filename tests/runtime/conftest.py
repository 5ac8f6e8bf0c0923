"""Where the attempts of these tests are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.memory import MemoryStorage


@pytest.fixture
def disk(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def store() -> MemoryStorage:
    return MemoryStorage()
