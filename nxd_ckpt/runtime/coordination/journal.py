"""Putting a finished staging directory into place, also over an existing tag.

A new tag is one atomic rename. Replacing a tag takes two (the old one out, the new one in), so the swap is announced
in a journal first; whoever opens or lists the directory after a crash finishes or undoes it:

=============================  ==================================================
found with the journal present  state, and what recovery does
=============================  ==================================================
tag and staging                 nothing moved yet: forget the swap, the old tag stays
no tag, staging                 the old one is out: put the new one in
tag, no staging                 the new one is in: only the journal remains
no tag, no staging              the staging is lost: put the old one back
=============================  ==================================================
"""

from __future__ import annotations

import errno
import json
import logging
from contextlib import suppress

from nxd_ckpt.core.keys import checked_name
from nxd_ckpt.core.tags import validate_tag
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.layout.names import HIDDEN
from nxd_ckpt.runtime.coordination import intents
from nxd_ckpt.runtime.coordination.control_files import read_note, set_aside
from nxd_ckpt.runtime.paths import JOURNAL, STAGING, TRASH, staging_dir, trash_file
from nxd_ckpt.storage.base import Storage

logger = logging.getLogger("nxd_ckpt")


def publish(storage: Storage, attempt: str, tag: str) -> None:
    """Rename the complete, synced staging directory of ``attempt`` to ``tag`` and make that durable.

    Raises OSError, and leaves things as they were: what is not durable must not stay visible, and the tag that it was
    to replace must not stay away.
    """
    recover(storage)  # an earlier swap of this job may have been left for later
    replaces = storage.is_dir(tag)
    try:
        if replaces:
            storage.make_dir(TRASH)
            storage.write(JOURNAL, json.dumps({"attempt": attempt, "tag": tag}).encode())
            storage.sync_dir(HIDDEN)
            storage.rename(tag, trash_file(attempt, tag))
        storage.rename(staging_dir(attempt), tag)
        _sync(storage)
    except OSError:
        _undo(storage, attempt, tag)
        raise
    if replaces:
        try:
            _forget(storage)
        except OSError as error:
            # The new tag is in place and durable; a journal that says so too late moves nothing.
            logger.warning("%s: could not drop %s: %s", storage.url, JOURNAL, error)
        discard_trash(storage)


def _undo(storage: Storage, attempt: str, tag: str) -> None:
    """Take the new tag away and put back the one that it was to replace, as far as the storage lets us.

    The journal stays if this fails: whoever opens the directory next tries again.
    """
    staging, aside = staging_dir(attempt), trash_file(attempt, tag)
    try:
        if storage.is_dir(tag) and not storage.is_dir(staging):
            storage.rename(tag, staging)
        if storage.is_dir(aside):
            storage.rename(aside, tag)
        _sync(storage)
        _forget(storage)
    except OSError as error:
        logger.error("%s: a failed save of %r could not be undone yet: %s", storage.url, tag, error)


def recover(storage: Storage) -> None:
    """Finish or undo a swap that a crash interrupted. Safe to call at any time, by several processes at once.

    A journal that names no swap is set aside, and with it the trash: a tag that it was about may be there.
    """
    try:
        announced = _announced(storage)
        if announced is None:
            return
        attempt, tag = announced
        staging, aside = staging_dir(attempt), trash_file(attempt, tag)
        # Another process may recover at the same time: whoever loses the race finds the file gone, and that is fine.
        with suppress(FileNotFoundError, FileExistsError):
            if not storage.is_dir(tag):
                storage.rename(staging if storage.is_dir(staging) else aside, tag)
    except (MalformedFile, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ELOOP:
            raise
        set_aside(storage, JOURNAL, error)
        if storage.is_dir(TRASH) and storage.list(TRASH):
            set_aside(storage, TRASH, f"a tag that was being replaced may be in it, as {JOURNAL} does not tell")
        return
    _sync(storage)
    _forget(storage)


def is_open(storage: Storage) -> bool:
    """Whether a swap was announced, and not finished yet; also where the journal is damaged."""
    try:
        storage.size(JOURNAL)
    except FileNotFoundError:
        return False
    except MalformedFile:
        return True
    return True


def _announced(storage: Storage) -> tuple[str, str] | None:
    """Attempt and tag of the swap in the journal. Raises MalformedFile."""
    fields = read_note(storage, JOURNAL)
    if fields is None:
        return None
    try:
        return checked_name(fields["attempt"]), validate_tag(fields["tag"])
    except (KeyError, ValueError) as error:
        raise MalformedFile(f"{storage.url}/{JOURNAL}: it names no swap ({type(error).__name__}: {error})") from error


def remove_tag(storage: Storage, tag: str, attempt: str) -> None:
    """Make a tag invisible with one rename, then delete it."""
    storage.make_dir(TRASH)
    storage.rename(tag, trash_file(attempt, tag))
    storage.sync_dir("")


def discard_trash(storage: Storage) -> None:
    """Delete what was renamed away. Failures are left for the next time: nothing visible depends on it.

    While a journal is there, an old tag may be among it that has to be put back.
    """
    with suppress(OSError):
        if is_open(storage):
            return
        for entry in storage.list(TRASH):
            with suppress(OSError):
                intents.clear(storage, f"{TRASH}/{entry.name}")


def _sync(storage: Storage) -> None:
    storage.sync_dir("")
    for source in (STAGING, TRASH):
        if storage.is_dir(source):
            storage.sync_dir(source)


def _forget(storage: Storage) -> None:
    storage.remove(JOURNAL)
    storage.sync_dir(HIDDEN)
