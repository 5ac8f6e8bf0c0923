"""Rank 0's decision: what the manifest of a tag says, what it is made of, and what is removed afterwards."""

import errno
import logging
from dataclasses import replace
from typing import Any

import pytest

from nxd_ckpt import effects
from nxd_ckpt.commit.commit import Commit, clean_up, commit
from nxd_ckpt.commit.publication import Staged
from nxd_ckpt.commit.retention import remove_tags
from nxd_ckpt.commit.session import Session
from nxd_ckpt.coordination.control_files import STAGING, TRASH, VOTES, rank_file, staging_dir
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import (
    FileEntry,
    Manifest,
    ParameterSpec,
    Parts,
    RankIndex,
    RankPhases,
    dump_index,
    load_manifest,
)
from nxd_ckpt.core.mesh import MeshGroup
from nxd_ckpt.core.names import MANIFEST
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.retention_rules import Last
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import Vote
from nxd_ckpt.errors import DirectoryInUse, RanksDisagree
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, failing
from tests.core.documents import SHARD
from tests.support import attempts

ATTEMPT, TAG = "run-2", "step_3"
PUBLICATION = Staged(ATTEMPT, TAG)
TP = Topology(tp=2)
WHOLE = ParameterSpec("float32", (4,), Partition())
CUT = ParameterSpec("float32", (8,), Partition(0, num_partitions=2))


def session(storage: Storage, topology: Topology = TP, lease: BaseException | None = None) -> Session:
    return attempts.session(storage, lease, topology=topology)


def prepared(storage: Storage, topology: Topology, crcs: dict[int, int] | None = None, **specs: ParameterSpec) -> None:
    """The indexes of all ranks, each of which holds ``specs``; with the digest of its tensors by rank."""
    for rank in range(topology.world_size):
        at = topology.coordinates_of(rank)
        crc32 = ((crcs or {}).get(rank, 7), 0)
        tensors = tuple(SHARD._replace(name=f"model/{name}", crc32=crc32) for name in specs)
        index = RankIndex(at, {}, (*tensors, SHARD._replace(name="optim/w/step")), specs)
        storage.write(f"{PUBLICATION.folder}/{names.index_file(at)}", dump_index(index))


def votes(topology: Topology, **about: Any) -> list[Vote]:
    index = FileEntry(10, 3)
    return [Vote(rank, plan={"tag": TAG}, replica="r", index=index, **about) for rank in range(topology.world_size)]


def committed(storage: LocalStorage, topology: Topology, ballots: list[Vote], **request: Any) -> Manifest:
    commit(session(storage, topology), topology, ballots, Commit(PUBLICATION, Parts(model=True), **request))
    return load_manifest(storage.read(f"{TAG}/{MANIFEST}"), "manifest")


def test_a_manifest_says_what_the_votes_said(disk: LocalStorage) -> None:
    """A line for each rank, and what all of them took and wrote."""
    prepared(disk, TP, w=WHOLE)
    ballots = votes(TP, nbytes=100)
    ballots[1] = replace(ballots[1], index=FileEntry(20, 4), seconds=0.12345678, nbytes=50)
    about: dict[str, Any] = {"timings": {"stage_seconds": 1.0}, "versions": {"torch": "2"}, "metrics": {"loss": 2.0}}
    found = committed(disk, TP, ballots, **about)
    assert (TAG, ATTEMPT, TP) == (found.tag, found.attempt, found.topology)
    assert (FileEntry(10, 3), FileEntry(20, 4)) == found.ranks
    assert {"stage_seconds": 1.0, "write_seconds": 0.123457, "bytes": 150} == found.timings
    assert ({"torch": "2"}, {"loss": 2.0}, Parts(model=True)) == (found.versions, found.metrics, found.parts)
    assert found.leaders is None
    assert {"w": WHOLE} == found.parameters


