"""Garbage collection, paused while many lasting objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_pauses: list[None] = []
"""An entry for each thread that paused the collection, and will resume it."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection inside.

    Walking all objects again and again while thousands of new ones are made, none of them garbage, takes longer than
    making them. A child that is forked meanwhile collects its own (see `effects`).
    """
    if not gc.isenabled():
        yield
        return
    _pauses.append(None)
    gc.disable()
    try:
        yield
    finally:
        _pauses.pop()
        gc.enable()


def collect_in_child() -> None:
    """Start the collection again in a forked child, which has no thread that paused it."""
    if _pauses:
        gc.enable()
