"""Intents: notes of a planned change to a tag, for storages without renames.

Without renames a tag is filled, and emptied, one key after the other. So a small file names the tag before that begins,
and is removed when it is finished: in ``staging`` for a save, in ``trash`` for a removal. A job that finds a dead job's
intent looks for the tag's ``done``. If it is there, and of the attempt that filled the tag, the tag is complete: the
save was committed, or its removal had not begun. If not, everything in the tag is removed, except files of others (see
coordination.guests) in a tag that was being filled. On a file system a directory has the same name, with the files of a
future or former tag; `clear` removes either.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from nxd_ckpt.coordination.control_files import COPIES, STAGING, TRASH, read_note, unfinished_dir
from nxd_ckpt.coordination.guests import remove_all_but_guests
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.names import DONE, MARKER
from nxd_ckpt.core.tags import validate_tag
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import Storage


def declare(storage: Storage, key: str, tag: str) -> None:
    """Note under ``key`` that ``tag`` is about to be filled or emptied."""
    folder = key.rpartition("/")[0]
    storage.make_dir(folder)
    storage.write(key, json.dumps({"tag": tag}).encode())
    storage.sync_dir(folder)


def saves_of(storage: Storage, tag: str) -> list[str]:
    """Return the attempts whose saves of ``tag`` are under way, or ended without being cleared."""
    return _of(storage, STAGING, tag)


def is_being_removed(storage: Storage, tag: str) -> bool:
    """Return whether the removal of ``tag`` is under way, or ended without being cleared."""
    return bool(_of(storage, TRASH, tag))


def _of(storage: Storage, folder: str, tag: str) -> list[str]:
    names = [entry.name for entry in storage.list(folder) if not entry.is_dir]
    return [name for name in names if _tag(storage, f"{folder}/{name}") == tag]


def clear(storage: Storage, key: str, confirm: Callable[[], bool]) -> None:
    """Finish the change that an intent announced, or remove a directory. Safe to repeat.

    Nobody may be working there any more. ``confirm`` checks that this still holds, once the files of an intent's tag
    are known.
    """
    tag = _tag(storage, key) if not storage.renames or storage.is_file(key) else None
    if tag is not None and not _is_complete(storage, tag):
        of_all = key.startswith(f"{TRASH}/")
        went = storage.remove_if(f"{tag}/{DONE}", confirm)  # before what it would make a tag
        went = went and (storage.remove_if(tag, confirm) if of_all else remove_all_but_guests(storage, tag, confirm))
        if not (went and confirm()):
            return
        storage.discard_unfinished(tag)
    if storage.renames and key.rpartition("/")[0] in (STAGING, COPIES) and storage.is_dir(key):
        key = _moved_away(storage, key)
        if storage.is_file(f"{key}/{DONE}"):
            # It was a tag, if only for a moment: its name must be gone for good before its files are.
            storage.sync_dir("")
    storage.remove(key)


def _is_complete(storage: Storage, tag: str) -> bool:
    """Return whether a tag has ``done``, of the attempt that filled it.

    A request of an earlier attempt that was given up may still happen, and bring its ``done`` into the files of a later
    one. In place the marker names the attempt that fills the tag.
    """
    try:
        done = storage.read(f"{tag}/{DONE}", NOTE)
    except FileNotFoundError:
        return False
    try:
        marker = storage.read(f"{tag}/{MARKER}", NOTE)
    except FileNotFoundError:
        return True
    ended, filling = (content.partition(b" ")[2] for content in (done, marker))
    return not ended or not filling or ended == filling


def _moved_away(storage: Storage, key: str) -> str:
    """Move a directory to the trash and return its key there.

    It is moved as a whole: a rank that wakes up in it must find all its files, or none.
    """
    away = unfinished_dir(key)
    storage.remove(away)  # an earlier one
    with suppress(FileNotFoundError):
        storage.rename(key, away)
    return away


def _tag(storage: Storage, key: str) -> str | None:
    """Return the tag that an intent names; None if the intent is gone, or damaged."""
    try:
        fields = read_note(storage, key)
        return None if fields is None else validate_tag(fields["tag"])
    except (MalformedFile, KeyError, ValueError):
        return None
