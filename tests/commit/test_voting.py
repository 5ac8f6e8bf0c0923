"""Votes and the verdict on disk; timeouts count from the last progress."""

import threading
from functools import partial
from pathlib import Path

import pytest

from nxd_ckpt.commit import voting
from nxd_ckpt.commit.voting import ANSWER, AttemptVotes
from nxd_ckpt.coordination import waiting
from nxd_ckpt.coordination.control_files import alive_file, rank_file, verdict_file, votes_dir
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.core.votes import Verdict, Vote
from nxd_ckpt.errors import MalformedFile, OutcomeUnknown, SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, Operation, recording
from tests.support.clock import Clock

ATTEMPT = "run-1"
LONG = 600.0


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path)
    storage.make_dir(votes_dir(ATTEMPT))
    return storage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What voting takes for the time."""
    clock = Clock()
    for module in (voting, waiting):
        monkeypatch.setattr(module, "effects", clock)
    return clock


def vote(rank: int) -> Vote:
    return Vote(rank, plan={"tag": "t"}, replica="ab", index=FileEntry(10, 20), replicated=3, nbytes=4, seconds=0.5)


def test_a_vote_that_reports_an_error_ends_the_wait(storage: LocalStorage) -> None:
    """At once, though another rank has not voted; the message names rank and cause."""
    AttemptVotes(storage, ATTEMPT).cast(Vote(1, error=("DigestMismatch", "model/x.pt differs")))
    with pytest.raises(SaveFailed, match=r"rank 1 failed: DigestMismatch: model/x\.pt differs"):
        AttemptVotes(storage, ATTEMPT).collect(3, LONG)


def test_missing_votes_are_named(storage: LocalStorage, clock: Clock) -> None:
    """The first eight of them."""
    AttemptVotes(storage, ATTEMPT).cast(vote(0))
    with pytest.raises(SaveFailed, match=r"no vote from ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more of 12 within 0 s"):
        AttemptVotes(storage, ATTEMPT).collect(12, 0.1)


def test_progress_extends_the_wait(storage: LocalStorage, clock: Clock) -> None:
    """A rank that reports progress for several timeouts, with pauses of most of one, is waited for."""
    AttemptVotes(storage, ATTEMPT).cast(vote(0))
    for done in range(1, 5):
        clock.at(0.9 * done, partial(AttemptVotes(storage, ATTEMPT).report_progress, 1, done))
    clock.at(4.5, partial(AttemptVotes(storage, ATTEMPT).cast, vote(1)))
    assert [vote(0), vote(1)] == AttemptVotes(storage, ATTEMPT).collect(2, 1.0)


def test_rank_0_gives_signs_as_long_as_it_waits(storage: LocalStorage, clock: Clock) -> None:
    """Several in each timeout, whoever it is that still moves; then it says who is missing."""
    log: list[Operation] = []
    AttemptVotes(storage, ATTEMPT).cast(vote(0))
    for done in range(1, 5):
        clock.at(0.9 * done, partial(AttemptVotes(storage, ATTEMPT).report_progress, 1, done))
    with pytest.raises(SaveFailed, match="no vote from rank 1"):
        AttemptVotes(HookedStorage(storage, recording(log)), ATTEMPT).collect(2, 1.0)
    assert 4.6 <= clock.now <= 5.0
    signs = [operation for operation in log if operation[:2] == ("write", alive_file(ATTEMPT))]
    assert clock.now / 0.2 <= len(signs) <= clock.now / 0.1


def test_rank_0s_signs_extend_the_wait_for_the_verdict(storage: LocalStorage, clock: Clock) -> None:
    """Who waits for it reads rank 0's word only."""
    verdict = Verdict(("SaveFailed", "no vote from rank 1"), 0)
    for done in range(1, 5):
        clock.at(0.9 * done, partial(AttemptVotes(storage, ATTEMPT).report_progress, 0, done))
    clock.at(4.5, partial(AttemptVotes(storage, ATTEMPT).announce, verdict))
    log: list[Operation] = []
    assert verdict == AttemptVotes(HookedStorage(storage, recording(log)), ATTEMPT).await_verdict("t", 1.0)
    read = {operation.key for operation in log if operation.name == "read"}
    assert {alive_file(ATTEMPT), verdict_file(ATTEMPT)} == read


