"""*Visible means complete*, as an order of effects across ranks."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import pytest

from nxd_ckpt.coordination.paths import PLACE
from nxd_ckpt.storage import local
from nxd_ckpt.storage.system import exchange
from nxd_ckpt.testing.storage import Operation
from tests.protocol.job import Job
from tests.protocol.states import checkpointer, save

pytestmark = [pytest.mark.plain, pytest.mark.once]

Log = list[tuple[int, int, str, str]]
"""Nanoseconds on the host's clock, rank, operation, key; in this order."""


def recorded_saves(rank: int, path: Path, exchanges: bool) -> tuple[Log, Log]:
    """What this rank asks of the storage in the save of a new tag, and in one over that tag."""
    if not exchanges:
        pytest.MonkeyPatch().setattr(local, "exchange", lambda one, other: False)
    logs: tuple[Log, Log] = ([], [])
    log = logs[0]

    def hook(operation: Operation) -> None:
        log.append((time.monotonic_ns(), rank, operation.name, operation.key))

    saver = checkpointer(path, rank, 2, hook)
    save(saver, "tag", 1)
    log = logs[1]
    save(saver, "tag", 2)
    log = []
    saver.close()
    return logs


@pytest.fixture(scope="module", params=[True, False], ids=["exchange", "renames"])
def exchanges(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether the file system can exchange two names; where it can, both ways are tried."""
    one, other = (tmp_path_factory.mktemp(name) for name in ("one", "other"))
    if request.param and not exchange(one, other):
        pytest.skip("this file system cannot exchange two names")
    return bool(request.param)


@pytest.fixture(scope="module")
def logs(exchanges: bool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Log, Log]:
    """The operations of both ranks, in each of the two saves."""
    ranks = Job(2, recorded_saves, tmp_path_factory.mktemp("order"), exchanges, group=True).values()
    first, second = (sorted(line for rank in ranks for line in rank[number]) for number in (0, 1))
    return first, second


DATA, VOTE = ("close", "*/staging/*/model/*"), ("write", "*.vote.json")
OF_A_RANK = [("sync_dir", "*/model"), ("close", "*/index/*"), ("sync_dir", "*/index")]
"""What a rank does side by side, between its data and its vote."""
COMPLETION = [("close", "*/manifest.json"), ("close", "*/done"), ("sync_dir", ".nxd_ckpt/staging/*")]
"""What rank 0 does side by side, once it has the votes."""
DATED = ("set_time", "*/done")
APPEARANCE = [("rename", "*/staging/* -> tag"), ("sync_dir", "")]
ANNOUNCEMENT = [("write", ".nxd_ckpt/journal.json"), ("sync_dir", ".nxd_ckpt")]
EXCHANGE = [("swap", "*/staging/* <-> tag"), ("rename", "*/staging/* -> .nxd_ckpt/trash/*"), ("sync_dir", "")]
TWO_RENAMES = [("rename", "tag -> .nxd_ckpt/trash/*"), *APPEARANCE]
REMOVAL = [
    ("remove", ".nxd_ckpt/journal.json"),
    ("remove", ".nxd_ckpt/trash/*"),
]
VERDICT = [("write", "*/verdict.json")]


def last_of(log: Log, name: str, pattern: str) -> int:
    """Where the last operation ``name`` on a key like ``pattern`` is in the log."""
    return max(_positions(log, name, pattern))


def first_of(log: Log, name: str, pattern: str) -> int:
    return min(_positions(log, name, pattern))


def _positions(log: Log, name: str, pattern: str) -> list[int]:
    found = [at for at, (_, _, done, key) in enumerate(log) if done == name and fnmatchcase(key, pattern)]
    assert found, f"{name} {pattern} did not happen"
    return found


def out_of_order(log: Log, steps: list[tuple[str, str]]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Neighbours in ``steps`` of which the first did not end before the second began."""
    return [(one, other) for one, other in pairwise(steps) if last_of(log, *one) >= first_of(log, *other)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("save_number", [0, 1])
def test_a_rank_votes_when_its_data_are_durable(logs: tuple[Log, Log], rank: int, save_number: int) -> None:
    """Its files are written and synced, then their names, the index and its name; then it votes."""
    data = [line for line in logs[save_number] if line[1] == rank and "/staging/" in line[3]]
    vote = [line for line in logs[save_number] if line[1:3] == (rank, "write") and line[3].endswith(".vote.json")]
    for step in OF_A_RANK:
        assert [] == out_of_order([line for line in data if line[0] < vote[0][0]] + vote, [DATA, step, VOTE])


def test_a_new_tag_appears_complete(logs: tuple[Log, Log]) -> None:
    """All votes < manifest, done and their names' sync < the one rename < sync of the parent < verdict."""
    votes = last_of(logs[0], *VOTE)
    for step in COMPLETION:
        assert [] == out_of_order(logs[0][votes:], [VOTE, step, DATED, *APPEARANCE, *VERDICT])


def test_an_old_tag_is_swapped_under_a_durable_journal(logs: tuple[Log, Log], exchanges: bool) -> None:
    """Journal and its sync < old out < new in < sync of the parent < journal dropped < old deleted < verdict."""
    swap = EXCHANGE if exchanges else TWO_RENAMES
    votes, dropped = last_of(logs[1], *VOTE), last_of(logs[1], "remove", ".nxd_ckpt/journal.json")
    out = first_of(logs[1], *swap[0])
    for step in COMPLETION:
        assert [] == out_of_order(logs[1][votes:out], [VOTE, step, DATED, *ANNOUNCEMENT])
    assert [] == out_of_order(logs[1][votes:out], [ANNOUNCEMENT[0], ("sync_dir", "")])  # where the old one goes
    # What follows is synced again: the journal's loss, and before the old tag is deleted, the loss of its name.
    journal_again = [line for line in logs[1][dropped:] if line[3] not in ("", ".nxd_ckpt")]
    assert [] == out_of_order(logs[1][out:dropped] + journal_again, [*swap, *REMOVAL, *VERDICT])


@pytest.mark.parametrize("save_number", [0, 1])
def test_the_others_only_read_the_verdict(logs: tuple[Log, Log], save_number: int) -> None:
    """Rank 1 decides nothing: all that it reads of a save, after the directory's mark, is rank 0's verdict."""
    reads = [line for line in logs[save_number] if line[1] == 1 and line[2] == "read" and line[3] != PLACE]
    assert [True] == [fnmatchcase(key, "*/verdict.json") for _, _, _, key in reads]
    assert last_of(logs[save_number], *VERDICT[0]) < logs[save_number].index(reads[0])
