"""Intents: what is about to happen to a tag where nothing can be renamed, noted before it happens.

Without renames a tag is filled, and emptied, one key after the other. So a small file names the tag first, and goes
last: in ``staging`` for a save, in ``trash`` for a removal. Whoever finds the intent of somebody who is gone asks for
the tag's ``done``. Where it is, the tag is complete: the save was committed, or nothing was taken away yet. Where it is
not, all that lies there is remains, which go. The same file of a file system is a directory of what is not a tag yet,
or no more; :func:`clear` ends either.
"""

from __future__ import annotations

import json

from nxd_ckpt.core.tags import validate_tag
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.layout.names import DONE
from nxd_ckpt.runtime.coordination.control_files import read_note
from nxd_ckpt.runtime.paths import STAGING
from nxd_ckpt.storage.base import Storage


def declare(storage: Storage, key: str, tag: str) -> None:
    """Note under ``key`` that ``tag`` is about to be filled or emptied."""
    folder = key.rpartition("/")[0]
    storage.make_dir(folder)
    storage.write(key, json.dumps({"tag": tag}).encode())
    storage.sync_dir(folder)


def saves_of(storage: Storage, tag: str) -> list[str]:
    """The attempts whose saves of ``tag`` are under way, or ended without having been cleared."""
    found = [entry.name for entry in storage.list(STAGING) if not entry.is_dir]
    return [attempt for attempt in found if _tag(storage, f"{STAGING}/{attempt}") == tag]


def clear(storage: Storage, key: str) -> None:
    """End what an intent announced, or remove a directory. Nobody may be at work there any more. Safe to repeat."""
    tag = _tag(storage, key) if storage.is_file(key) else None
    if tag is not None and not storage.is_file(f"{tag}/{DONE}"):
        storage.remove(tag)
        storage.discard_unfinished(tag)
    storage.remove(key)


def _tag(storage: Storage, key: str) -> str | None:
    """The tag that an intent names; None for one that is gone, or damaged: it was written whole, and names nothing."""
    try:
        fields = read_note(storage, key)
        return None if fields is None else validate_tag(fields["tag"])
    except (MalformedFile, KeyError, ValueError):
        return None