@pytest.mark.parametrize(("earlier", "seconds"), [({}, 2.876543), ({"commit_seconds": 2.0}, 4.876543)])
def test_a_manifest_says_how_long_the_commit_took(
    disk: LocalStorage, monkeypatch: pytest.MonkeyPatch, earlier: dict[str, float], seconds: float
) -> None:
    """Since the votes were there, beside what it took before."""
    monkeypatch.setattr(effects, "monotonic", lambda: 100.0)
    prepared(disk, TP)
    found = committed(disk, TP, votes(TP), timings=earlier, voted=97.1234567)
    assert seconds == found.timings["commit_seconds"]


def test_a_manifest_says_how_each_of_several_ranks_took_part(disk: LocalStorage) -> None:
    """If the votes say on which host it was, as those of live saves do."""
    prepared(disk, TP)
    ballots = [
        replace(ballot, stage_seconds=0.5 + ballot.rank, seconds=2.0, nbytes=8, host="node") for ballot in votes(TP)
    ]
    phases = (RankPhases(0.5, 2.0, 8, "node"), RankPhases(1.5, 2.0, 8, "node"))
    assert phases == committed(disk, TP, ballots).phases
    prepared(disk, TP)
    assert () == committed(disk, TP, [ballots[0], replace(ballots[1], host="")]).phases


def test_of_a_single_rank_the_timings_say_it(disk: LocalStorage) -> None:
    prepared(disk, Topology())
    assert () == committed(disk, Topology(), votes(Topology(), host="node")).phases


def test_a_rank_without_an_index_has_an_empty_line(disk: LocalStorage) -> None:
    """The ranks of a mesh job but its leaders have none."""
    prepared(disk, TP)
    ballots = votes(TP)
    ballots[1] = replace(ballots[1], index=None)
    assert (FileEntry(10, 3), FileEntry(0, 0)) == committed(disk, TP, ballots).ranks


