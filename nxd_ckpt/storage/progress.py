"""Telling how far something is: a bar on a terminal for what takes longer than two seconds, and a line in the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nxd_ckpt import effects
from nxd_ckpt.core.units import size

logger = logging.getLogger("nxd_ckpt")

_PATIENCE = 2.0
"""Seconds for which nobody needs a bar."""
_BETWEEN = 0.2
"""Seconds between two looks."""


class Counter:
    """Bytes done so far, counted by several threads."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = effects.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


def is_watched() -> bool:
    """Whether there is anyone to show a bar to: standard error is a terminal."""
    return sys.stderr.isatty()


@contextmanager
def watched(what: str, total: int | None, done: Callable[[], int], shown: bool) -> Iterator[None]:
    """Within, a bar on standard error shows how many bytes are ``done()``, from the third second on.

    ``total`` is how many there will be, if that is known. A thread of its own looks there from time to time: what is
    watched is not held up. There is none unless the bar is to be ``shown`` and standard error is a terminal.
    """
    if not shown or not is_watched():
        yield
        return
    ended = effects.Event()
    thread = effects.Thread(target=_follow, args=(what, total, done, ended), name="nxd_ckpt-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def report(what: str, where: str, nbytes: int, started: float) -> None:
    """The one line that a finished phase leaves in the log. ``started``: by the monotonic clock, in seconds."""
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
