"""One failure reaches everyone, no one hangs, and the next save works."""

import errno
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nxd_ckpt.errors import OutcomeUnknown, PeerTimeout, SaveFailed
from nxd_ckpt.saving.planned_file import PlannedFile, Wave
from nxd_ckpt.saving.staging import Stager
from nxd_ckpt.storage import local
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.local_files import LocalWriter
from nxd_ckpt.testing.storage import Operation, failing, killing
from tests.protocol.job import Job, outcome_of
from tests.protocol.states import PATIENCE, checkpointer, lose_patience, save, saved_value, visible_tags
from tests.support.logged import logged

FULL = OSError(errno.ENOSPC, "No space left on device")

# What fails of the second save on any rank, and on which keys; tests/simulation lets any call fail.
OWN_PART = [("write_at", "*-2/model/*"), ("write", "*-2/rank_*.vote.json"), ("sync_dir", ".nxd_ckpt/votes/*-2")]


def three_saves(rank: int, path: Path, failing_rank: int, name: str, pattern: str, third: bool = True) -> Any:
    """Three saves, the second of which fails on ``failing_rank``; what it raised here."""
    armed = False

    def hook(operation: Operation) -> None:
        if armed:
            fault(operation)

    fault = failing(name, pattern, FULL)
    saver = checkpointer(path, rank, 2, hook if rank == failing_rank else None)
    save(saver, "first", 1)
    armed = True
    if "vote" in pattern or "verdict" in pattern:
        lose_patience(saver)
    outcome = outcome_of(lambda: save(saver, "second", 2))
    lose_patience(saver, PATIENCE)
    armed = False
    if third:
        save(saver, "third", 3)
    saver.close()
    return outcome


@pytest.mark.parametrize(
    ("failing_rank", "name", "pattern"),
    [(number, *part) for number, part in enumerate(OWN_PART[:-1])],
    ids=lambda value: str(value).replace("/", "|"),
)
def test_failed_write_or_sync_of_one_rank_fails_the_save_on_all(
    tmp_path: Path, failing_rank: int, name: str, pattern: str
) -> None:
    """Every rank raises SaveFailed with rank and cause, nothing becomes visible, and the next save works."""
    outcomes = Job(2, three_saves, tmp_path, failing_rank, name, pattern, group=True).values()
    assert [SaveFailed] * 2 == [type(outcome) for outcome in outcomes]
    lost_vote = "vote" in pattern and failing_rank != 0  # then nobody else can know why
    for rank, outcome in enumerate(outcomes):
        assert f"rank {failing_rank}" in str(outcome)
        assert ("No space left" in str(outcome)) or (lost_vote and rank != failing_rank)
    assert ["first", "third"] == visible_tags(tmp_path)
    assert (1, 3) == (saved_value(tmp_path, "first", 2), saved_value(tmp_path, None, 2))


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_vote_that_is_seen_counts_even_if_its_sync_fails(tmp_path: Path, failing_rank: int) -> None:
    """Only rank 0's verdict decides: the data behind the vote are durable, so that the save becomes visible."""
    arguments = (tmp_path, failing_rank, *OWN_PART[-1])
    outcomes = Job(2, three_saves, *arguments, group=True).values()
    visible = "second" in visible_tags(tmp_path)
    assert [type(None) if visible else SaveFailed] * 2 == [type(outcome) for outcome in outcomes]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("list", ".nxd_ckpt/staging"), ("write", "*-2/verdict/verdict.json")],
    ids=lambda value: value.replace("/", "|"),
)
def test_failures_after_publication_do_not_deny_it(tmp_path: Path, name: str, pattern: str) -> None:
    """Once a tag is visible no rank says that its save failed, nor that it does not know: the tag tells."""
    outcomes = Job(2, three_saves, tmp_path, 0, name, pattern, False, group=True).values()
    assert 2 == saved_value(tmp_path, "second", 2)
    assert [None, None] == outcomes


def device_lost(stager: Stager, files: Sequence[PlannedFile], wave: Wave) -> list[memoryview]:
    raise RuntimeError(f"device lost while copying {len(files)} files")


def stages_badly(rank: int, path: Path, failing_rank: int, async_save: bool) -> tuple[Any, Any]:
    """What the second save raised, and what the wait after it did; its state cannot be copied on one rank."""
    saver = checkpointer(path, rank, 2)
    save(saver, "first", 1)
    with patch.object(Stager, "stage", device_lost) if rank == failing_rank else nullcontext():
        at_save = outcome_of(lambda: save(saver, "second", 2, async_save=async_save))
        at_wait = outcome_of(saver.wait)
    save(saver, "third", 3)
    saver.close()
    return at_save, at_wait


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_failed_staging_of_one_rank_fails_the_save_on_all(tmp_path: Path, failing_rank: int) -> None:
    """A rank that cannot copy its state fails the save on every rank, at the same call."""
    outcomes = Job(2, stages_badly, tmp_path, failing_rank, False, group=True).values()
    other = outcomes[1 - failing_rank][0]
    assert SaveFailed is type(other)
    assert f"rank {failing_rank} failed: RuntimeError: device lost" in str(other)
    assert "device lost" in str(outcomes[failing_rank][0])
    assert [None, None] == [at_wait for _, at_wait in outcomes]
    assert ["first", "third"] == visible_tags(tmp_path)


