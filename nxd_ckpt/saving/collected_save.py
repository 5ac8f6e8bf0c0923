"""One attempt on a tag whose votes its caller collects: torch DCP, or the processes of a conversion.

They tell each other of every failure, so that no vote is cast in the directory, and nobody waits there for a verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from nxd_ckpt.commit.commit import Commit, commit
from nxd_ckpt.commit.publication import Publication, publication_of
from nxd_ckpt.commit.session import Session
from nxd_ckpt.coordination import intents, journal
from nxd_ckpt.coordination.control_files import JOURNAL, staging_dir
from nxd_ckpt.coordination.environment import versions
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.errors import CheckpointError

logger = logging.getLogger("nxd_ckpt")


class CollectedSave:
    """The next attempt of the ``session``: `begin` on rank 0, then all write as its ``publication`` says, `complete`.

    `discard` ends it in any case; `complete` and `discard` are rank 0's too.
    """

    def __init__(self, session: Session, tag: str, overwrite: bool | None) -> None:
        session.counter += 1
        self.session: Session = session
        self.publication: Publication = publication_of(session, session.counter, tag, overwrite)

    def begin(self) -> None:
        """Make room, before any rank writes. Raises SaveFailed if the tag must not be saved."""
        self.publication.begin(self.session)

    def commit(self, topology: Topology, votes: Sequence[Vote], parts: Parts, **facts: Any) -> None:
        """Make the tag of the ranks in ``topology`` visible; ``facts`` are further fields of `Commit`.

        Errors of `commit.commit` pass, with nothing visible.
        """
        session, publication = self.session, self.publication
        try:
            commit(session, topology, votes, Commit(publication, parts, versions=versions(), **facts))
        except OSError as error:
            where = f"{session.storage.url}/{publication.tag}"
            raise CheckpointError(f"could not complete {where}: {type(error).__name__}: {error}") from error

    def discard(self) -> None:
        """Remove what is left of the attempt, once no rank writes for it. A visible tag stays."""
        session, storage = self.session, self.session.storage
        try:
            if storage.is_file(JOURNAL):
                return  # an unfinished swap, which the next process to open the directory finishes from these files
            session.require()
            intents.clear(storage, staging_dir(self.publication.attempt), session.confirm)
            journal.discard_trash(storage, session.run_id, session.confirm)
        except (OSError, CheckpointError) as error:  # the next job removes it
            logger.warning("could not clean up %s: %s", storage.url, error)
