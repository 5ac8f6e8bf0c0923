"""The end of the process: open objects are closed, and an unreported failure becomes the exit code."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import Protocol

from nxd_ckpt.effects import in_forked_children

logger = logging.getLogger("nxd_ckpt")


class Closable(Protocol):
    """The methods of a Checkpointer that end it."""

    def close(self) -> None:
        """Finish, and raise failures that were not raised before."""

    def abandon(self) -> None:
        """Finish this rank's part after an exception; never raises."""


_open: dict[int, Closable] = {}
# In a forked child the open objects, and their threads, are its parent's.
in_forked_children(_open.clear)


def close_at_exit(closable: Closable) -> None:
    """Keep ``closable``, and close it when the process ends, unless `forget` comes first."""
    _open[id(closable)] = closable


def forget(closable: Closable) -> None:
    """Do not close ``closable`` at the end of the process: it is closed."""
    _open.pop(id(closable), None)


@atexit.register
def _at_exit() -> None:
    """Close everything; after an exception give the other ranks only a short grace."""
    crashed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    failed = False
    for closable in list(_open.values()):
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
