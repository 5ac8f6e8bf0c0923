"""How an attempt becomes a tag, and what stands in its way: one rank, its storage, and a session that says little."""

import errno
from collections.abc import Callable
from typing import Any

import pytest

from nxd_ckpt.commit.publication import (
    InPlace,
    Staged,
    copy_publication,
    is_visible,
    publication_of,
)
from nxd_ckpt.commit.voting import AttemptVotes
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import COPIES, STAGING, TRASH, outcome_file, staging_dir
from nxd_ckpt.core.names import DONE, MANIFEST, MARKER
from nxd_ckpt.core.tags import order_text
from nxd_ckpt.errors import DirectoryInUse, OutcomeUnknown, SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import Hook, HookedStorage, MemoryStorage, Operation, failing, recording
from tests.support.attempts import ATTEMPT, MODEL, TAG, TAKEN, TIME, manifest, session, whole, written


def test_the_storage_chooses_the_way(disk: LocalStorage, store: MemoryStorage) -> None:
    """Staged where there are renames; a copy resumes what an earlier try brought."""
    assert Staged("run-3", TAG, None) == publication_of(session(disk), 3, TAG, None)
    assert InPlace("run-3", TAG, True) == publication_of(session(store), 3, TAG, True)
    copy = Staged("run-1", TAG, False, resumes=True, saved="of-4")
    assert copy == copy_publication(session(disk), TAG, False, "of-4")
    assert InPlace("of-4", TAG, True, resumes=True) == copy_publication(session(store), TAG, True, "of-4")
    assert InPlace("", TAG, True, resumes=True) == copy_publication(session(store), TAG, True, None)


def test_a_staged_tag_appears_whole(disk: LocalStorage) -> None:
    """Both markers, ``done`` with order time and attempt; all of it synced before the rename."""
    one, log = Staged(ATTEMPT, TAG), list[Operation]()
    one.begin(session(disk))
    written(disk, one)
    assert staging_dir(ATTEMPT) == one.folder
    one.publish(session(HookedStorage(disk, recording(log))), TIME, [])
    expected = (b"1", f"{order_text(TIME)} {ATTEMPT}".encode(), b"new")
    assert expected == tuple(disk.read(f"{TAG}/{name}") for name in (MARKER, DONE, MODEL))
    assert TIME == disk.time(f"{TAG}/{DONE}")
    steps = [done.name for done in log if done.key.startswith(one.folder) and done.name not in ("is_dir", "is_file")]
    assert ["create", "write_at"] * 2 == steps[:4]
    assert ["close", "close", "sync_dir"] == sorted(steps[4:7]), "side by side, in any order"
    assert ["set_time", "rename"] == steps[7:]
    assert is_visible(disk, TAG, ATTEMPT)


def test_a_staged_tag_does_not_replace_one_unasked(disk: LocalStorage) -> None:
    """At the beginning, and at the end: it may have appeared meanwhile."""
    one = Staged(ATTEMPT, TAG, overwrite=False)
    one.begin(session(disk))
    written(disk, one)
    whole(disk)
    for step in (one.begin, lambda session: one.publish(session, TIME, [])):
        with pytest.raises(SaveFailed, match=r"one exists: .* pass overwrite=True$"):
            step(session(disk))
    assert b"old" == disk.read(f"{TAG}/{MODEL}")


@pytest.mark.parametrize("made", ["one", "one/manifest.json"])
def test_what_is_no_checkpoint_is_left_alone(disk: LocalStorage, made: str) -> None:
    """A file, or a directory with one whose name a save would write."""
    disk.write(made, b"mine")
    one = Staged(ATTEMPT, TAG)
    written(disk, one)
    with pytest.raises(SaveFailed, match=f"{made} exists and is not a checkpoint's; it is left alone"):
        one.publish(session(disk), TIME, [])
    assert b"mine" == disk.read(made)


