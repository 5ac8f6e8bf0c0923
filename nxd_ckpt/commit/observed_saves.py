"""The saves that are under way in a directory, as anyone may see them who looks at its control files."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.paths import STAGING, VOTES, begin_file, staging_dir, verdict_file, votes_dir
from nxd_ckpt.core import votes
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import Storage


@dataclass(frozen=True)
class ObservedSave:
    """A save that is not decided yet.

    Attributes:
        attempt: ``RUN-COUNTER``.
        tag: what it is to become; None where that does not show before the first rank has written its part.
        ranks_done: how many ranks have written all that is theirs, or failed to.
        nbytes: bytes of the files written so far; None in a store, where they lie in the tag itself.
        is_dead: whether its process on this host is gone; None where that cannot be told from here.
    """

    attempt: str
    tag: str | None
    ranks_done: int
    nbytes: int | None
    is_dead: bool | None


def saves_in_flight(storage: Storage) -> list[ObservedSave]:
    """Those that ranks have begun to write, oldest first, by the names of their attempts. Changes nothing."""
    holder = lease.read(storage)
    attempts = {entry.name for place in (STAGING, VOTES) for entry in storage.list(place)}
    found = []
    for attempt in sorted(attempts, key=_age):
        if storage.is_file(verdict_file(attempt)):
            continue
        is_ours = holder is not None and attempt.startswith(f"{holder.run_id}-")
        runs = holder.holder_runs_here() if holder is not None and is_ours else False
        voted = [entry.name for entry in storage.list(votes_dir(attempt)) if entry.name.endswith(".vote.json")]
        nbytes = _nbytes(storage, staging_dir(attempt)) if storage.renames else None
        tag = _tag(storage, attempt, voted)
        found.append(ObservedSave(attempt, tag, len(voted), nbytes, None if runs is None else not runs))
    return found


def _tag(storage: Storage, attempt: str, voted: list[str]) -> str | None:
    with suppress(FileNotFoundError):
        return storage.read(begin_file(attempt), NOTE).decode(errors="replace")
    with suppress(FileNotFoundError, MalformedFile):  # it was decided, and cleared away, meanwhile
        for name in voted:
            plan = votes.load_vote(storage.read(f"{votes_dir(attempt)}/{name}"), name).plan
            if plan is not None:
                return str(plan["tag"])
    return None


def _age(attempt: str) -> tuple[str, int]:
    run, _, number = attempt.rpartition("-")
    return run, int(number) if number.isdigit() else 0


def _nbytes(storage: Storage, folder: str) -> int:
    found = 0
    for entry in storage.list(folder):
        key = f"{folder}/{entry.name}"
        with suppress(FileNotFoundError):
            found += _nbytes(storage, key) if entry.is_dir else storage.size(key)
    return found
