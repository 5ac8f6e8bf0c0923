"""The end of open objects: of those that nobody holds any more, and of all at the end of the process.

A failure that nobody was told of becomes the exit code.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from weakref import ref

from nxd_ckpt import effects

logger = logging.getLogger("nxd_ckpt")

_PAUSE = 0.01


class Closable(Protocol):
    """The methods of a Checkpointer that end it."""

    def close(self) -> None:
        """Finish, and raise failures that were not raised before."""

    def abandon(self) -> None:
        """Finish this rank's part after an exception; never raises."""



_open: dict[int, Callable[[], Closable | None]] = {}
_ending: set[int] = set()
"""Those of them that end in the background, since nobody holds them any more."""
# In a forked child the open objects, and their threads, are its parent's.
effects.in_forked_children(_open.clear)
effects.in_forked_children(_ending.clear)


def close_at_exit(closable: Closable, *, while_held: bool = False) -> None:
    """Close it when the process ends, unless `forget` comes first; with ``while_held`` if somebody still holds it."""
    _open[id(closable)] = ref(closable) if while_held else lambda: closable


def open_objects() -> list[Closable]:
    """Return what is to be closed, in the order in which it was opened."""
    return [closable for get in list(_open.values()) if (closable := get()) is not None]


def close_unheld(closable: Closable, close: Callable[[], None]) -> None:
    """Close it in the background, since nobody holds it any more. Its finalizer calls this, on any thread, at any time.

    ``close`` does not raise a save's failure.
    """
    if id(closable) in _open:
        close_at_exit(closable)
        _ending.add(id(closable))
        try:
            # A Thread takes locks, which the interrupted code may hold.
            effects.start_new_thread(_end, (id(closable), close))
        except RuntimeError:  # the interpreter exits, and closes it
            _ending.discard(id(closable))


def _end(number: int, close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:  # nobody else would tell of it
        logger.exception("nxd_ckpt: unexpected error")
    finally:
        _ending.discard(number)


def settle_unheld(sign: Callable[[], None]) -> bool:
    """Wait until everything is closed that nobody holds any more; ``sign`` is called again and again meanwhile.

    Returns whether there was anything.
    """
    gc.collect()
    had_any = bool(_ending)
    while _ending:
        sign()
        effects.sleep(_PAUSE)
    return had_any


def forget(closable: Closable) -> None:
    """Do not close ``closable`` at the end of the process: it is closed."""
    _open.pop(id(closable), None)


@atexit.register
def _at_exit() -> None:
    """Close everything; after an exception give the other ranks only a short grace."""
    crashed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    failed = False
    for closable in open_objects():
        if crashed:
            closable.abandon()
            continue
        try:
            closable.close()
        except Exception as error:  # any exception must reach the exit code
            failed = True
            logger.critical("nxd_ckpt: a checkpoint was not saved: %s: %s", type(error).__name__, error)
    if failed:
        # An exception in an exit handler is only printed: a scheduler would take the job for a success.
        logging.shutdown()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)
