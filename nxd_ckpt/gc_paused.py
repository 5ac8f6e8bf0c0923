"""Garbage collection, paused while many lasting objects are made."""

from __future__ import annotations

import gc

_pauses: list[None] = []
"""An entry for each thread that paused the collection, and will resume it."""


class gc_paused:
    """Context in which garbage collection is paused.

    Walking all objects again and again while thousands of new ones are made, none of them garbage, takes longer than
    making them. A child that is forked meanwhile collects its own (see `effects`).
    """

    __slots__ = ("_pauses",)

    def __enter__(self) -> None:
        self._pauses = gc.isenabled()
        if self._pauses:
            _pauses.append(None)
            gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._pauses:
            _pauses.pop()
            gc.enable()


def collect_in_child() -> None:
    """Start the collection again in a forked child, which has no thread that paused it."""
    if _pauses:
        gc.enable()
