"""Votes of one attempt on disk: casting and collecting them, announcing the verdict and waiting for it.

Files are looked for by *listing* the votes directory, with back-off, never by name: NFS clients cache the absence of a
name, but see a changed directory.

Votes and verdicts are not synced: they are for ranks that live, and with the power the attempt is gone. What they speak
of was synced before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nxd_ckpt import effects
from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.control_files import (
    STAGING,
    VOTES,
    alive_file,
    appeal_file,
    begin_file,
    digests_file,
    left_file,
    rank_file,
    staging_dir,
    verdict_dir,
    verdict_file,
    votes_dir,
)
from nxd_ckpt.coordination.peers import LONGEST, News
from nxd_ckpt.coordination.waiting import Backoff
from nxd_ckpt.core import document, votes
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.suggestions import ranks_of
from nxd_ckpt.core.tags import goes_back
from nxd_ckpt.core.votes import Verdict, Vote
from nxd_ckpt.errors import MalformedFile, OutcomeUnknown, SaveFailed
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.wrapper import retried
from nxd_ckpt.tag.range_reader import in_parallel

ResultT = TypeVar("ResultT")

_PAUSES = (0.1, 0.5, 2.0)
"""Seconds between tries of a step that must not fail because of a transient error."""

_LAST_WORDS = 3.0
"""Seconds after a process ended in which a shared file system may still show its last writes."""


VOTE, ANSWER = "vote", "answer"
"""Kinds of a rank's votes: its first, and the one after an appeal."""

Write = Callable[[str, bytes], bool]
"""Another way to write a small file; it returns False if it did not."""


