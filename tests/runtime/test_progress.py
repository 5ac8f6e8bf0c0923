"""A bar for what takes long, on a terminal only; and lines in the log."""

from __future__ import annotations

import io
import threading
import time

import pytest

from nxd_ckpt.runtime import progress
from nxd_ckpt.runtime.progress import Counter, watched

pytestmark = [pytest.mark.plain, pytest.mark.once]


class Terminal(io.StringIO):
    """Standard error, as if somebody watched."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes too long."""
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_BETWEEN", 0.01)


def shown(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch, *, shown: bool = True) -> str:
    """What is written to ``stderr`` while 3 of 4 MiB are done."""
    monkeypatch.setattr("sys.stderr", stderr)
    counter = Counter()
    with watched("load", 4 * 2**20, lambda: counter.nbytes, shown):
        counter.add(3 * 2**20)
        deadline = time.monotonic() + 10
        while "load" not in stderr.getvalue() and time.monotonic() < deadline and shown and stderr.isatty():
            time.sleep(0.01)
    return stderr.getvalue()


def test_a_bar_says_how_much_is_done(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what, how many bytes of how many."""
    text = shown(Terminal(), monkeypatch)
    assert "load:  75%" in text
    assert "3.00M/4.00M" in text


@pytest.mark.parametrize("wanted", [True, False])
def test_no_bar_where_nobody_looks(impatient: None, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """Not in a log, and not where it is not wanted: not a byte, and no thread."""
    before = threading.active_count()
    assert "" == shown(io.StringIO() if wanted else Terminal(), monkeypatch, shown=wanted)
    assert before == threading.active_count()


def test_what_is_done_soon_needs_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing flickers for a tenth of a second."""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    with watched("load", 1, lambda: 1, True):
        pass
    assert "" == stderr.getvalue()