def test_failed_staging_of_an_async_save_is_raised_at_the_same_call_everywhere(tmp_path: Path) -> None:
    """No rank's training loop breaks alone: where the others go on, so does the rank that failed, until all wait."""
    outcomes = Job(2, stages_badly, tmp_path, 1, True, group=True).values()
    assert [None, None] == [at_save for at_save, _ in outcomes]
    assert [SaveFailed, SaveFailed] == [type(at_wait) for _, at_wait in outcomes]
    assert ["first", "third"] == visible_tags(tmp_path)


def async_failure(rank: int, path: Path) -> list[str]:
    """The failure of an async save as this rank meets it, at each of the calls that follow."""
    saver = checkpointer(path, rank, 2, failing("close", "*-2/model/*", FULL) if rank == 1 else None)
    save(saver, "first", 1)
    calls: list[Callable[[], Any]] = [
        lambda: save(saver, "second", 2, async_save=True),
        lambda: save(saver, "third", 3, async_save=True),
        saver.wait,
        saver.wait,
        saver.close,
    ]
    return [type(outcome_of(call)).__name__ for call in calls]


def test_failed_async_save_is_raised_once_at_the_same_call(tmp_path: Path) -> None:
    """A later save proceeds; the next wait raises, on every rank; nothing after it does."""
    once = ["NoneType", "NoneType", "SaveFailed", "NoneType", "NoneType"]
    assert [once, once] == Job(2, async_failure, tmp_path, group=True).values()
    assert ["first", "third"] == visible_tags(tmp_path)


def logged_failure(rank: int, path: Path) -> list[str]:
    """What is logged as an error between a failing async save and the next call."""
    with logged(logging.ERROR) as messages:
        saver = checkpointer(path, rank, 2, failing("close", "*-1/model/*", FULL) if rank == 1 else None)
        pending = save(saver, "first", 1, async_save=True)
        while not pending.done():
            time.sleep(0.01)
    return messages


def test_failed_async_save_is_logged_at_once(tmp_path: Path) -> None:
    """Every rank's log names the failure without any further call."""
    for records in Job(2, logged_failure, tmp_path, group=True).values():
        assert 1 == len(records)
        assert "No space left" in records[0]


def reports_of_a_slow_save(rank: int, path: Path, slow_rank: int) -> list[str]:
    """What ``slow_rank`` said of its progress before each chunk of its file, and at the end of it."""
    from nxd_ckpt.saving import writing

    vars(writing)["CHUNK"] = 4096
    found: list[str] = []

    def crawl(operation: Operation) -> None:
        if operation.name in ("write_at", "close") and "-2/model/" in operation.key:
            said = path.glob(f".nxd_ckpt/votes/*-2/{'verdict/alive' if rank == 0 else 'rank_00001.progress*'}")
            found.append("".join(file.read_text() for file in said))
            lose_patience(saver, 0.0 if operation.name == "write_at" else PATIENCE)  # the time between two reports

    saver = checkpointer(path, rank, 2, crawl if rank == slow_rank else None)
    save(saver, "first", 1)
    saver.save("second", {"weight": torch.zeros(1024 * 2)})
    saver.close()
    return found


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_slow_rank_reports_progress_while_it_writes(tmp_path: Path, slow_rank: int) -> None:
    """With each chunk, if one takes long: the others wait as long as it does (see tests/commit/test_voting.py)."""
    found = Job(2, reports_of_a_slow_save, tmp_path, slow_rank, group=True).values()[slow_rank]
    assert len(found) > 2
    assert len(found) == len(set(found))
    assert ["first", "second"] == visible_tags(tmp_path)


def dies_while_writing(rank: int, path: Path, victim: int) -> Any:
    """The second save, in which ``victim`` dies before it votes."""
    hook = killing("create", "*-2/model/*") if rank == victim else None
    saver = checkpointer(path, rank, 3, hook, timeout=3600)
    save(saver, "first", 1)
    return outcome_of(lambda: save(saver, "second", 2))


