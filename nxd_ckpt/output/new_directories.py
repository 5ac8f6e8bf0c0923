"""Directories that a command makes for its output: after a failure none of them is left."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from nxd_ckpt.coordination.paths import LEASE, PLACE
from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.output.locations import Location
from nxd_ckpt.storage.system import missing_directories, remove_empty
from nxd_ckpt.storage.urls import is_url


def directories_to_make(place: Location) -> list[str]:
    """Return the local directories above ``place`` that do not exist yet, the innermost first."""
    return [] if is_url(place.directory) else missing_directories(place.directory)


def remove_unused(directories: Sequence[str]) -> None:
    """Remove directories, the innermost first, unless they hold more than what a job without a tag leaves.

    A job that uses one of them by now keeps it: it has a lease, or another file, there. Links were made by somebody
    else, and are not followed.
    """
    for directory in directories:
        hidden = os.path.join(directory, HIDDEN)
        if os.path.lexists(os.path.join(directory, LEASE)) or os.path.islink(directory) or os.path.islink(hidden):
            continue
        with suppress(OSError):
            os.unlink(os.path.join(directory, PLACE))
        remove_empty(hidden)
        with suppress(OSError):
            os.rmdir(directory)


@contextmanager
def leaving_none(place: Location) -> Iterator[None]:
    """Remove the directories above ``place`` that are made within the block, if it raises."""
    made = directories_to_make(place)
    try:
        yield
    except BaseException:
        remove_unused(made)
        raise