class AttemptVotes:
    """The votes and the verdict of one attempt on disk."""

    def __init__(self, storage: Storage, attempt: str, news: News | None = None) -> None:
        self.attempt: str = attempt
        self._storage = storage
        self._news = news or News()

    def open(self, tag: str) -> None:
        """Tell the other ranks, on rank 0, that they may write the attempt's files into ``tag`` itself."""
        notes = self._storage.without_syncs()
        notes.write(begin_file(self.attempt), tag.encode())
        notes.sync_dir(verdict_dir(self.attempt))
        self._news.tell(begin_file(self.attempt))

    def await_opening(self, timeout: float, leaving: Callable[[], bool]) -> str | Verdict:
        """Return the tag for which rank 0 opened the vote; or its verdict, if it refused or a rank failed before that.

        Raises SaveFailed after ``timeout`` seconds without a new vote, or progress of rank 0 with this save; or if this
        rank is ``leaving`` the job. Without its vote no tag becomes visible.
        """
        verdict = verdict_file(self.attempt)
        file = self._first_of([verdict, begin_file(self.attempt)], timeout, leaving)
        if file is None:
            raise SaveFailed(
                f"rank 0 did not begin it: for {timeout:.0f} s it made no progress, or this rank is about to end; see "
                "the log of rank 0"
            )
        return self._verdict() if file == verdict else self._text(file)

    def all_voted(self, world_size: int) -> bool:
        """Return whether all ranks have voted for good, so that none writes for it any more. A single one has."""
        if world_size == 1:
            return True
        names = self._notes()
        return _votes(names) == world_size and not self._writing(world_size)(names)

    def await_votes(
        self,
        world_size: int,
        timeout: float,
        working_on: AttemptVotes,
        leaving: Callable[[], bool],
        gone: Callable[[int], bool] = lambda rank: False,
    ) -> bool:
        """Wait, on rank 0, until all other ranks have voted for good, for or against it. Rank 0 has left the attempt.

        Meanwhile rank 0 shows them that it is ``working_on`` another attempt. Returns False ``timeout`` seconds after
        the last progress of any rank, if a rank without a vote is ``gone``, or if this rank is ``leaving`` the job.
        """
        watch = _Watch(self._storage, News(), timeout, working_on)  # nobody tells that a rank has left
        writing = self._writing(world_size)
        while True:
            names = watch.look(self._notes)
            missing = writing(names)
            if not missing:
                return True
            if leaving() or any(map(gone, missing)):
                return False
            if watch.is_over(-len(missing), partial(self._progress, names, range(1, world_size))):
                return False
            watch.pause()

    def _writing(self, world_size: int) -> Callable[[Collection[str]], list[int]]:
        """Return what tells, from names of the ranks' files, which other ranks may still write for the attempt.

        After an appeal these are ranks without an answer that still wait for the verdict.
        """
        kind = ANSWER if self.is_appealed() else VOTE
        ranks = range(1, world_size)
        ends = {rank: {_name(rank_file("", rank, kind)), _name(left_file("", rank))} for rank in ranks}
        return lambda names: [rank for rank in ranks if ends[rank].isdisjoint(names)]

    def cast(self, vote: Vote, first: Write | None = None, kind: str = VOTE) -> None:
        """Write this rank's vote: its last step for an attempt before it waits.

        ``first`` is tried first to write it. ``kind`` is `ANSWER` for its vote after an appeal.
        """
        key = rank_file(self.attempt, vote.rank, kind)
        data = votes.dump(vote)
        notes = self._storage.without_syncs()
        if first is None or not first(key, data):
            notes.write(key, data)
        notes.sync_dir(votes_dir(self.attempt))
        self._news.tell(key)

    def has_cast(self, rank: int) -> bool:
        """Return whether this rank's vote is there, even if an error followed the write."""
        return self._storage.is_file(self._vote_file(rank))

    def report_progress(self, rank: int, amount: int) -> None:
        """Show the other ranks that this rank makes progress; ``amount`` is any number that changes."""
        key = rank_file(self.attempt, rank, "progress") if rank > 0 else alive_file(self.attempt)
        self._storage.write(key, str(amount).encode())

    def collect(
        self,
        world_size: int,
        timeout: float,
        *,
        first: int = 0,
        gone: Callable[[int], bool] = lambda rank: False,
        kind: str = VOTE,
    ) -> list[Vote]:
        """Return the votes of all ranks from ``first`` on, by rank. Rank 0 only.

        Meanwhile it shows the other ranks that rank 0 is at work: they wait as long as it does.

        Raises:
            SaveFailed: at once when a vote is an error, unless it tells what the rank holds; a few seconds after a rank
                without a vote is ``gone``; else ``timeout`` seconds after the last progress of any rank, naming the
                ranks that did not vote.
        """
        by_rank: dict[int, Vote] = {}
        missing = {_name(rank_file(self.attempt, rank, kind)): rank for rank in range(first, world_size)}
        watch = _Watch(self._storage, self._news, timeout, self)
        while True:
            names = watch.look(self._notes)
            names |= {name for name, rank in missing.items() if self._news.has(rank_file(self.attempt, rank, kind))}
            new = [missing.pop(name) for name in sorted(names & missing.keys())]
            keys = [rank_file(self.attempt, rank, kind) for rank in new]
            for rank, key, data in zip(new, keys, in_parallel(self._storage, keys, self._storage.read), strict=True):
                by_rank[rank] = votes.load_vote(data, f"{self._storage.url}/{key}")
                if by_rank[rank].replica is None:
                    votes.raise_error_of(by_rank[rank])
                watch.backoff.reset()
            if not missing:
                return [by_rank[rank] for rank in sorted(by_rank)]
            ranks = list(missing.values())
            if watch.has_lost(dead := [rank for rank in ranks if gone(rank)]):
                raise SaveFailed(f"no vote from {ranks_of(dead)} of {world_size}: the process ended; see its log")
            if watch.is_over(len(by_rank), partial(self._progress, names, ranks)):
                raise SaveFailed(
                    f"no vote from {ranks_of(ranks)} of {world_size} within {timeout:.0f} s of the last progress: "
                    "dead, stuck, or not in this save; see the logs of those ranks"
                )
            watch.pause()

    def announce(self, verdict: Verdict, first: Write | None = None) -> None:
        """Publish rank 0's verdict, with retries: other ranks wait for it. ``first`` is tried first to write it."""
        key = verdict_file(self.attempt)
        data = votes.dump(verdict)
        notes = self._storage.without_syncs()
        if first is None or not first(key, data):
            _retried(lambda: notes.write(key, data))
        notes.sync_dir(verdict_dir(self.attempt))
        self._news.tell(key)

    def appeal(self, keys: Sequence[str]) -> None:
        """Tell the other ranks, on rank 0, which claims do not hold: each saves what it has of these for itself."""
        self._note(appeal_file(self.attempt), keys)

    def is_appealed(self) -> bool:
        """Return whether rank 0 has appealed."""
        return self._storage.is_file(appeal_file(self.attempt))

    def publish_digests(self, rank: int, digests: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell the other ranks the digests, by claim and name, of what this rank wrote for them too; or its forms."""
        self._note(digests_file(self.attempt, rank), digests)

    def digests_of(self, rank: int, timeout: float, gone: Callable[[], bool] = lambda: False) -> Any:
        """Return the digests that another rank published. Raises SaveFailed if it does not."""
        key = digests_file(self.attempt, rank)
        if self._first_of([key], timeout, gone=gone) is None:
            raise SaveFailed(f"rank {rank} did not say what it wrote for all: dead, stuck, or not in this save")
        return document.whole(self._storage.read(key))

    def _note(self, key: str, content: Any) -> None:
        notes = self._storage.without_syncs()
        notes.write(key, json.dumps(content).encode())
        notes.sync_dir(verdict_dir(self.attempt))
        self._news.tell(key)

    def await_verdict(
        self,
        tag: str,
        timeout: float,
        gone: Callable[[], bool] = lambda: False,
        appealed: Callable[[Sequence[str]], object] | None = None,
    ) -> Verdict:
        """Return rank 0's verdict. The cost does not depend on the number of ranks.

        If rank 0 appeals before, ``appealed`` is called with the claims that do not hold.

        Raises:
            OutcomeUnknown: rank 0 is ``gone``, or showed no sign of working on this save for ``timeout`` seconds. A
                live process is no such sign: it may be doing something else.
        """
        appeal = appeal_file(self.attempt)
        first = self._first_of([verdict_file(self.attempt), appeal], timeout, gone=gone)
        if first == appeal and appealed is not None:
            appealed(document.whole(self._storage.read(appeal)))
        if first == appeal:
            first = self._first_of([verdict_file(self.attempt)], timeout, gone=gone)
        if first is None:
            silent = f"no sign of it for {timeout:.0f} s; it may never have made this save"
            why = "its process ended" if gone() else silent
            raise OutcomeUnknown(
                f"save of {tag!r}: rank 0 gave no verdict: {why}. The tag may or may not have become visible: look for "
                f"{self._storage.url}/{tag}/done"
            )
        return _retried(self._verdict)

    def of_rank0(self) -> str | Verdict | None:
        """Return the tag that rank 0 saves with this attempt, or its verdict; None as long as nothing tells."""
        names = _listed(self._storage, verdict_dir(self.attempt))
        if _name(verdict_file(self.attempt)) in names:
            return self._verdict()
        if _name(begin_file(self.attempt)) in names:
            return self._text(begin_file(self.attempt))
        # By name, as this is no wait: if the vote does not show yet, the votes are compared in the end. A store is
        # spared the request: rank 0 opens every attempt there.
        vote = self._vote_file(0)
        return self.voted_on(vote) if self._storage.renames and self._storage.is_file(vote) else None

    def of_others(self, tag: str) -> str | None:
        """Return the tag that another rank saves with this attempt, in place of ``tag``, which rank 0 saves.

        That is what it was saving when it stopped waiting for rank 0, or an earlier step, for which it waits. None if
        there is none.
        """
        names = sorted(self._notes())
        for name in names:
            if name.endswith(".left"):
                return self._text(f"{votes_dir(self.attempt)}/{name}")
        voted = next((name for name in names if name.endswith(".vote.json")), None)
        theirs = None if voted is None else self.voted_on(f"{votes_dir(self.attempt)}/{voted}")
        return theirs if theirs is not None and goes_back(theirs, tag) else None

    def voted_on(self, key: str) -> str | None:
        """Return the tag in a vote; None if the rank failed, or the vote was cleared away meanwhile."""
        with suppress(FileNotFoundError, MalformedFile):
            plan = votes.load_vote(self._storage.read(key), key).plan
            return None if plan is None else str(plan["tag"])
        return None

    def _text(self, key: str) -> str:
        return self._storage.read(key, NOTE).decode(errors="replace")

    def leave(self, rank: int, tag: str) -> None:
        """Tell rank 0, if it ever comes, that this rank no longer waits for its verdict on the save of ``tag``."""
        self._storage.write(left_file(self.attempt, rank), tag.encode())

    def _first_of(
        self,
        keys: Sequence[str],
        timeout: float,
        leaving: Callable[[], bool] = lambda: False,
        gone: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Return the first of ``keys``, all in the verdict's directory, that exists; None once rank 0 has timed out.

        While a storage cannot be read, it counts as unchanged.
        """
        watch = _Watch(self._storage, self._news, timeout)
        listed: set[str] = set()

        def signs() -> dict[str, bytes]:
            alive = alive_file(self.attempt)
            with suppress(OSError):
                return {alive: _progress_of(self._storage, alive)} if _name(alive) in listed else {}
            return {}

        while True:
            with suppress(OSError):
                listed = watch.look(lambda: _listed(self._storage, verdict_dir(self.attempt)))
            for key in keys:
                if _name(key) in listed or self._news.has(key):
                    return key
            if leaving() or watch.has_lost([0] if gone() else []) or watch.is_over(len(listed), signs):
                return None
            watch.pause(lambda: leaving() or gone())

    def _progress(self, names: Collection[str], ranks: Sequence[int]) -> dict[str, bytes]:
        """Return the last progress of ``ranks``, as far as the listing ``names`` of the votes directory has it."""
        keys = [rank_file(self.attempt, rank, "progress") for rank in ranks]
        return {_name(key): _progress_of(self._storage, key) for key in keys if _name(key) in names}

    def _notes(self) -> set[str]:
        """Return the names of the ranks' files."""
        return _listed(self._storage, votes_dir(self.attempt))

    def _vote_file(self, rank: int) -> str:
        return rank_file(self.attempt, rank, "vote")

    def _verdict(self) -> Verdict:
        key = verdict_file(self.attempt)
        return votes.load_verdict(self._storage.read(key, NOTE), f"{self._storage.url}/{key}")


class _Watch:
    """One rank's wait for notes of others: when it looks for them, and when it waits no longer.

    It looks after each pause; hardly ever where ``news`` tell of the notes. It waits ``timeout`` seconds from the last
    sign of progress on, not from the start. Rank 0 shows the others meanwhile that it works on the attempt ``shown``:
    every tenth of the timeout, or every 5 s if that is less.
    """

    def __init__(self, storage: Storage, news: News, timeout: float, shown: AttemptVotes | None = None) -> None:
        self.backoff: Backoff = Backoff(storage)
        self._news = news
        self._timeout = timeout
        self._shown = shown
        self._names: set[str] = set()
        self._count = self._told = 0
        self._seen: Mapping[str, bytes] = {}
        self._closer_interval = min(timeout / 4, 2.0)
        self._interval = min(timeout / 4, LONGEST)
        now = effects.monotonic()
        self._shown_at = self._since = self._looked_closer = now
        self._due = now + self._interval
        self._ended = math.inf

    def look(self, look: Callable[[], set[str]]) -> set[str]:
        """Return the names that ``look`` finds, or the last ones. News that come from now on end the next `pause`."""
        now = effects.monotonic()
        if self._shown is not None and now - self._shown_at >= min(self._timeout / 10, 5.0):
            self._shown_at = now
            with suppress(OSError):  # the next may succeed
                self._shown.report_progress(0, effects.monotonic_ns())
        self._told = self._news.count
        if not self._news.come or now >= self._due:
            self._due = now + self._interval
            self._names = self.backoff.timed(look)
        return self._names

    def pause(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait for news, a pause without them, or until ``is_over``."""
        if self._news.come:
            self._news.wait(self._told, self._due, is_over)
        else:
            self.backoff.pause()

    def has_lost(self, gone: Collection[int]) -> bool:
        """Return whether ranks are ``gone``, for so long that a shared file system shows their last writes."""
        now = effects.monotonic()
        self._ended = min(self._ended, now) if gone else math.inf
        return now - self._ended >= _LAST_WORDS

    def is_over(self, count: int, look_closer: Callable[[], Mapping[str, bytes]]) -> bool:
        """Return whether nothing has changed for the timeout.

        ``count`` is a cheap sign of progress. ``look_closer`` returns more expensive ones. It is called at most every
        two seconds, and rarely enough to take at most a twentieth of the time; but at least four times within the
        timeout, and at its end.
        """
        now = effects.monotonic()
        if count != self._count:
            self._count = count
            self._since = now
        if now - self._looked_closer >= self._closer_interval or now - self._since >= self._timeout:
            seen = look_closer()
            if seen != self._seen:
                self._since = now
            self._seen = seen
            self._looked_closer = now
            self._closer_interval = min(self._timeout / 4, max(2.0, 20 * (effects.monotonic() - now)))
        return now - self._since >= self._timeout


def _retried(act: Callable[[], ResultT]) -> ResultT:
    """Act, and try again if the storage fails for a moment: only this rank can do it."""
    return retried(act, OSError, len(_PAUSES), _PAUSES.__getitem__)


def _listed(storage: Storage, folder: str) -> set[str]:
    return {entry.name for entry in storage.list(folder)}


def _votes(names: Collection[str]) -> int:
    return sum(name.endswith(".vote.json") for name in names)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _progress_of(storage: Storage, key: str) -> bytes:
    """Return the content of a progress file; nothing if it is damaged."""
    try:
        return storage.read(key, NOTE)
    except MalformedFile:
        return b""


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
    keys = (f"{votes_dir(attempt)}/{name}" for name in vote_files)
    return next(filter(None, map(AttemptVotes(storage, attempt).voted_on, keys)), None)


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
