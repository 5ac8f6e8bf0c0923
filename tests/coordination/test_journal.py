"""Publication survives a death at any of its operations: the old tag or the new one is there, complete."""

import errno
from collections.abc import Callable
from functools import partial
from itertools import count, groupby
from pathlib import Path

import pytest

from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import JOURNAL, STAGING, TRASH, pin, staging_dir, trash_file
from nxd_ckpt.core.names import HIDDEN
from nxd_ckpt.storage import local
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import Hook, HookedStorage, Operation, failing, recording

RUN, ATTEMPT, TAG = "run", "run-1", "tag"

WITH_TWO_RENAMES = pytest.mark.parametrize("exchanges", [False], indirect=True)


@pytest.fixture(autouse=True, params=[True, False], ids=["exchange", "two renames"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file system can exchange two names."""
    if not request.param:
        monkeypatch.setattr(local, "exchange", lambda one, other: False)
PARTS = ("model/dp_rank_00_tp_rank_00_pp_rank_00.pt", "manifest.json", "done")


def prepare(path: Path, *, old: bool) -> LocalStorage:
    """A complete staging directory, and the tag that it is to replace."""
    storage = LocalStorage(path)
    for folder, content in [(staging_dir(ATTEMPT), b"new")] + [(TAG, b"old")] * old:
        for part in PARTS:
            storage.write(f"{folder}/{part}", content)
    return storage


def content(storage: Storage) -> set[bytes]:
    """What is in the tag's files: one value where it is whole."""
    return {storage.read(f"{TAG}/{part}") for part in PARTS}


def at_operation(number: int, act: Callable[[], None]) -> Hook:
    """Calls ``act`` just before the operation of that number."""
    numbers = count()

    def hook(operation: Operation) -> None:
        if next(numbers) == number:
            act()

    return hook


class Death(BaseException):
    """What nothing catches: the process is gone, as far as the storage can tell."""


def die() -> None:
    raise Death


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


def dies(call: Callable[[Storage], None], storage: Storage, number: int) -> bool:
    """Whether the call came to its operation of that number, and ended there."""
    try:
        call(HookedStorage(storage, at_operation(number, die)))
    except Death:
        return True
    return False


def publish(storage: Storage) -> None:
    journal.publish(storage, ATTEMPT, TAG, lambda: storage.is_dir(TAG) and content(storage) == {b"new"})


def operations(path: Path, *, old: bool) -> list[Operation]:
    log: list[Operation] = []
    publish(HookedStorage(prepare(path, old=old), recording(log)))
    return log


def moved_out(path: Path) -> int:
    """The number of the operation that takes the old tag away."""
    log = operations(path, old=True)
    renames = [number for number, done in enumerate(log) if done.key.startswith(f"{TAG} ->")]
    return renames[0] if renames else next(number for number, done in enumerate(log) if done.name == "swap")


@pytest.mark.parametrize("old", [False, True])
def test_after_publishing_a_tag_holds_the_new_content_only(tmp_path: Path, old: bool) -> None:
    """The tag holds the new content; staging, journal and the old content are gone."""
    storage = prepare(tmp_path, old=old)
    publish(storage)
    assert {b"new"} == content(storage)
    assert not storage.is_dir(staging_dir(ATTEMPT))
    assert not storage.is_file(JOURNAL)
    assert [] == storage.list(TRASH)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_recovery_can_be_interrupted_anywhere(tmp_path: Path, renames: int) -> None:
    """Recovery can be interrupted and done again, from each of the states that a swap leaves."""
    out = moved_out(tmp_path / "rehearsal")
    for number in range(40):
        storage = prepare(tmp_path / str(number), old=True)
        assert dies(publish, storage, out + renames)
        interrupted = dies(journal.recover, storage, number)
        journal.recover(storage)
        assert {b"new" if renames else b"old"} == content(storage)
        assert not storage.is_file(JOURNAL)
        if not interrupted:
            break
    assert 3 < number < 39


@pytest.mark.parametrize("old", [False, True])
def test_an_error_at_any_operation_is_undone_at_once(tmp_path: Path, old: bool) -> None:
    """A publication that raises has changed nothing; one that is through does not raise, whatever fails after."""
    log = operations(tmp_path / "rehearsal", old=old)
    for number, operation in enumerate(log):
        storage = prepare(tmp_path / str(number), old=old)
        try:
            publish(HookedStorage(storage, at_operation(number, fail)))
        except OSError:
            assert storage.is_dir(staging_dir(ATTEMPT)), operation
            assert old == storage.is_dir(TAG), operation
            assert not old or {b"old"} == content(storage), operation
        else:
            assert {b"new"} == content(storage), operation


def test_of_two_that_recover_at_once_the_second_finds_it_done(tmp_path: Path) -> None:
    """Whoever comes second finds it done: here another process finishes just before each operation."""
    out = moved_out(tmp_path / "rehearsal")
    for number in range(12):
        storage = prepare(tmp_path / str(number), old=True)
        assert dies(publish, storage, out + 1)
        journal.recover(HookedStorage(storage, at_operation(number, partial(journal.recover, storage))))
        assert {b"new"} == content(storage)
        assert not storage.is_file(JOURNAL)


DAMAGED = [
    *(b"", b"{", b"[]", b'{"tag": 1}', b'{"attempt": "run-1"}', b"null", b"7", b"[" * 100_000),
    *(b'{"attempt": "../../../outside", "tag": "x"}', b'{"attempt": "run-1", "tag": "../outside"}'),
    *(b'{"attempt": "..", "tag": "x"}', b'{"attempt": "run-1", "tag": ".nxd_ckpt"}', b'{"attempt": 1, "tag": "x"}'),
    *(b'{"attempt": "/outside", "tag": "x"}', b'{"attempt": "\\u0000", "tag": "x"}'),
    b'{"attempt": "a", "tag": "\\ud800"}',
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_journal_moves_nothing(tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported and set aside; neither recovery nor the next publication trips over it."""
    outside = tmp_path / "outside"
    outside.mkdir()
    storage = prepare(tmp_path / "run", old=True)
    storage.write(JOURNAL, damaged)
    before = set(storage.list())
    journal.recover(storage)
    assert {b"old"} == content(storage)
    assert before == set(storage.list())
    assert outside.is_dir()
    assert not journal.is_open(storage)
    assert f"{storage.url}/{JOURNAL} is damaged, and was" in caplog.text
    publish(storage)
    assert {b"new"} == content(storage)


@WITH_TWO_RENAMES
def test_a_damaged_journal_keeps_the_trash(tmp_path: Path) -> None:
    """The old tag may lie there: nobody can tell which one it was, and nobody deletes it."""
    storage = prepare(tmp_path, old=True)
    assert dies(publish, storage, moved_out(tmp_path / "rehearsal") + 1)
    storage.write(JOURNAL, b"damaged")
    journal.recover(storage)
    journal.discard_trash(storage, RUN)
    (kept,) = (entry.name for entry in storage.list(HIDDEN) if entry.name.startswith("trash.damaged-"))
    (old,) = storage.list(f"{HIDDEN}/{kept}")
    assert b"old" == storage.read(f"{HIDDEN}/{kept}/{old.name}/done")


def test_a_journal_never_moves_through_a_link(tmp_path: Path) -> None:
    """A directory of staging that is a link leads out: what lies there stays."""
    outside = tmp_path / "outside"
    (outside / "alice").mkdir(parents=True)
    storage = LocalStorage(tmp_path / "run")
    storage.write(JOURNAL, b'{"attempt": "alice", "tag": "x"}')
    storage.path(STAGING).symlink_to(outside)
    journal.recover(storage)
    assert (outside / "alice").is_dir()
    assert not journal.is_open(storage)


CHANGING = ("write", "make_dir", "rename", "remove", "sync_dir")
OLD, NEW = f"{TRASH}/", staging_dir(ATTEMPT)
"""The beginning of the name that the old tag is given, and where the new one lies."""
DURABLE = [("sync_dir", ""), ("sync_dir", STAGING), ("sync_dir", TRASH)]
SETTLED = [*DURABLE, ("remove", JOURNAL), ("sync_dir", HIDDEN)]


def changes(log: list[Operation]) -> list[tuple[str, str]]:
    """What was done, in order, without the name that the old tag is given. Syncs run side by side, so they are sorted.
    """
    done = [(done.name, done.key.partition(OLD)[0] or done.key) for done in log if done.name in CHANGING]
    steps = groupby(done, key=DURABLE.__contains__)
    return [change for is_sync, changes in steps for change in (sorted(changes) if is_sync else changes)]


def test_a_new_tag_appears_by_one_rename_that_is_made_durable(tmp_path: Path) -> None:
    """Nothing is announced where nothing is replaced."""
    assert [("rename", f"{NEW} -> {TAG}"), *DURABLE[:2]] == changes(operations(tmp_path, old=False))


@WITH_TWO_RENAMES
def test_each_step_of_a_swap_is_durable_before_the_next(tmp_path: Path) -> None:
    """The journal before the first rename, both renames before the journal goes, and that before the old tag goes."""
    log = changes(operations(tmp_path, old=True))
    announced = [("make_dir", TRASH), ("write", JOURNAL), ("sync_dir", ""), ("sync_dir", HIDDEN)]
    renamed = [("rename", f"{TAG} -> "), ("rename", f"{NEW} -> {TAG}")]
    assert announced == [*log[:2], *sorted(log[2:4])]
    assert [*renamed, *SETTLED] == log[4:11]
    assert {"remove", "sync_dir"} == {name for name, _ in log[11:]}


@WITH_TWO_RENAMES
def test_what_is_undone_is_undone_durably(tmp_path: Path) -> None:
    """The old tag is back in its place, for good, before the journal goes."""
    log: list[Operation] = []

    def hook(operation: Operation) -> None:
        if operation == Operation("rename", f"{NEW} -> {TAG}"):
            log.clear()
            fail()
        log.append(operation)

    with pytest.raises(OSError, match="Input/output error"):
        publish(HookedStorage(prepare(tmp_path, old=True), hook))
    assert ["rename", *(name for name, _ in SETTLED)] == [name for name, _ in changes(log)]
    assert SETTLED == changes(log)[1:]


@WITH_TWO_RENAMES
def test_a_recovery_is_durable_before_the_journal_goes(tmp_path: Path) -> None:
    """Else a crash could lose the rename and keep the journal's removal."""
    storage, log = prepare(tmp_path, old=True), list[Operation]()
    assert dies(publish, storage, moved_out(tmp_path / "rehearsal") + 1)
    journal.recover(HookedStorage(storage, recording(log)))
    assert [("rename", f"{NEW} -> {TAG}"), *SETTLED] == changes(log)


@WITH_TWO_RENAMES
def test_an_earlier_swap_is_finished_first(tmp_path: Path) -> None:
    """Before the next attempt is published, under the same tag or another."""
    storage = prepare(tmp_path, old=True)
    assert dies(publish, storage, moved_out(tmp_path / "rehearsal") + 1)
    storage.write(f"{staging_dir('run-2')}/done", b"newer")
    journal.publish(storage, "run-2", "other", lambda: False)
    assert {b"new"} == content(storage)
    assert not journal.is_open(storage)


def test_an_undo_that_fails_is_left_to_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The save has failed with its own error, which says so; the journal stays, and whoever comes next settles it."""
    storage, broken = prepare(tmp_path, old=True), False

    def hook(operation: Operation) -> None:
        nonlocal broken
        broken = broken or operation.name in ("rename", "swap")
        if broken and operation.name in (*CHANGING, "swap"):
            raise OSError(errno.EROFS, f"{operation.name} failed")

    with pytest.raises(OSError, match=r"(rename|swap) failed; its undoing is not durable either: tag may be there"):
        publish(HookedStorage(storage, hook))
    assert "a failed save of 'tag' could not be undone yet" in caplog.text
    assert journal.is_open(storage)
    journal.recover(storage)
    assert {b"old"} == content(storage)


@pytest.mark.parametrize("content", [None, "file", "directory"])
def test_a_journal_is_open_whatever_it_holds(tmp_path: Path, content: str | None) -> None:
    """Also if something else is in its place."""
    storage = prepare(tmp_path, old=True)
    if content == "file":
        storage.write(JOURNAL, b"damaged")
    elif content == "directory":
        storage.make_dir(JOURNAL)
    assert (content is not None) is journal.is_open(storage)


def test_trash_that_is_empty_is_not_set_aside(tmp_path: Path) -> None:
    """With a damaged journal only a trash that holds something is kept."""
    storage = prepare(tmp_path, old=True)
    storage.write(JOURNAL, b"damaged")
    storage.make_dir(TRASH)
    journal.recover(storage)
    assert storage.is_dir(TRASH)


def test_a_removal_is_durable(tmp_path: Path) -> None:
    """Once it is through, a crash does not bring the tag back."""
    log: list[Operation] = []
    journal.remove_tag(HookedStorage(prepare(tmp_path, old=True), recording(log)), TAG, ATTEMPT)
    assert [("make_dir", TRASH), ("rename", f"{TAG} -> "), ("sync_dir", "")] == changes(log)


def test_a_tag_that_stays_has_its_name_back_for_good(tmp_path: Path) -> None:
    """A power cut after it was away for a moment finds it in its place."""
    log: list[Operation] = []
    storage = HookedStorage(prepare(tmp_path, old=True), recording(log))
    assert not journal.remove_tag(storage, TAG, ATTEMPT, lambda key: True)
    assert ["rename", "rename", "sync_dir"] == [name for name, _ in changes(log)][-3:]
    assert {b"old"} == content(storage)


@pytest.mark.parametrize("old", [True, False])
def test_what_a_rank_counts_as_saved_is_not_undone(tmp_path: Path, old: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It heard nothing from rank 0, whose sync failed, and found the tag; who comes first decides."""
    storage = prepare(tmp_path, old=old)

    def hook(operation: Operation) -> None:
        if operation == Operation("sync_dir", "") and not storage.is_dir(staging_dir(ATTEMPT)):
            assert journal.decides(storage, ATTEMPT, b"saved")
            fail()

    publish(HookedStorage(storage, hook))
    assert {b"new"} == content(storage)
    assert not journal.is_open(storage)
    assert "counts it as saved" in caplog.text
    assert journal.decides(storage, ATTEMPT, b"saved")  # of another rank, too


def test_what_is_undone_no_rank_counts_as_saved(tmp_path: Path) -> None:
    """A rank that comes after the undoing began is refused."""
    storage = prepare(tmp_path, old=True)
    syncs = list[Operation]()

    def hook(operation: Operation) -> None:
        if operation == Operation("sync_dir", "") and (syncs or not storage.is_dir(staging_dir(ATTEMPT))):
            syncs.append(operation)
            if len(syncs) == 1:
                fail()

    with pytest.raises(OSError, match="Input/output error"):
        publish(HookedStorage(storage, hook))
    assert not journal.decides(storage, ATTEMPT, b"saved")
    assert {b"old"} == content(storage)


def test_what_is_pinned_comes_back_from_the_trash(tmp_path: Path) -> None:
    """Durably, and only if nothing has its name; what is not pinned is deleted."""
    storage = prepare(tmp_path, old=True)
    for tag in (TAG, "other"):
        storage.write(f"{trash_file(ATTEMPT, tag)}/done", b"older")
    pin(storage, TAG)
    pin(storage, "elsewhere")
    journal.discard_trash(storage, RUN)
    assert {b"old"} == content(storage)
    assert [] == storage.list(TRASH)
    journal.remove_tag(storage, TAG, ATTEMPT)
    log: list[Operation] = []
    journal.discard_trash(HookedStorage(storage, recording(log)), RUN)
    assert {b"old"} == content(storage)
    moved = ("rename", f"{trash_file(ATTEMPT, TAG)} -> {TAG}")
    at = changes(log).index(moved)
    assert [("sync_dir", folder) for folder in ("", STAGING, TRASH)] == changes(log)[at + 1 : at + 4]
    assert [] == storage.list(TRASH)


def test_what_cannot_be_put_back_is_not_deleted(tmp_path: Path) -> None:
    """The next time is soon enough."""
    storage = prepare(tmp_path, old=True)
    pin(storage, TAG)
    journal.remove_tag(storage, TAG, ATTEMPT)
    away = trash_file(ATTEMPT, TAG)
    fails = failing("rename", f"{away} -> *", OSError(errno.EIO, "no"))
    journal.discard_trash(HookedStorage(storage, fails), RUN)
    assert storage.is_file(f"{away}/done")
    journal.discard_trash(storage, RUN)
    assert {b"old"} == content(storage)


def test_what_another_run_has_moved_away_is_not_deleted(tmp_path: Path) -> None:
    """One that stood still until it was taken over moves it back, if it is not what it had judged. What never was a tag
    is deleted, whoever moved it away."""
    storage = prepare(tmp_path, old=False)
    others = ["other-1-a", "run-2-1-a", "run2-1-a"]
    for name in (*others, "run-1-a", "1a2b3c4d.unfinished"):
        storage.write(f"{TRASH}/{name}/x", b"1")
    journal.discard_trash(storage, RUN)
    assert others == [entry.name for entry in storage.list(TRASH)]


def test_what_cannot_be_deleted_does_not_keep_the_rest(tmp_path: Path) -> None:
    """Nothing visible depends on it: the next time is soon enough."""
    storage = prepare(tmp_path, old=False)
    for name in ("run-1-a", "run-1-b", "run-2-c"):
        storage.write(f"{TRASH}/{name}/x", b"1")
    hooked = HookedStorage(storage, failing("remove", f"{TRASH}/run-1-b", OSError(errno.EIO, "no")))
    journal.discard_trash(hooked, RUN)
    assert ["run-1-b"] == [entry.name for entry in storage.list(TRASH)]
    journal.discard_trash(HookedStorage(storage, failing("list", TRASH, OSError(errno.EIO, "no"))), RUN)
    assert ["run-1-b"] == [entry.name for entry in storage.list(TRASH)]


def test_nothing_is_deleted_before_the_lost_name_is_durable(tmp_path: Path) -> None:
    """After a removal whose sync failed, a power cut could still give the tag its name back: with all that it holds."""
    storage = prepare(tmp_path, old=True)
    fails = HookedStorage(storage, failing("sync_dir", "", OSError(errno.EDQUOT, "no")))
    with pytest.raises(OSError, match="no"):
        journal.remove_tag(fails, TAG, ATTEMPT)
    away = tmp_path / trash_file(ATTEMPT, TAG)
    for _ in range(2):
        journal.discard_trash(fails, RUN)
        assert all((away / part).exists() for part in PARTS)
    log: list[Operation] = []
    journal.discard_trash(HookedStorage(storage, recording(log)), RUN)
    assert not away.exists()
    changes = [operation.name for operation in log if operation.name in ("sync_dir", "remove")]
    assert ["sync_dir", "sync_dir", "remove"] == changes


def interrupted(path: Path) -> LocalStorage:
    """A replacement whose job died once the old tag was away."""
    storage = prepare(path / "tags", old=True)
    assert dies(publish, storage, moved_out(path / "counted") + 1)
    return storage