@pytest.mark.parametrize(("victim", "error"), [(0, OutcomeUnknown), (2, SaveFailed)])
def test_a_dead_rank_is_reported_in_seconds(tmp_path: Path, victim: int, error: type[Exception]) -> None:
    """By all that survive, whoever it is, and however long the timeout; they name it."""
    outcomes = Job(3, dies_while_writing, tmp_path, victim, group=True).outcomes()
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [error] * 2 == [type(outcome) for outcome in survivors]
    assert all(f"rank {victim}" in str(outcome) and "process ended" in str(outcome) for outcome in survivors)
    assert ["first"] == visible_tags(tmp_path)


def dies_before_a_load(rank: int, path: Path, victim: int) -> Any:
    """A load that ``victim`` does not live to see."""
    saver = checkpointer(path, rank, 3, timeout=3600)
    save(saver, "first", 1)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome_of(lambda: saver.load(model={}))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_died_before_a_load_is_reported_in_seconds(tmp_path: Path, victim: int) -> None:
    """By all that survive; nothing is loaded."""
    outcomes = Job(3, dies_before_a_load, tmp_path, victim, group=True).outcomes()
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [PeerTimeout] * 2 == [type(outcome) for outcome in survivors]


def test_a_full_disk_says_how_much_was_to_be_written(tmp_path: Path) -> None:
    """And how much is free there, to a save and to a tool; once."""
    full = failing("write_at", "*/model/*", OSError(errno.ENOSPC, "No space left on device"))
    with checkpointer(tmp_path / "run", 0, 1, full) as saver, pytest.raises(SaveFailed) as failed:
        save(saver, "first", 1)
    assert re.search(r"on device \([0-9.]+ \w+ are to be written, [0-9.]+ \w+ are free\)", str(failed.value))
    assert 1 == str(failed.value).count("are free")


@pytest.mark.parametrize("tag", ["second", "first"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_tag_that_cannot_be_looked_at_once_it_has_its_name_is_of_unknown_outcome(
    tmp_path: Path, world: int, tag: str
) -> None:
    """Every stat fails from the rename until the save returns: the tag is there, so no rank says that it is not."""
    outcomes = Job(world, blind_after_the_rename, tmp_path, world, tag, group=world > 1).values()
    assert OutcomeUnknown is type(outcomes[0])
    assert [None] * (world - 1) == outcomes[1:]  # which found it, whole and durable
    assert f"look for {tmp_path}/{tag}/done" in str(outcomes[0])
    assert 2 == saved_value(tmp_path, tag, world)


def blind_after_the_rename(rank: int, path: Path, world: int, tag: str) -> Any:
    """What the second save raised on this rank; rank 0 cannot look at anything once the tag has its name."""
    looks, renames, swaps = local._mode, LocalStorage.rename, LocalStorage.swap
    saver = checkpointer(path, rank, world)
    save(saver, "first", 1)
    lose_patience(saver)  # rank 0 cannot write its verdict either
    is_blind: list[bool] = []

    def look(path: str, *, follow: bool = True) -> int:
        if is_blind:
            raise OSError(errno.EIO, "Input/output error", path)
        return looks(path, follow=follow)

    def named(act: Callable[[], Any], target: str) -> Any:
        result = act()
        if rank == 0 and target == tag:
            is_blind.append(True)
        return result

    with (
        patch.object(local, "_mode", look),
        patch.object(LocalStorage, "rename", lambda self, a, b: named(lambda: renames(self, a, b), b)),
        patch.object(LocalStorage, "swap", lambda self, a, b: named(lambda: swaps(self, a, b), b)),
    ):
        outcome = outcome_of(lambda: save(saver, tag, 2))
    saver.abandon()
    return outcome


def test_a_file_that_can_neither_be_written_nor_aborted_hides_no_cause(tmp_path: Path) -> None:
    """The rank votes all the same: the others learn at once why it failed."""
    outcomes = Job(2, aborts_badly, tmp_path, group=True).values()
    assert [SaveFailed] * 2 == [type(outcome) for outcome in outcomes]
    assert all("No space left" in str(outcome) for outcome in outcomes)


def aborts_badly(rank: int, path: Path) -> Any:
    """What the second save raised here; rank 1 can neither write its files, nor remove them."""
    armed: list[bool] = []
    fault = failing("write_at", "*-2/model/*", FULL)
    saver = checkpointer(path, rank, 2, lambda operation: fault(operation) if armed and rank == 1 else None)
    save(saver, "first", 1)
    lose_patience(saver)
    armed.append(True)
    with patch.object(LocalWriter, "abort", side_effect=OSError(errno.EIO, "Input/output error")):
        outcome = outcome_of(lambda: save(saver, "second", 2))
    lose_patience(saver, PATIENCE)
    armed.clear()
    save(saver, "third", 3)
    saver.close()
    return outcome