def test_a_copy_that_resumes_gathers_where_nobody_sweeps(disk: LocalStorage) -> None:
    """And is published like any other."""
    one = copy_publication(session(disk), TAG, False, None)
    written(disk, one)
    assert disk.is_file(f"{COPIES}/{TAG}/{MODEL}")
    one.publish(session(disk), TIME, [])
    assert b"new" == disk.read(f"{TAG}/{MODEL}")
    assert [] == disk.list(COPIES)


@pytest.mark.parametrize(("interrupted", "is_published"), [(f"-> {TAG}", True), (f"{TAG} ->", False)])
def test_a_replacement_that_another_job_took_over(
    disk: LocalStorage, interrupted: str, is_published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one takes this job for dead, between the two renames or before the first. It finishes what is begun and
    removes the rest, and this job tells what came of it."""
    monkeypatch.setattr("nxd_ckpt.storage.local.exchange", lambda one, other: False)
    whole(disk)
    one = Staged(ATTEMPT, TAG)
    written(disk, one)

    def taken_over(operation: Operation) -> None:
        if operation.name == "rename" and interrupted in operation.key:
            journal.recover(disk)
            disk.remove(one.folder)

    publishing = session(HookedStorage(disk, taken_over))
    if is_published:
        one.publish(publishing, TIME, [])
    else:
        with pytest.raises(FileNotFoundError):
            one.publish(publishing, TIME, [])
    assert (b"new" if is_published else b"old") == disk.read(f"{TAG}/{MODEL}")
    assert is_published is is_visible(disk, TAG, ATTEMPT)


def test_a_staged_tag_is_retired_by_a_rename(disk: LocalStorage) -> None:
    """Its bytes are deleted later."""
    whole(disk, "old")
    Staged(ATTEMPT, TAG).retire(session(disk), "old")
    assert not disk.is_dir("old")
    assert 1 == len(disk.list(TRASH))


def test_a_tag_in_place_is_there_with_done(store: MemoryStorage) -> None:
    """Which comes last, with the order time and whose it is; an intent announced it all the while."""
    one = InPlace(ATTEMPT, TAG)
    one.begin(session(store))
    assert TAG == one.folder
    assert [ATTEMPT] == journal.saves_of(store, TAG)
    assert f"1 {ATTEMPT}".encode() == store.read(f"{TAG}/{MARKER}")
    written(store, one)
    assert not is_visible(store, TAG, ATTEMPT)
    log: list[Operation] = []
    one.publish(session(HookedStorage(store, recording(log))), TIME, [])
    assert b"1700000000 run-2" == store.read(f"{TAG}/{DONE}")
    assert ["sync_dir", "link_new", "sync_dir"] == [done.name for done in log]
    assert is_visible(store, TAG, ATTEMPT)


def test_a_copy_of_nxds_has_its_done(store: MemoryStorage) -> None:
    """Ours would say that there is a manifest."""
    one = copy_publication(session(store), TAG, True, None)
    one.begin(session(store))
    one.publish(session(store), TIME, [])
    assert b"1" == store.read(f"{TAG}/{DONE}")


def test_a_copy_in_place_keeps_what_an_earlier_try_brought(store: MemoryStorage) -> None:
    """But not the old ``done``. There is no intent: what it names would be swept."""
    whole(store)
    store.create(f"{TAG}/half", 5)
    copy_publication(session(store), TAG, True, "of-4").begin(session(store))
    assert not store.is_file(f"{TAG}/{DONE}")
    assert b"old" == store.read(f"{TAG}/{MODEL}")
    assert [] == [*store.list(STAGING), *store.unfinished]
    assert store.is_file(f"{TAG}/{MARKER}")


def test_a_copy_in_place_marks_its_remains(store: MemoryStorage) -> None:
    """So that a later save may replace them."""
    copy_publication(session(store), TAG, False, "of-4").begin(session(store))
    assert b"1" == store.read(f"{TAG}/{MARKER}")


@pytest.mark.parametrize("overwrite", [None, False])
def test_a_tag_in_place_is_not_replaced_unasked(store: MemoryStorage, overwrite: bool | None) -> None:
    """It would be gone before the new one is complete."""
    whole(store)
    with pytest.raises(SaveFailed, match="overwrite=True, which removes it before the new one is complete"):
        InPlace(ATTEMPT, TAG, overwrite).begin(session(store))
    assert b"old" == store.read(f"{TAG}/{MODEL}")
    assert [] == store.list(STAGING)


def test_a_tag_in_place_is_emptied_first(store: MemoryStorage) -> None:
    """``done`` goes before all else, and after the intent is there; uploads that never ended go too."""
    whole(store)
    store.create(f"{TAG}/half", 5)
    log: list[Operation] = []
    InPlace(ATTEMPT, TAG, overwrite=True).begin(session(HookedStorage(store, recording(log))))
    removed = [done.key for done in log if done.name == "remove"]
    assert [f"{TAG}/{DONE}", TAG] == removed
    names = [done.name for done in log]
    assert names.index("write") < names.index("remove")
    assert ([f"{TAG}/{MARKER}"], []) == ([key for key in store.keys if key.startswith(TAG)], store.unfinished)


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("keys", [[f"{TAG}/mine.txt", f"{TAG}/{DONE}"], [TAG]], ids=["directory", "file"])
def test_in_place_what_is_no_checkpoint_is_left_alone(store: MemoryStorage, keys: list[str], resumes: bool) -> None:
    """Nothing of it is removed."""
    for key in keys:
        store.write(key, b"mine")
    with pytest.raises(SaveFailed, match="is not a checkpoint"):
        InPlace(ATTEMPT, TAG, overwrite=True, resumes=resumes).begin(session(store))
    assert {b"mine"} == {store.read(key) for key in keys}


def test_remains_of_an_earlier_save_are_removed_once_nobody_writes(
    store: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this run's attempts the votes are waited for; another run's writers are gone. Then their intents go."""
    waited: list[str] = []
    told: list[tuple[str, int]] = []

    def await_votes(votes: AttemptVotes, *about: Any) -> bool:
        waited.append(votes.attempt)
        return True

    monkeypatch.setattr(AttemptVotes, "report_progress", lambda votes, rank, _: told.append((votes.attempt, rank)))
    monkeypatch.setattr(AttemptVotes, "await_votes", await_votes)
    for attempt in ("run-1", "other-7"):
        journal.declare(store, staging_dir(attempt), TAG)
    for name in ("scheduler.pt", "strange"):
        store.write(f"{TAG}/{name}", b"remains")
    InPlace(ATTEMPT, TAG).begin(session(store))
    assert (["run-1"], [(ATTEMPT, 0)]) == (waited, told)
    assert [ATTEMPT] == journal.saves_of(store, TAG)
    assert (False, True) == (store.is_file(f"{TAG}/scheduler.pt"), store.is_file(f"{TAG}/strange"))


def test_a_rank_that_still_writes_is_not_swept(store: MemoryStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is refused instead."""
    monkeypatch.setattr(AttemptVotes, "report_progress", lambda *_: None)
    monkeypatch.setattr(AttemptVotes, "await_votes", lambda *_: False)
    journal.declare(store, staging_dir("run-1"), TAG)
    with pytest.raises(SaveFailed, match="not all ranks have left it after 0 s"):
        InPlace(ATTEMPT, TAG).begin(session(store))
    assert ["run-1"] == journal.saves_of(store, TAG)


def test_a_tag_that_another_job_claims_is_its(store: MemoryStorage) -> None:
    """The marker is created by one only."""
    others = HookedStorage(store, before("link_new", lambda: store.write(f"{TAG}/{MARKER}", b"1")))
    with pytest.raises(SaveFailed, match="is being written by another job at the same time"):
        InPlace(ATTEMPT, TAG).begin(session(others))


def before(name: str, act: Callable[[], Any]) -> Hook:
    """Calls ``act`` before every operation of that name."""
    return lambda operation: act() if operation.name == name else None


def test_nothing_is_written_over_in_place(store: MemoryStorage) -> None:
    """The same bytes are what an earlier try wrote, whose reply was lost; others are another job's."""
    one = InPlace(ATTEMPT, TAG)
    one.put(store, {"x": b"1"})
    one.put(store, {"x": b"1"})
    with pytest.raises(FileExistsError, match="was written by somebody else meanwhile"):
        one.put(store, {"x": b"2"})
    assert b"1" == store.read(f"{TAG}/x")


def test_a_job_that_was_taken_over_publishes_nothing(store: MemoryStorage) -> None:
    """It asks right before."""
    with pytest.raises(DirectoryInUse):
        InPlace(ATTEMPT, TAG).publish(session(store, TAKEN), TIME, [])
    assert not store.is_file(f"{TAG}/{DONE}")


def test_another_jobs_done_is_its(store: MemoryStorage) -> None:
    """It stays, and the save has failed."""
    store.write(f"{TAG}/{DONE}", b"1700000000 other-1")
    with pytest.raises(SaveFailed, match="another job"):
        InPlace(ATTEMPT, TAG).publish(session(store), TIME, [])
    assert b"1700000000 other-1" == store.read(f"{TAG}/{DONE}")


def test_a_lost_reply_is_looked_up(store: MemoryStorage) -> None:
    """Where ``done`` is there, and ours, the save went through; where it is not, the error counts."""
    one, lost = InPlace(ATTEMPT, TAG), OSError(errno.ETIMEDOUT, "no reply")
    written(store, one)
    with pytest.raises(OSError, match="no reply"):
        one.publish(session(HookedStorage(store, failing("link_new", f"{TAG}/{DONE}", lost))), TIME, [])
    assert not store.is_file(f"{TAG}/{DONE}")
    store.write(f"{TAG}/{DONE}", b"1700000000 run-2")
    one.publish(session(HookedStorage(store, failing("link_new", "*", lost))), TIME, [])

    store.write(f"{TAG}/{DONE}", b"1700000000 other-1")
    with pytest.raises(SaveFailed, match="another job"):
        one.publish(session(HookedStorage(store, failing("link_new", "*", lost))), TIME, [])

    for there in (b"1700000000 run-2", b"1700000000 other-1"):  # link_new is answered, or not: the look is not

        def hook(operation: Operation, there: bytes = there) -> None:
            if operation.name in ("read", "is_file") or (operation.name == "link_new" and there.endswith(b"run-2")):
                raise lost

        store.write(f"{TAG}/{DONE}", there)
        with pytest.raises(OutcomeUnknown, match="may or may not have been written"):
            one.publish(session(HookedStorage(store, hook)), TIME, [])


def test_what_may_still_be_carried_out_has_not_failed(store: MemoryStorage) -> None:
    """A host that stands still writes ``done`` later, and a rank there counts the tag: who comes first decides."""
    one, lost = InPlace(ATTEMPT, TAG), OSError(errno.ETIMEDOUT, "no reply")
    written(store, one)
    with pytest.raises(OutcomeUnknown, match="no reply"):  # not even the note comes through
        one.publish(session(HookedStorage(store, failing("link_new", "*", lost))), TIME, [])
    unanswered = failing("link_new", f"{TAG}/{DONE}", lost)
    with pytest.raises(OSError, match="no reply"):
        one.publish(session(HookedStorage(store, unanswered)), TIME, [])
    assert not journal.decides(store, ATTEMPT, b"saved")

    store.write(outcome_file(ATTEMPT), b"saved")
    with pytest.raises(OutcomeUnknown, match="no reply"):
        one.publish(session(HookedStorage(store, unanswered)), TIME, [])
    store.remove(outcome_file(ATTEMPT))
    full = OSError(errno.ENOSPC, "no space")  # an answer
    with pytest.raises(OSError, match="no space"):
        one.publish(session(HookedStorage(store, failing("link_new", "*", full))), TIME, [])


def test_what_is_not_durable_is_withdrawn(store: MemoryStorage) -> None:
    """Else a failed save would be visible; another job's ``done`` stays."""
    error = OSError(errno.EIO, "not synced")
    with pytest.raises(OSError, match="not synced"):
        InPlace(ATTEMPT, TAG).publish(session(HookedStorage(store, failing("sync_dir", TAG, error, after=1))), TIME, [])
    assert not store.is_file(f"{TAG}/{DONE}")

    def away(operation: Operation) -> None:
        if store.is_file(f"{TAG}/{DONE}") and operation.name in ("sync_dir", "remove"):
            raise error

    with pytest.raises(OSError, match="not synced; its undoing is not durable either: one may be there"):
        InPlace(ATTEMPT, TAG).publish(session(HookedStorage(store, away)), TIME, [])
    store.remove(f"{TAG}/{DONE}")

    def hook(operation: Operation) -> None:
        if operation == Operation("sync_dir", TAG) and store.is_file(f"{TAG}/{DONE}"):
            store.write(f"{TAG}/{DONE}", b"1700000001 other-1")
            raise error

    with pytest.raises(OSError, match="not synced"):
        InPlace(ATTEMPT, TAG).publish(session(HookedStorage(store, hook)), TIME, [])
    assert b"1700000001 other-1" == store.read(f"{TAG}/{DONE}")


@pytest.mark.parametrize("holder", [None, "other-1"])
def test_a_tag_that_was_swept_is_withdrawn(store: MemoryStorage, holder: str | None) -> None:
    """Whoever took the directory over in the last moment removed what ``done`` would have completed."""
    if holder is not None:
        store.write(f"{TAG}/{MANIFEST}", manifest(holder))
    with pytest.raises(DirectoryInUse):
        InPlace(ATTEMPT, TAG).publish(session(store, None, TAKEN), TIME, [])
    assert not store.is_file(f"{TAG}/{DONE}")


@pytest.mark.parametrize("answer", [TAKEN, OSError(errno.EIO, "the lease cannot be read")])
def test_a_tag_that_is_whole_stays(store: MemoryStorage, answer: BaseException) -> None:
    """Also if the lease was lost right after, or cannot be read."""
    one = InPlace(ATTEMPT, TAG)
    written(store, one)
    one.publish(session(store, None, answer), TIME, [])
    assert is_visible(store, TAG, ATTEMPT)


def test_a_tag_in_place_is_retired_by_its_done(store: MemoryStorage) -> None:
    """After an intent, so that somebody removes the rest."""
    whole(store, "old")
    InPlace(ATTEMPT, TAG).retire(session(store), "old")
    assert (False, True) == (store.is_file(f"old/{DONE}"), store.is_file(f"old/{MANIFEST}"))
    (intent,) = store.list(TRASH)
    journal.clear(store, f"{TRASH}/{intent.name}", lambda: True)
    assert not store.is_dir("old")


@pytest.mark.parametrize("present", [{DONE: b"1"}, {MANIFEST: manifest()}, {DONE: b"1", MANIFEST: b"damaged"}])
def test_half_a_tag_is_not_visible(store: MemoryStorage, present: dict[str, bytes]) -> None:
    """Nor one that cannot be read, or looked at."""
    for name, data in present.items():
        store.write(f"{TAG}/{name}", data)
    assert is_visible(store, TAG, ATTEMPT) is False
    store.write(f"{TAG}/{MANIFEST}", manifest())
    store.write(f"{TAG}/{DONE}", b"1")
    assert is_visible(HookedStorage(store, failing("is_file", "*", OSError(errno.EIO, "no"))), TAG, ATTEMPT) is False
