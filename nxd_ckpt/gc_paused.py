"""Python's collection of garbage, which waits where much is made that is kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from nxd_ckpt import effects


@contextmanager
def garbage_left() -> Iterator[None]:
    """No garbage collection inside: walking all objects again and again while thousands of new ones are made, none of
    them garbage, takes longer than making them. A child that is forked meanwhile collects its own."""
    if not gc.isenabled():
        yield
        return
    _leaving.append(effects.get_ident())
    gc.disable()
    try:
        yield
    finally:
        _leaving.remove(effects.get_ident())
        gc.enable()


_leaving: list[int] = []
"""The threads that leave garbage lie, and enable its collection again; a forked child has none of them."""


def _collect_in_child() -> None:
    if _leaving:
        gc.enable()


effects.in_forked_children(_collect_in_child)
