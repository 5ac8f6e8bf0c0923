"""A disk whose renames take their time, so that what should wait for them is seen to wait."""

import time
from typing import Any

import pytest

from nxd_ckpt.storage.local import LocalStorage


def slow_renames(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each rename in a local directory take so many seconds more, until the test ends."""
    rename = LocalStorage.rename

    def slowly(*args: Any) -> None:
        time.sleep(seconds)
        rename(*args)

    monkeypatch.setattr(LocalStorage, "rename", slowly)
