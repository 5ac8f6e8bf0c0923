"""A real browser without a window, where one is installed (Debian: apt install chromium)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


def screenshot(page: Path, picture: Path, width: int, height: int, *, dark: bool = False) -> bytes:
    """Open a page and write the ``picture``, a PNG; return its bytes.

    Skips the test, and says so, where no browser is installed.
    """
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("no Chromium is installed: pages are not opened in a browser (apt install chromium)")
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    where = [f"--user-data-dir={picture.parent / 'profile'}", f"--screenshot={picture}"]
    command = [browser, *_OPTIONS, *scheme, *where, f"--window-size={width},{height}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return picture.read_bytes()
