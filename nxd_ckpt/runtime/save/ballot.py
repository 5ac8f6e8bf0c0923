"""The ballot of one attempt on disk: casting votes, collecting them, announcing and awaiting the verdict.

Files are found by *listing* the votes directory, with back-off, never by asking for an expected name: NFS clients
cache the absence of a name, but a changed directory is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from nxd_ckpt.core import votes as ballots
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.core.votes import Verdict, Vote
from nxd_ckpt.errors import MalformedFile, OutcomeUnknown, RanksDisagree, SaveFailed
from nxd_ckpt.runtime.paths import begin_file, left_file, rank_file, verdict_dir, verdict_file, votes_dir
from nxd_ckpt.storage.base import Storage

ResultT = TypeVar("ResultT")


def open_ballot(storage: Storage, attempt: str, tag: str) -> None:
    """Rank 0: tell the others that the attempt's files may be written into ``tag`` itself."""
    storage.write(begin_file(attempt), tag.encode())
    storage.sync_dir(verdict_dir(attempt))


def await_opening(
    storage: Storage, attempt: str, tag: str, timeout: float, leaving: Callable[[], bool]
) -> Verdict | None:
    """Return None once rank 0 opened the ballot, or its verdict where that came first: it refused, or a rank failed.

    Raises:
        RanksDisagree: rank 0 opened it for another tag.
        SaveFailed: no new vote, and no progress of rank 0 with this save, for ``timeout`` seconds; or this rank is
            ``leaving`` the job. Without its vote no tag becomes visible.
    """
    key = verdict_file(attempt)
    found = _first_of([key, begin_file(attempt)], storage, attempt, timeout, leaving)
    if found is None:
        raise SaveFailed(
            f"rank 0 did not begin it: for {timeout:.0f} s it made no progress, or this rank is about to end; see the "
            "log of rank 0"
        )
    if found == key:
        return ballots.load_verdict(storage.read(key, NOTE), f"{storage.url}/{key}")
    opened_for = storage.read(found, NOTE).decode(errors="replace")
    if opened_for != tag:
        raise RanksDisagree(
            f"rank 0 saves {opened_for!r}, this rank {tag!r}; all ranks must call save_checkpoint with the same "
            "arguments, in the same order"
        )
    return None


def all_voted(storage: Storage, attempt: str, world_size: int) -> bool:
    """Whether no rank writes for the attempt any more: each is done with it, or failed."""
    return _votes(_listed(storage, votes_dir(attempt))) == world_size


def await_votes(
    storage: Storage,
    attempt: str,
    world_size: int,
    timeout: float,
    on_progress: Callable[[], None],
    leaving: Callable[[], bool],
) -> bool:
    """Wait until all ranks voted on an attempt, whatever they said.

    ``on_progress`` is called now and then while some of them make progress. False ``timeout`` seconds after the last,
    or when this rank is ``leaving`` the job.
    """
    patience, backoff = _Patience(timeout, on_progress), _Backoff(storage)
    while True:
        names = backoff.timed(lambda: _listed(storage, votes_dir(attempt)))
        if _votes(names) == world_size:
            return True
        if leaving() or patience.is_over(_votes(names), partial(_progress, storage, attempt, names, range(world_size))):
            return False
        backoff.pause()


def cast(storage: Storage, attempt: str, vote: Vote) -> None:
    """Make this rank's vote durable: the last thing it does for an attempt before it waits."""
    storage.write(rank_file(attempt, vote.rank, "vote"), ballots.dump(vote))
    storage.sync_dir(votes_dir(attempt))


def report_progress(storage: Storage, attempt: str, rank: int, amount: int) -> None:
    """Tell the others that this rank is still at it; ``amount`` is any number that changes."""
    storage.write(rank_file(attempt, rank, "progress"), str(amount).encode())


def collect(storage: Storage, attempt: str, world_size: int, timeout: float, *, first: int = 0) -> list[Vote]:
    """The votes of all ranks from ``first`` on, by rank. Rank 0 only.

    Passes on to the other ranks, as rank 0's own progress, what it sees of theirs: nobody else reads all of it.

    Raises:
        SaveFailed: at once when a vote is an error; else ``timeout`` seconds after the last progress of any rank,
            naming the ranks that did not vote.
    """
    found: dict[int, Vote] = {}
    missing = {_name(rank_file(attempt, rank, "vote")): rank for rank in range(first, world_size)}
    backoff = _Backoff(storage)
    patience = _Patience(timeout, on_progress=lambda: report_progress(storage, attempt, 0, time.monotonic_ns()))
    while True:
        names = backoff.timed(lambda: _listed(storage, votes_dir(attempt)))
        for name in sorted(names & missing.keys()):
            rank = missing.pop(name)
            key = rank_file(attempt, rank, "vote")
            found[rank] = ballots.load_vote(storage.read(key), f"{storage.url}/{key}")
            ballots.raise_error_of(found[rank])
            backoff.reset()
        if not missing:
            return [found[rank] for rank in sorted(found)]
        ranks = list(missing.values())
        if patience.is_over(len(found), partial(_progress, storage, attempt, names, ranks)):
            raise SaveFailed(
                f"no vote from {_ranks(ranks)} of {world_size} within {timeout:.0f} s of the last progress: "
                "dead, stuck, or not in this save; see the logs of those ranks"
            )
        backoff.pause()


def announce(storage: Storage, attempt: str, verdict: Verdict) -> None:
    """Publish rank 0's decision."""
    storage.write(verdict_file(attempt), ballots.dump(verdict))
    storage.sync_dir(verdict_dir(attempt))


