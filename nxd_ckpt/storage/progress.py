"""Progress of long operations: a bar on a terminal after two seconds, and a line in the log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nxd_ckpt import effects
from nxd_ckpt.core.units import size
from nxd_ckpt.effects import logger

_PATIENCE = 2.0
"""Seconds before a bar is shown."""
_BETWEEN = 0.2
"""Seconds between two updates."""


class Counter:
    """Bytes done so far, counted by several threads."""

    def __init__(self) -> None:
        self.nbytes: int = 0
        self._lock = effects.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


def is_watched() -> bool:
    """Return whether somebody can see a bar: standard error is a terminal."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # there is none, it is closed, or it is an object of the program's
        return False


@contextmanager
def watched(what: str, total: int | None, done: Callable[[], int], shown: bool) -> Iterator[None]:
    """Show a bar of ``done()`` bytes on standard error within the block, from the third second on.

    ``total`` is the expected number of bytes, if it is known. A thread of its own updates the bar, so the work is not
    delayed. There is no bar unless it is to be ``shown`` and standard error is a terminal.
    """
    if not shown or not is_watched():
        yield
        return
    ended = effects.Event()
    thread = effects.Thread(target=_follow, args=(what, total, done, ended), name="nxd_ckpt-progress", daemon=True)
    is_shown = effects.has_started(thread)
    try:
        yield
    finally:
        ended.set()
        if is_shown:
            thread.join()


def report(what: str, where: str, nbytes: int, started: float) -> None:
    """Log one line for a finished phase. ``started``: by the monotonic clock, in seconds."""
    logger.info("%s %s: %s in %.2f s", what, where, size(nbytes), effects.monotonic() - started)


def _follow(what: str, total: int | None, done: Callable[[], int], ended: effects.Event) -> None:
    if ended.wait(_PATIENCE):
        return
    from tqdm import tqdm

    with tqdm(desc=what, total=total, initial=done(), unit="B", unit_scale=True, unit_divisor=1024) as bar:
        last = False
        while not last:
            last = ended.wait(_BETWEEN)
            bar.update((done() if total is None else min(done(), total)) - bar.n)
