"""What a job does that stood still until another one took its directory over, and wakes up: nothing is lost by it."""

import errno
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nxd_ckpt.commit.publication import InPlace, Publication, Staged, is_visible
from nxd_ckpt.commit.retention import retire_unpinned
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import COPIES, PINS, STAGING, TRASH, VOTES, staging_dir, unfinished_dir
from nxd_ckpt.core.manifest import FileEntry, RankIndex
from nxd_ckpt.core.names import DONE, MANIFEST, MARKER
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import DirectoryInUse
from nxd_ckpt.output.cp_files import CopyMeans, CopyResult, FileCopy, files_to_copy
from nxd_ckpt.saving.writing import write_index
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import CopyPace
from nxd_ckpt.tag.choosing import open_complete_tag
from nxd_ckpt.tag.directory import find_tag
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, failing
from tests.conversion.tags import save_example
from tests.support.attempts import ATTEMPT, MODEL, TAG, TAKEN, TIME, session, whole, written

OTHER = MODEL.replace("tp_rank_00", "tp_rank_01")


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("one", [Staged(ATTEMPT, TAG), Staged(ATTEMPT, TAG, resumes=True)])
def test_a_staged_tag_that_lost_a_file_does_not_appear(disk: LocalStorage, one: Staged, count: int) -> None:
    """Another job took over, and moved away what this one had staged; what was written since then is not all."""
    files = [f"index/{number}.json" for number in range(count)]
    written(disk, one)
    for name in files:
        one.put(disk, {name: b"{}"})
    disk.remove(f"{one.folder}/{files[-1]}")
    with pytest.raises(DirectoryInUse, match=rf"{files[-1]} was written, and is gone: another job took .* over"):
        one.publish(session(disk), TIME, files)
    assert not disk.is_dir(TAG)
    one.put(disk, {files[-1]: b"{}"})
    one.publish(session(disk), TIME, files)
    assert is_visible(disk, TAG, ATTEMPT)


