"""Unfinished saves of a directory, as its control files show them to anyone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.paths import STAGING, VOTES, begin_file, staging_dir, verdict_dir, verdict_file, votes_dir
from nxd_ckpt.core import votes
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import Storage


@dataclass(frozen=True)
class ObservedSave:
    """A save that is not decided yet.

    Attributes:
        attempt: ``RUN-COUNTER``.
        tag: its tag; None where that is unknown until the first rank has written its part.
        ranks_done: number of ranks that have written all their files, or failed to.
        nbytes: bytes of the files written so far; None in a store, where they lie in the tag itself.
        is_dead: True if its process on this host is gone; None if its process is on another host.
    """

    attempt: str
    tag: str | None
    ranks_done: int
    nbytes: int | None
    is_dead: bool | None


def saves_in_flight(storage: Storage) -> list[ObservedSave]:
    """List the saves that ranks have begun to write, by the names of their attempts, oldest first. Only reads."""
    holder = lease.read(storage)
    attempts = {entry.name for place in (STAGING, VOTES) for entry in storage.list(place)}
    saves = []
    for attempt in sorted(attempts, key=_age):
        if storage.is_file(verdict_file(attempt)):
            continue
        is_ours = holder is not None and attempt.startswith(f"{holder.run_id}-")
        runs = holder.holder_runs_here() if holder is not None and is_ours else False
        if not _is_begun(storage, attempt):
            continue
        vote_files = [entry.name for entry in storage.list(votes_dir(attempt)) if entry.name.endswith(".vote.json")]
        nbytes = _nbytes(storage, staging_dir(attempt)) if storage.renames else None
        tag = _tag(storage, attempt, vote_files)
        saves.append(ObservedSave(attempt, tag, len(vote_files), nbytes, None if runs is None else not runs))
    return saves


def _is_begun(storage: Storage, attempt: str) -> bool:
    """Return False for the next attempt, of which there are only the empty directories of votes and verdict."""
    noted = [*storage.list(votes_dir(attempt)), *storage.list(verdict_dir(attempt))]
    return storage.is_dir(staging_dir(attempt)) or any(not entry.is_dir for entry in noted)


def _tag(storage: Storage, attempt: str, vote_files: list[str]) -> str | None:
    with suppress(FileNotFoundError):
        return storage.read(begin_file(attempt), NOTE).decode(errors="replace")
    with suppress(FileNotFoundError, MalformedFile):  # it was decided, and cleared away, meanwhile
        for name in vote_files:
            plan = votes.load_vote(storage.read(f"{votes_dir(attempt)}/{name}"), name).plan
            if plan is not None:
                return str(plan["tag"])
    return None


def _age(attempt: str) -> tuple[str, int]:
    run, _, number = attempt.rpartition("-")
    return run, int(number) if number.isdigit() else 0


def _nbytes(storage: Storage, folder: str) -> int:
    nbytes = 0
    for entry in storage.list(folder):
        key = f"{folder}/{entry.name}"
        with suppress(FileNotFoundError):
            nbytes += _nbytes(storage, key) if entry.is_dir else storage.size(key)
    return nbytes