def test_without_a_verdict_the_outcome_is_unknown(storage: LocalStorage, clock: Clock) -> None:
    """The message says where to look."""
    AttemptVotes(storage, ATTEMPT).cast(vote(0))
    with pytest.raises(OutcomeUnknown, match=r"save of 't'.*look for .*/t/done"):
        AttemptVotes(storage, ATTEMPT).await_verdict("t", 0.1)


def test_nothing_is_asked_for_by_name_before_it_is_listed(storage: LocalStorage, clock: Clock) -> None:
    """NFS clients cache that a name does not exist: only a listing is believed."""
    log: list[Operation] = []
    hooked = HookedStorage(storage, recording(log))
    AttemptVotes(storage, ATTEMPT).cast(vote(0))
    with pytest.raises(SaveFailed):
        AttemptVotes(hooked, ATTEMPT).collect(2, 0.1)
    with pytest.raises(OutcomeUnknown):
        AttemptVotes(hooked, ATTEMPT).await_verdict("t", 0.1)
    read = {done.key for done in log if done.name not in ("list", "write")}
    assert {rank_file(ATTEMPT, 0, "vote")} == read - {alive_file(ATTEMPT)}  # that was listed


def test_the_vote_of_a_rank_that_ended_counts(storage: LocalStorage, clock: Clock) -> None:
    """Its bytes are durable, and a shared file system may show its vote later than the system its end."""
    AttemptVotes(storage, ATTEMPT).cast(vote(0))
    asked = threading.Event()

    def gone(rank: int) -> bool:
        if not asked.is_set():
            AttemptVotes(storage, ATTEMPT).cast(vote(1))
        asked.set()
        return rank == 1

    assert [vote(0), vote(1)] == AttemptVotes(storage, ATTEMPT).collect(2, LONG, gone=gone)


def test_a_verdict_is_tried_again_after_an_error_that_passes(storage: LocalStorage, clock: Clock) -> None:
    """Writing it, and reading it."""
    failed: set[str] = set()

    def once(operation: Operation) -> None:
        if operation.name in ("write", "read") and operation.name not in failed:
            failed.add(operation.name)
            raise OSError(5, "Input/output error")

    hooked = HookedStorage(storage, once)
    AttemptVotes(hooked, ATTEMPT).announce(Verdict())
    assert Verdict() == AttemptVotes(hooked, ATTEMPT).await_verdict("t", LONG)
    assert {"write", "read"} == failed


@pytest.mark.parametrize("damaged", [b"", b"{", b"[]", b'{"rank": 0, "unknown": 1}', b'{"rank": 0, "index": {"x": 1}}'])
def test_a_damaged_vote_is_named(storage: LocalStorage, damaged: bytes) -> None:
    """As the file that it is."""
    storage.write(rank_file(ATTEMPT, 0, "vote"), damaged)
    with pytest.raises(MalformedFile, match=r"rank_00000\.vote\.json"):
        AttemptVotes(storage, ATTEMPT).collect(1, LONG)


def test_a_slow_directory_does_not_put_a_rank_to_sleep(tmp_path: Path, clock: Clock) -> None:
    """However long a listing took: a rank looks again soon, and its own patience ends when it should."""
    clock.listing = 100.0
    storage = HookedStorage(LocalStorage(tmp_path), clock.looked)
    storage.make_dir(votes_dir("run-1"))
    with pytest.raises(SaveFailed, match="no vote from rank 0"):
        AttemptVotes(storage, "run-1").collect(1, timeout=600.0)
    assert max(clock.slept) <= 2.0
    assert clock.now < 600 + 2 * 100 + 2


def test_ranks_write_until_they_have_answered_an_appeal(storage: LocalStorage, clock: Clock) -> None:
    """What they write for the attempt stays until then, or until they wait for no verdict any more."""
    votes = AttemptVotes(storage, ATTEMPT)
    ends = [partial(votes.cast, vote(rank)) for rank in range(3)]
    ends += [partial(votes.appeal, []), partial(votes.cast, vote(1), kind=ANSWER), partial(votes.leave, 2, "t")]
    over = []
    for end in ends:
        end()
        over.append((votes.all_voted(3), votes.await_votes(3, 0.1, votes, lambda: False)))
    assert [(False, False), (False, False), (True, True), (False, False), (False, False), (True, True)] == over
