"""The job's own small files, and the pins by which users keep tags regardless of its rules.

A damaged one must never make a directory unusable: it is renamed out of the way, with a warning.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable
from typing import Any

from nxd_ckpt.coordination.paths import PINS, PROBES, RUNS, STAGING, TRASH, VOTES
from nxd_ckpt.core import document
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.storage.base import Storage

logger = logging.getLogger("nxd_ckpt")

_NO_DIRECTORY = {errno.EEXIST, errno.ENOTDIR, errno.ELOOP}
"""Errors of making a directory where something else, or a link, is in its place."""


def read_note(storage: Storage, key: str) -> dict[str, Any] | None:
    """Return the fields of a small document, or None if there is none. Raises MalformedFile for anything else."""
    try:
        data = storage.read(key, NOTE)
    except FileNotFoundError:
        return None
    return document.small(data, f"{storage.url}/{key}")


def set_aside(storage: Storage, key: str, why: object) -> None:
    """Rename ``key``, with a warning; remove it in a store, which cannot rename.

    It may be gone already. Raises OSError if it cannot be moved.
    """
    new_key = f"{key}.damaged-{uuid.uuid4().hex[:8]}"
    try:
        if storage.renames:
            storage.rename(key, new_key)
        else:
            storage.remove(key)
    except FileNotFoundError:
        return  # another process was faster
    outcome = f"moved to {new_key}: remove it when it is no longer needed" if storage.renames else "removed"
    logger.warning("%s/%s is damaged, and was %s (%s)", storage.url, key, outcome, why)


def drop_entries_of_lost_tags(storage: Storage, folder: str, place: Callable[[str], str]) -> None:
    """Remove the entries of ``folder``, where each tag has its ``place(tag)``, whose tags are gone.

    Two listings, however many tags there are.
    """
    kept = {place(entry.name) for entry in storage.list() if entry.is_dir}
    for entry in storage.list(folder):
        if f"{folder}/{entry.name}" not in kept:
            storage.remove(f"{folder}/{entry.name}")


def make_places(storage: Storage) -> None:
    """Make the directories of a job, durably.

    Anything else in place of one, also a link, is set aside.
    """
    storage.make_dir("")
    for folder in (HIDDEN, STAGING, VOTES, TRASH, RUNS, PROBES):
        try:
            storage.make_dir(folder)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            set_aside(storage, folder, error)
            storage.make_dir(folder)


def pin(storage: Storage, tag: str) -> None:
    """Keep ``tag`` regardless of rules. A pin is for the name: a later save of the same name is pinned too."""
    storage.make_dir(PINS)
    storage.write(f"{PINS}/{tag}", b"1")
    storage.sync_dir(PINS)


def unpin(storage: Storage, tag: str) -> bool:
    """Leave ``tag`` to the rules. True if it was pinned."""
    was_pinned = tag in pinned(storage)
    if was_pinned:
        storage.remove(f"{PINS}/{tag}")
        storage.sync_dir(PINS)
    return was_pinned


def pinned(storage: Storage) -> set[str]:
    """Return the names of pinned tags."""
    return {entry.name for entry in storage.list(PINS) if not entry.is_dir}
