"""How a copied tag becomes visible: as a saved one does, but what an interrupted copy brought is kept for the next try.

Where directories can be renamed, files gather out of sight, in a folder that is named after the tag; where they cannot,
in place, without the ``done`` that would make them a tag.
"""

from __future__ import annotations

from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.layout.names import DONE, HIDDEN, MARKER
from nxd_ckpt.runtime import journal, lease
from nxd_ckpt.runtime.paths import staging_dir
from nxd_ckpt.runtime.session import Session
from nxd_ckpt.storage.base import Storage

COPIES = f"{HIDDEN}/copies"


def copies_folder(storage: Storage, tag: str) -> str:
    """Where the files of a copy are written."""
    return f"{COPIES}/{tag}" if storage.renames else tag


def make_room(session: Session, tag: str) -> None:
    """Before the first file: a tag that is to be replaced in place is one no more, and what is unfinished goes."""
    storage = session.storage
    folder = copies_folder(storage, tag)
    if not storage.renames:
        storage.remove(f"{tag}/{DONE}")
    storage.discard_unfinished(folder)
    storage.make_dir(folder)
    storage.link_new(f"{folder}/{MARKER}", b"1")  # says of remains that they are a checkpoint's


def publish(session: Session, tag: str, order_time: float) -> None:
    """Make the tag visible, and that durable. Raises SaveFailed, OSError."""
    storage, attempt = session.storage, session.attempt(1)
    if session.lease is not None:
        lease.require(storage, session.lease)
    if not storage.renames:
        if not storage.link_new(f"{tag}/{DONE}", b"%d" % order_time):
            raise SaveFailed(f"{storage.url}/{tag} was completed by another job meanwhile; it is left as it is")
        return
    folder = copies_folder(storage, tag)
    storage.write(f"{folder}/{DONE}", b"1")
    storage.set_time(f"{folder}/{DONE}", order_time)
    storage.sync_dir(folder)
    storage.rename(folder, staging_dir(attempt))
    journal.publish(storage, attempt, tag)
