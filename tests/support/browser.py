"""A real browser without a window, where one is installed (Debian: apt install chromium)."""

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
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _open(page, picture, f"--screenshot={picture}", scheme, f"--window-size={width},{height}")
    return picture.read_bytes()


def printed(page: Path, paper: Path) -> bytes:
    """Print a page to the ``paper``, a PDF; return its bytes. Skips the test as :func:`screenshot` does."""
    _open(page, paper, f"--print-to-pdf={paper}")
    return paper.read_bytes()


def content(page: Path) -> str:
    """Open a page, and return its elements as they are after its scripts ran. Skips the test as `screenshot` does."""
    return _open(page, page, "--dump-dom").decode()


def _open(page: Path, output: Path, *options: str) -> bytes:
    browser = next(filter(None, map(shutil.which, _NAMES)), None)
    if browser is None:
        pytest.skip("no Chromium is installed: pages are not opened in a browser (apt install chromium)")
    profile = f"--user-data-dir={output.parent / 'profile'}"
    command = [browser, *_OPTIONS, profile, *options, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, timeout=600).stdout