def test_a_file_that_a_listing_does_not_show_yet_is_asked_for(
    disk: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems may show an old listing for a while."""
    one, files = Staged(ATTEMPT, TAG), [f"index/{number}.json" for number in range(20)]
    for name in files:
        one.put(disk, {name: b"{}"})
    listed = disk.list(f"{one.folder}/index")
    monkeypatch.setattr(LocalStorage, "list", lambda self, key="": listed[:-1] if key.endswith("index") else [])
    one.must_hold(disk, files)


def test_a_rank_whose_files_were_moved_away_does_not_vote_for_them(disk: LocalStorage) -> None:
    """They were written, then another job took over, then comes the index, which makes the folder anew."""
    one = Staged(ATTEMPT, TAG)
    written(disk, one)
    index = RankIndex(Coordinates(), {MODEL: FileEntry(3, 0)}, ())
    write_index(disk, one, "index/x.json", index)
    journal.clear(disk, one.folder, lambda: True)
    with pytest.raises(DirectoryInUse, match=f"{MODEL} was written, and is gone"):
        write_index(disk, one, "index/x.json", index)


@pytest.mark.parametrize("answers", [[TAKEN], [None, TAKEN]], ids=["before", "when it was moved"])
def test_a_copy_is_not_published_by_a_job_that_was_taken_over(
    disk: LocalStorage, answers: list[BaseException | None]
) -> None:
    """Another job may be filling the same folder, which no claim sweeps, and goes on with what is there."""
    one = Staged(ATTEMPT, TAG, resumes=True)
    whole(disk)
    written(disk, one)
    with pytest.raises(DirectoryInUse):
        one.publish(session(disk, *answers), TIME, [])
    assert b"old" == disk.read(f"{TAG}/{MODEL}")
    assert ["manifest.json", "model"] == [entry.name for entry in disk.list(f"{COPIES}/{TAG}")]
    one.publish(session(disk), TIME, [])
    assert b"new" == disk.read(f"{TAG}/{MODEL}")
    assert [] == disk.list(STAGING)


@pytest.mark.parametrize(("resumes", "number"), [(False, 0), (False, 1), (True, 0), (True, 1)])
def test_nothing_in_place_begins_after_a_take_over(store: MemoryStorage, resumes: bool, number: int) -> None:
    """Whenever it is noticed, also where nothing is there yet: no file of the tag is made, and no upload ended. There
    is an intent only if it was noticed after that."""
    one = InPlace(ATTEMPT, TAG, True, resumes=resumes)
    upload = store.create(f"{TAG}/{MODEL}", 3)
    with pytest.raises(DirectoryInUse):
        one.begin(session(store, *[None] * number, TAKEN))
    assert [f"{TAG}/{MODEL}"] == store.unfinished
    assert ([staging_dir(ATTEMPT)] if number and not resumes else []) == [key for key in store.keys if VOTES not in key]
    upload.abort()


def test_in_place_it_is_the_take_over_that_is_told(store: MemoryStorage) -> None:
    """Not that the tag exists: it may be the other job's."""
    whole(store)
    with pytest.raises(DirectoryInUse):
        InPlace(ATTEMPT, TAG, False).begin(session(store, TAKEN))


def test_uploads_are_not_ended_after_a_take_over(store: MemoryStorage) -> None:
    """Not if it happened while what is left of an earlier save was removed either."""
    journal.declare(store, staging_dir("other-7"), TAG)
    store.write(f"{TAG}/{MODEL}", b"remains")
    upload = store.create(f"{TAG}/{OTHER}", 3)
    with pytest.raises(DirectoryInUse):
        InPlace(ATTEMPT, TAG, True).begin(session(store, None, None, None, TAKEN))
    assert [f"{TAG}/{OTHER}"] == store.unfinished
    upload.abort()


def test_a_done_that_is_gone_already_is_not_withdrawn(store: MemoryStorage) -> None:
    """The job that took over has removed it."""
    one = InPlace(ATTEMPT, TAG)
    written(store, one)
    store.remove(f"{TAG}/{MANIFEST}")

    def gone(operation: Operation) -> None:
        if operation == Operation("read", f"{TAG}/{DONE}"):
            store.remove(f"{TAG}/{DONE}")

    with pytest.raises(DirectoryInUse):
        one.publish(session(HookedStorage(store, gone), None, TAKEN), TIME, [])


@pytest.mark.parametrize(("count", "asked"), [(8, ["is_file"] * 8), (9, ["list"])])
def test_few_files_are_asked_for_and_many_are_listed(disk: LocalStorage, count: int, asked: list[str]) -> None:
    """All ranks have files in some directories: thousands are not listed for a few."""
    one, files, log = Staged(ATTEMPT, TAG), [f"model/{number}.pt" for number in range(count)], list[Operation]()
    for name in files:
        one.put(disk, {name: b"1"})
    one.must_hold(HookedStorage(disk, log.append), files)
    assert asked == [done.name for done in log]


def test_a_copy_that_cannot_be_put_back_tells_why_it_was_not_published(disk: LocalStorage) -> None:
    """The lease was lost; that is what counts."""
    one = Staged(ATTEMPT, TAG, resumes=True)
    written(disk, one)
    fails = failing("rename", f"* -> {COPIES}/*", OSError(errno.EIO, "no"))
    with pytest.raises(DirectoryInUse):
        one.publish(session(HookedStorage(disk, fails), None, TAKEN), TIME, [])


@pytest.mark.parametrize("number", range(2))
def test_a_copy_counts_a_lease_that_is_gone_as_lost(
    disk: LocalStorage, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after it is moved to where it is published from."""
    one, asked, job = Staged(ATTEMPT, TAG, resumes=True), itertools.count(), session(disk)
    written(disk, one)
    monkeypatch.setattr(job, "require", lambda strictly=False: strictly and next(asked) == number and _raise(TAKEN))
    with pytest.raises(DirectoryInUse):
        one.publish(job, TIME, [])


def _raise(error: BaseException) -> bool:
    raise error


def test_a_copy_removes_nothing_in_a_store_after_a_take_over(store: MemoryStorage, tmp_path: Path) -> None:
    """What is there by then is another job's: neither what is surplus, nor what is not as it should be."""
    source = save_example(tmp_path / "input", 1)
    opened = open_complete_tag(LocalStorage(source.parent), source.name)
    file = files_to_copy(opened)[0]
    for name in (file.name, "surplus"):
        store.write(f"{TAG}/{name}", b"other")
    holds = [True]

    def confirm() -> bool:
        return holds[0] or _raise(TAKEN)

    bringing = FileCopy(opened, store, TAG, CopyMeans(ThreadPoolExecutor(1), CopyPace(None)), confirm=confirm)
    holds[0] = False
    for call in (lambda: bringing.remove("surplus"), lambda: bringing.copy(file)):
        with pytest.raises(DirectoryInUse):
            call()
    assert [b"other"] * 2 == [store.read(f"{TAG}/{name}") for name in (file.name, "surplus")]
    holds[0] = True
    assert CopyResult.COPIED is bringing.copy(file)


@pytest.mark.parametrize("place", [staging_dir("run-1"), f"{COPIES}/x"])
def test_what_was_staged_is_moved_away_at_once(disk: LocalStorage, place: str) -> None:
    """Before the first file is deleted: who wakes up finds all of it, or nothing. What a killed job had moved away
    there is no obstacle."""
    log = list[Operation]()
    for _ in range(2):
        for name in ("a", "b/c"):
            disk.write(f"{place}/{name}", b"1")
        disk.write(f"{unfinished_dir(place)}/x", b"1")
        journal.clear(HookedStorage(disk, log.append), place, lambda: True)
        assert (False, []) == (disk.is_dir(place), disk.list(TRASH))
    changes = [done.key for done in log if done.name in ("rename", "remove")]
    assert [unfinished_dir(place), f"{place} -> {unfinished_dir(place)}", unfinished_dir(place)] * 2 == changes


def test_an_intent_is_not_finished_by_a_job_that_was_taken_over(store: MemoryStorage) -> None:
    """Its successor may be saving that tag by now: all of it stays, and the intent."""
    store.write(f"{TAG}/{MODEL}", b"1")
    journal.declare(store, staging_dir(ATTEMPT), TAG)
    with pytest.raises(DirectoryInUse):
        journal.clear(store, staging_dir(ATTEMPT), session(store, TAKEN).confirm)
    journal.clear(store, staging_dir(ATTEMPT), lambda: False)
    assert [staging_dir(ATTEMPT), f"{TAG}/{MODEL}"] == store.keys


def test_what_comes_into_a_tag_while_an_intent_is_finished_stays(store: MemoryStorage) -> None:
    """Whoever was to finish it stood still after it had listed the tag, until another job saved there."""

    def save() -> bool:
        store.remove(TAG)
        whole(store)
        return True

    store.write(f"{TAG}/{MODEL}", b"unfinished")
    journal.declare(store, staging_dir(ATTEMPT), TAG)
    journal.clear(store, staging_dir(ATTEMPT), save)
    assert b"old" == store.read(f"{TAG}/{MODEL}")


@pytest.mark.parametrize(("ended", "stays"), [("5 run-1", True), ("1", True), ("3 run-0", False)])
def test_a_done_of_another_attempt_completes_no_tag(store: MemoryStorage, ended: str, stays: bool) -> None:
    """A request of an earlier save, which was given up, put its ``done`` into a tag that was being saved again. NxD's,
    which names no attempt, completes one."""
    for name, content in ((MARKER, "1 run-1"), (MODEL, "1"), (DONE, ended)):
        store.write(f"{TAG}/{name}", content.encode())
    journal.declare(store, staging_dir("run-1"), TAG)
    journal.clear(store, staging_dir("run-1"), lambda: True)
    assert (3 if stays else 0) == len(store.keys)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_tag_that_was_saved_anew_since_it_was_judged_is_not_retired(
    disk: LocalStorage, store: MemoryStorage, in_place: bool
) -> None:
    """A job that stood still until another one had saved the same tag. Nor one of which that cannot be told."""
    storage: Storage = store if in_place else disk
    one: Publication = InPlace(ATTEMPT, TAG) if in_place else Staged(ATTEMPT, TAG)
    whole(storage, "old")
    storage.write(f"old/{DONE}", b"5 run-1" if in_place else b"1")
    storage.set_time(f"old/{DONE}", 5.0)
    judged = find_tag(storage, "old")
    assert judged is not None

    def saved_anew(operation: Operation) -> None:
        """Just before it is removed, or moved away."""
        if operation.name == "rename" and operation.key.startswith("old ->"):
            disk.set_time(f"old/{DONE}", 6.0)
        if operation.name == "write" and operation.key.startswith(TRASH):
            store.write(f"old/{DONE}", b"6 run-9")

    def fails(operation: Operation) -> None:
        if operation.name == "list" and operation.key == PINS and next(asked) > 0:
            raise OSError(errno.EIO, "no")

    asked = itertools.count()
    assert not retire_unpinned(session(HookedStorage(storage, saved_anew)), one, judged)
    assert [] == storage.list(TRASH)
    again = find_tag(storage, "old")
    assert again is not None
    with pytest.raises(OSError, match="no"):
        retire_unpinned(session(HookedStorage(storage, fails)), one, again)
    assert storage.is_file(f"old/{DONE}")
    assert retire_unpinned(session(storage), one, again)
    assert not storage.is_file(f"old/{DONE}")
    storage.remove("old")
    assert not retire_unpinned(session(storage), one, again), "it is gone, which is no error"