def test_a_tag_is_later_than_all_before(disk: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a microsecond at least, whatever the clock says; a clock that is a little behind is waited for."""
    clock = [1000.25]
    monkeypatch.setattr(effects, "time", lambda: clock[0])
    monkeypatch.setattr(effects, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    prepared(disk, TP)
    assert 1000.25 == committed(disk, TP, votes(TP)).order_time
    disk.write("other/checkpoint", b"1")
    disk.write("other/done", b"1")
    disk.set_time("other/done", 5000.0)
    prepared(disk, TP)
    order_time = committed(disk, TP, votes(TP)).order_time
    assert (5000.000001, 1000.25) == (order_time, clock[0])
    assert pytest.approx(order_time, abs=1e-6) == disk.time(f"{TAG}/done")
    disk.set_time("other/done", 5001.0)
    clock[0] = 5000.5
    prepared(disk, TP)
    assert (5001.000001, 5001.0) == (committed(disk, TP, votes(TP)).order_time, clock[0])


def test_parameters_come_from_every_stage_and_expert_group() -> None:
    """One rank of each says what all of it hold."""
    request = Commit(PUBLICATION, Parts())
    assert [0] == request.leaders(Topology(dp=2, tp=2))
    assert [0, 2, 4, 6] == request.leaders(Topology(dp=2, tp=2, pp=2, ep=2))
    groups = [MeshGroup((0, 2)), MeshGroup((1, 3))]
    assert [0, 1] == replace(request, groups=groups).leaders(Topology(dp=4))


def test_a_mesh_job_is_judged_by_its_groups(disk: LocalStorage) -> None:
    """Ranks of one group hold the same, and the manifest names the first of each."""
    mesh, groups = Topology(dp=4), [MeshGroup((0, 2)), MeshGroup((1, 3))]
    prepared(disk, mesh)
    ballots = [replace(vote, replica="ab"[vote.rank % 2]) for vote in votes(mesh)]
    assert (0, 1) == committed(disk, mesh, ballots, groups=groups).leaders
    prepared(disk, mesh)
    with pytest.raises(RanksDisagree, match="ranks 0 and 2 held the same tensors"):
        committed(disk, mesh, [*ballots[:2], replace(ballots[2], replica="b"), ballots[3]], groups=groups)


def test_rank_0_does_not_read_its_own_index(disk: LocalStorage) -> None:
    """It has just written it. Of another leader's it must."""
    pipeline = Topology(pp=2)
    prepared(disk, pipeline, b=WHOLE)
    read: list[str] = []
    hooked = HookedStorage(disk, lambda done: read.append(done.key) if done.name == "read" else None)
    request = Commit(PUBLICATION, Parts(model=True), parameters={"a": CUT})
    commit(session(hooked, pipeline), pipeline, votes(pipeline), request)
    assert [names.index_file(pipeline.coordinates_of(1))] == [key.split("/", 3)[-1] for key in read if "/index/" in key]
    assert {"a": CUT, "b": WHOLE} == load_manifest(disk.read(f"{TAG}/{MANIFEST}"), "manifest").parameters


def test_replicas_that_differ_are_marked_as_unknown(disk: LocalStorage, caplog: pytest.LogCaptureFixture) -> None:
    """Their partition attributes were lost. Those that are cut differ in any case."""
    prepared(disk, TP, {0: 1, 1: 2}, lost=WHOLE, cut=CUT)
    ballots = [replace(vote, replicated=vote.rank) for vote in votes(TP)]
    found = committed(disk, TP, ballots).parameters
    assert (False, True) == (found["lost"].partition.known, found["cut"].partition.known)
    assert "differ between tp ranks: lost." in caplog.text


def test_replicas_that_are_equal_stay_known(disk: LocalStorage, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever differs beside them."""
    prepared(disk, TP, equal=WHOLE)
    ballots = [replace(vote, replicated=vote.rank) for vote in votes(TP)]
    assert committed(disk, TP, ballots).parameters["equal"].partition.known
    assert "" == caplog.text


def old_tags(disk: LocalStorage, *tags: str) -> None:
    for seconds, tag in enumerate(tags):
        for name in ("checkpoint", "done"):
            disk.write(f"{tag}/{name}", b"1")
        disk.set_time(f"{tag}/done", 100.0 + seconds)


def tags_of(disk: LocalStorage) -> list[str]:
    return [entry.name for entry in disk.list() if not entry.name.startswith(".")]


def test_a_tag_is_removed_on_request(disk: LocalStorage) -> None:
    """With what lies in the trash; not by a job that was taken over, and nothing that is no checkpoint."""
    prepared(disk, TP)
    committed(disk, TP, votes(TP))
    disk.make_dir("other")
    job = session(disk)
    job.counter = 3
    assert ["other"] == [*remove_tags(job, ["other"], False).refused]
    taken = session(disk, lease=DirectoryInUse("taken"))
    taken.counter = 3
    with pytest.raises(DirectoryInUse):
        remove_tags(taken, [TAG], False)
    assert disk.is_dir(TAG)
    assert remove_tags(job, [TAG], False)
    assert (["other"], []) == ([entry.name for entry in disk.list() if entry.name[0] != "."], disk.list(TRASH))


def test_a_directory_that_is_no_checkpoint_is_not_removed_on_request(disk: LocalStorage) -> None:
    """Though it holds a file of a marker's name."""
    for name in ("checkpoint", "mine.txt"):
        disk.write(f"mine/{name}", b"1")
    job = session(disk)
    job.counter = 3
    refused = remove_tags(job, ["mine"], False).refused
    assert "mine holds more than a checkpoint" in refused["mine"]
    assert disk.is_file("mine/mine.txt")


@pytest.mark.parametrize("number", range(3))
def test_a_job_that_is_taken_over_completes_and_removes_nothing(disk: LocalStorage, number: int) -> None:
    """Whenever it is noticed: before it reads what ranks wrote, before it writes the manifest, before it removes."""
    old_tags(disk, "a")
    if number > 0:
        prepared(disk, TP)
    job = attempts.session(disk, *[None] * number, attempts.TAKEN, topology=TP)
    request = Commit(PUBLICATION, Parts(model=True), rules=[Last(1)])
    if number < 2:
        with pytest.raises(DirectoryInUse):
            commit(job, TP, votes(TP), request)
        assert not disk.is_file(f"{PUBLICATION.folder}/manifest.json")
    else:
        commit(job, TP, votes(TP), request)
    assert disk.is_dir("a")


def test_a_retention_that_fails_does_not_fail_the_save(disk: LocalStorage, caplog: pytest.LogCaptureFixture) -> None:
    """The new tag is safe already."""
    old_tags(disk, "a")
    prepared(disk, TP)
    hooked = HookedStorage(disk, failing("rename", "a ->*", OSError(errno.EIO, "no")))
    request = Commit(PUBLICATION, Parts(model=True), rules=[Last(1)])
    commit(session(hooked), TP, votes(TP), request)
    assert ["a", TAG] == tags_of(disk)
    assert "retention in" in caplog.text


def remains(storage: Storage, attempt: str, *ranks: int) -> None:
    """What an attempt leaves, on which these ranks voted."""
    storage.write(f"{staging_dir(attempt)}/x", b"1")
    for rank in ranks:
        storage.write(rank_file(attempt, rank, "vote"), b"{}")


def left(storage: Storage) -> tuple[list[str], list[str]]:
    """The attempts of which files are left, and those of which votes are."""
    staged, voted = ([entry.name for entry in storage.list(folder)] for folder in (STAGING, VOTES))
    return staged, voted


def test_what_nobody_writes_to_any_more_is_removed(disk: LocalStorage) -> None:
    """All voted on it, or on a later one. Other runs' attempts, and names that are none, are left alone."""
    for attempt, ranks in {"run-1": (), "run-2": (0, 1), "run-3": (), "other-1": (0, 1), "run-x": ()}.items():
        remains(disk, attempt, *ranks)
    for name in ("run-1-old", "other-1-old"):
        disk.write(f"{TRASH}/{name}/x", b"1")
    clean_up(session(disk), 2)
    assert (["other-1", "run-3", "run-x"], ["other-1", "run-2"]) == left(disk)
    assert ["other-1-old"] == [entry.name for entry in disk.list(TRASH)]


def test_what_a_rank_may_still_write_to_stays(disk: LocalStorage) -> None:
    """Until all voted; the votes stay too."""
    for attempt, ranks in {"run-1": (0,), "run-2": (1,), "run-3": (0, 1)}.items():
        remains(disk, attempt, *ranks)
    clean_up(session(disk), 2)
    assert (["run-1", "run-2"], ["run-1", "run-2", "run-3"]) == left(disk)


def test_votes_of_earlier_attempts_go_once_all_are_past_them(disk: LocalStorage) -> None:
    """Those of the last one stay: its verdict may not have been read yet."""
    for attempt, ranks in {"run-1": (0,), "run-2": (0, 1), "run-3": (), "other-1": ()}.items():
        disk.make_dir(f"{VOTES}/{attempt}")
        for rank in ranks:
            disk.write(rank_file(attempt, rank, "vote"), b"{}")
    clean_up(session(disk), 2)
    assert ["other-1", "run-2", "run-3"] == left(disk)[1]


def test_what_cannot_be_removed_keeps_nothing_else(disk: LocalStorage, caplog: pytest.LogCaptureFixture) -> None:
    """The next save tries again."""
    for attempt in ("run-1", "run-2"):
        remains(disk, attempt, 0, 1)
    with caplog.at_level(logging.WARNING):
        clean_up(session(HookedStorage(disk, failing("rename", "*staging/run-1 ->*", OSError(errno.EIO, "no")))), 3)
    assert ["run-1"] == left(disk)[0]
    assert "could not remove" in caplog.text


def test_in_a_store_only_the_holder_of_the_lease_cleans_up(caplog: pytest.LogCaptureFixture) -> None:
    """Another job may be writing the same tags there."""
    store = MemoryStorage()
    remains(store, "run-1", 0, 1)
    clean_up(session(store, lease=DirectoryInUse("taken over")), 2)
    assert ["run-1"] == left(store)[0]
    assert "taken over" in caplog.text


def test_on_a_file_system_anybody_may(disk: LocalStorage) -> None:
    """There the names are of this run only."""
    remains(disk, "run-1", 0, 1)
    clean_up(session(disk, lease=DirectoryInUse("taken over")), 2)
    assert [] == left(disk)[0]