def await_verdict(storage: Storage, attempt: str, tag: str, timeout: float) -> Verdict:
    """Rank 0's decision, as the other ranks learn it. What that costs does not depend on how many ranks there are.

    Raises:
        OutcomeUnknown: no new vote, and no progress of rank 0 with this save, for ``timeout`` seconds. That its
            process lives does not count: it may be elsewhere.
    """
    key = verdict_file(attempt)
    if _first_of([key], storage, attempt, timeout) is None:
        raise OutcomeUnknown(
            f"save of {tag!r}: rank 0 gave no verdict and made no progress for {timeout:.0f} s; it may have died, "
            "or never have made this save. The tag may or may not have become visible: look for "
            f"{storage.url}/{tag}/done"
        )
    return ballots.load_verdict(storage.read(key, NOTE), f"{storage.url}/{key}")


def ended_with(storage: Storage, attempt: str) -> str | None:
    """The tag that rank 0 has saved, or failed to save, with this attempt; None while it has not ended."""
    key = verdict_file(attempt)
    if _name(key) not in _listed(storage, verdict_dir(attempt)):
        return None
    return ballots.load_verdict(storage.read(key, NOTE), f"{storage.url}/{key}").tag


def leave(storage: Storage, attempt: str, rank: int, tag: str) -> None:
    """Tell rank 0, should it ever come, that this rank no longer waits for its verdict on the save of ``tag``."""
    storage.write(left_file(attempt, rank), tag.encode())


def left_with(storage: Storage, attempt: str) -> str | None:
    """The tag that another rank was saving with this attempt when it gave up on rank 0; None if none did."""
    left = sorted(name for name in _listed(storage, votes_dir(attempt)) if name.endswith(".left"))
    return storage.read(f"{votes_dir(attempt)}/{left[0]}", NOTE).decode(errors="replace") if left else None


def _first_of(
    keys: Sequence[str],
    storage: Storage,
    attempt: str,
    timeout: float,
    leaving: Callable[[], bool] = lambda: False,
) -> str | None:
    """The first of ``keys``, all in the verdict's directory, that is there; None once patience with rank 0 is over."""
    patience, backoff = _Patience(timeout), _Backoff(storage)

    def look_closer() -> dict[str, bytes]:
        names = _listed(storage, votes_dir(attempt))
        return dict.fromkeys(names, b"") | _progress(storage, attempt, names, [0])

    while True:
        listed = backoff.timed(lambda: _listed(storage, verdict_dir(attempt)))
        for key in keys:
            if _name(key) in listed:
                return key
        if leaving() or patience.is_over(0, look_closer):
            return None
        backoff.pause()


class _Patience:
    """A timeout in seconds that counts from the last sign of progress, not from the start.

    ``count`` is a cheap sign of progress; ``look_closer`` gives dearer ones, asked four times in the timeout and at its
    end. ``on_progress`` is called when a closer look shows some.
    """

    def __init__(self, timeout: float, on_progress: Callable[[], None] = lambda: None) -> None:
        self._timeout, self._on_progress = timeout, on_progress
        self._since = self._looked = time.monotonic()
        self._seen: Mapping[str, bytes] = {}
        self._count = 0

    def is_over(self, count: int, look_closer: Callable[[], Mapping[str, bytes]]) -> bool:
        now = time.monotonic()
        if count != self._count:
            self._count, self._since = count, now
        if now - self._looked >= self._timeout / 4 or now - self._since >= self._timeout:
            seen = look_closer()
            if seen != self._seen:
                self._since = now
                self._on_progress()
            self._seen, self._looked = seen, now
        return now - self._since >= self._timeout


class _Backoff:
    """Pauses of a 25th of the time waited so far, 2 ms to a quarter of a second; up to 2 s where looking takes long.

    So what was waited for is seen soon after it came, next to how long it took. Listing thousands of votes takes long:
    a rank that did nothing else would slow down the training beside it. An object store counts, and charges, every
    look of every rank: there pauses grow up to 2 s too.
    """

    def __init__(self, storage: Storage) -> None:
        self._busy = 0.0
        self._longest = 0.25 if storage.renames else 2.0
        self.reset()

    def reset(self) -> None:
        self._since = time.monotonic()

    def timed(self, look: Callable[[], ResultT]) -> ResultT:
        started = time.monotonic()
        try:
            return look()
        finally:
            self._busy = time.monotonic() - started

    def pause(self) -> None:
        waited = time.monotonic() - self._since
        time.sleep(max(min(max(waited / 25, 0.002), self._longest), min(8 * self._busy, 2.0)))


def _listed(storage: Storage, folder: str) -> set[str]:
    return {entry.name for entry in storage.list(folder)}


def _votes(names: Collection[str]) -> int:
    return sum(name.endswith(".vote.json") for name in names)


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _progress(storage: Storage, attempt: str, names: Collection[str], ranks: Sequence[int]) -> dict[str, bytes]:
    """What ``ranks`` last said of their progress, as far as the votes directory's listing ``names`` shows it."""
    keys = [rank_file(attempt, rank, "progress") for rank in ranks]
    return {_name(key): _said(storage, key) for key in keys if _name(key) in names}


def _said(storage: Storage, key: str) -> bytes:
    """What a file of progress says; a damaged one nothing."""
    try:
        return storage.read(key, NOTE)
    except MalformedFile:
        return b""


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
