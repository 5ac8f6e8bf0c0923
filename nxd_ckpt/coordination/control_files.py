"""The job's own small files, and their keys: all below one hidden directory that NxD's listing never sees.

Pins are among them, by which users keep tags regardless of the job's rules. A damaged file must never make a directory
unusable: it is renamed out of the way, with a warning.
"""

from __future__ import annotations

import errno
import uuid
import zlib
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.names import DONE, HIDDEN, MARKER
from nxd_ckpt.core.tags import order_text
from nxd_ckpt.effects import logger
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.hosts.directory import Names

LEASE = f"{HIDDEN}/lease.json"
HEARTBEAT = f"{HIDDEN}/heartbeat.json"
PLACE = f"{HIDDEN}/place"
CLAIMS = f"{HIDDEN}/claims"
JOURNAL = f"{HIDDEN}/journal.json"
STAGING = f"{HIDDEN}/staging"
VOTES = f"{HIDDEN}/votes"
TRASH = f"{HIDDEN}/trash"
RUNS = f"{HIDDEN}/runs"
PROBES = f"{HIDDEN}/probes"
COPIES = f"{HIDDEN}/copies"
PINS = f"{HIDDEN}/pins"
STATISTICS = f"{HIDDEN}/statistics"

UNFINISHED = ".unfinished"
"""End of the name in the trash of a directory that was no tag yet."""

ON_HOSTS = Names(HIDDEN, (STAGING, TRASH, PINS), MARKER, DONE)
"""Hosts of the files if each host has a disk of its own.

Intents and pins must outlive the host of rank 0: they tell a later job what to finish, and what to leave.
"""


def spare_file(run_id: str, rank: int, number: int) -> str:
    """Return the key of a file that reserves space and a name for a vote or verdict on a full disk."""
    return f"{PROBES}/{run_id}-rank_{rank}.spare{number or ''}"


def statistics_file(tag: str) -> str:
    return f"{STATISTICS}/{tag}.json"


def staging_dir(attempt: str) -> str:
    return f"{STAGING}/{attempt}"


def votes_dir(attempt: str) -> str:
    return f"{VOTES}/{attempt}"


def verdict_dir(attempt: str) -> str:
    """Return the key of the verdict's directory.

    It is not the votes' directory: every rank lists it again and again, and thousands of ranks vote.
    """
    return f"{votes_dir(attempt)}/verdict"


def verdict_file(attempt: str) -> str:
    return f"{verdict_dir(attempt)}/verdict.json"


def begin_file(attempt: str) -> str:
    """Return the key of the note that rank 0 has made room for the attempt.

    It is beside the verdict, because ranks wait for either.
    """
    return f"{verdict_dir(attempt)}/begin"


def appeal_file(attempt: str) -> str:
    """Return the key of rank 0's note of what ranks that count as replicas hold different values of."""
    return f"{verdict_dir(attempt)}/appeal.json"


def digests_file(attempt: str, rank: int) -> str:
    """Return the key of the digests, one by one, of what the rank wrote for others too."""
    return f"{verdict_dir(attempt)}/digests_{rank:05d}.json"


def outcome_file(attempt: str) -> str:
    """Return the key of the note that decides where no verdict came in time, see journal.decides."""
    return f"{verdict_dir(attempt)}/outcome"


def rank_file(attempt: str, rank: int, kind: str) -> str:
    """Return the key of a rank's file; ``kind`` is ``vote`` or ``progress``."""
    return f"{votes_dir(attempt)}/rank_{rank:05d}.{kind}.json"


def alive_file(attempt: str) -> str:
    """Return the key of the file that changes while rank 0 works on the attempt.

    It is beside the verdict, for the ranks that wait for that.
    """
    return f"{verdict_dir(attempt)}/alive"


def left_file(attempt: str, rank: int) -> str:
    """Return the key of the note that the rank no longer waits for rank 0's verdict. It has the tag of its save."""
    return f"{votes_dir(attempt)}/rank_{rank:05d}.left"


def spared_file(attempt: str) -> str:
    """Return the key of the note that a later job left this decided attempt to ranks that may still read its verdict.
    """
    return f"{votes_dir(attempt)}/spared"


def unfinished_dir(key: str) -> str:
    """Return the trash key to which an unfinished tag, or copy of one, is moved at once to be deleted."""
    return f"{TRASH}/{zlib.crc32(key.encode()):08x}{UNFINISHED}"


def trash_file(attempt: str, tag: str, order_time: float = 0.0) -> str:
    """Return the trash key for a tag that ``attempt`` takes away; ``order_time``, if known, says which save it is."""
    meant = f".{order_text(order_time)}" if order_time else ""
    return f"{TRASH}/{attempt}{meant}{_trash_end(tag)}"


def guests_dir(attempt: str, tag: str) -> str:
    """Return the trash key for a directory that somebody made under the tag's name while that was free."""
    return trash_file(f"{attempt}.guests", tag)


def meant_by(name: str) -> str:
    """Return the order time of the save that a trash name was made for, as text; "" if the name does not tell."""
    return name.rpartition("-")[0].rpartition("-")[2].partition(".")[2]


def is_trash_of(name: str, tag: str) -> bool:
    """Return whether ``name`` is a trash name of ``tag``."""
    return name.endswith(_trash_end(tag))


def _trash_end(tag: str) -> str:
    return f"-{zlib.crc32(tag.encode()):08x}"  # a tag may be as long as a name may be


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


def drop_statistics_of_lost_tags(storage: Storage) -> None:
    """Remove the statistics of tags that are gone. Two listings, however many tags there are."""
    kept = {statistics_file(entry.name) for entry in storage.list() if entry.is_dir}
    for entry in storage.list(STATISTICS):
        if f"{STATISTICS}/{entry.name}" not in kept:
            storage.remove(f"{STATISTICS}/{entry.name}")


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
