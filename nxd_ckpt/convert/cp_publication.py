"""How a copied tag becomes visible: as a saved one does, but what an interrupted copy brought is kept for the next try.

Where directories can be renamed, files gather out of sight, in a folder that is named after the tag; where they cannot,
in place, without the ``done`` that would make them a tag.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.layout.names import DONE, HIDDEN, MARKER
from nxd_ckpt.runtime.paths import staging_dir
from nxd_ckpt.runtime.save.publication import InPlace, Publication, Staged
from nxd_ckpt.runtime.save.session import Session

COPIES = f"{HIDDEN}/copies"


@dataclass(frozen=True)
class StagedCopy(Staged):
    """For file systems: a staging directory of its own, which no claim of the directory sweeps."""

    @property
    def folder(self) -> str:
        return f"{COPIES}/{self.tag}"

    def begin(self, session: Session) -> None:
        super().begin(session)
        session.storage.discard_unfinished(self.folder)
        session.storage.make_dir(self.folder)

    def publish(self, session: Session, order_time: float) -> None:
        session.require()
        session.storage.rename(self.folder, staging_dir(self.attempt))
        Staged(self.attempt, self.tag, self.overwrite).publish(session, order_time)


@dataclass(frozen=True)
class InPlaceCopy(InPlace):
    """For stores without renames. ``attempt`` is that of the save which is copied; empty for a tag of NxD's.

    Such a tag gets NxD's own ``done``: ours says of a tag that it has a manifest.
    """

    def begin(self, session: Session) -> None:
        storage = session.storage
        session.require()
        if not self.overwrite and storage.is_file(f"{self.tag}/{DONE}"):
            raise SaveFailed(f"{storage.url}/{self.tag} was completed by another job meanwhile; it is left as it is")
        storage.remove(f"{self.tag}/{DONE}")  # what is to be replaced is a checkpoint no more
        storage.discard_unfinished(self.tag)
        storage.make_dir(self.tag)
        storage.link_new(f"{self.tag}/{MARKER}", b"1")  # says of what an interruption leaves whose it is

    def publish(self, session: Session, order_time: float) -> None:
        if self.attempt:
            super().publish(session, order_time)
            return
        session.require()
        self.put(session.storage, DONE, b"1")
        session.storage.sync_dir(self.tag)


def copy_publication(session: Session, tag: str, overwrite: bool, saved: str | None) -> Publication:
    """That of this session's one copy, of the attempt ``saved``. Whether a tag may be replaced was asked before."""
    if session.storage.renames:
        return StagedCopy(session.attempt(1), tag, overwrite)
    return InPlaceCopy(saved or "", tag, overwrite)
