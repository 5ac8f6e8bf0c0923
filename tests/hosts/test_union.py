"""The hosts' disks as one store: what lies where, and what is found after a host was away, lost or replaced."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.control_files import LEASE, ON_HOSTS, STAGING, VOTES
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import DirEntry, Storage, completed
from nxd_ckpt.storage.hosts.directory import OwnDirectory
from nxd_ckpt.storage.hosts.hosts_storage import HostsStorage
from tests.hosts.views import World

Make = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Worlds, on the same directories unless told otherwise."""
    made: list[World] = []

    def new(hosts: int = 3, replicas: int = 1) -> World:
        made.append(World(tmp_path, hosts, replicas))
        return made[-1]

    yield new
    for world in made:
        world.close()


def put(storage: Storage, key: str, data: bytes) -> None:
    """Write a data file."""
    writer = storage.create(key, len(data))
    with completed(writer):
        writer.write_at(0, data)


def save(world: World, tag: str, attempt: str, order_time: int) -> None:
    """What a save of that tag leaves: a file of each host, and what says what it is."""
    home = world.views[0]
    home.link_new(f"{tag}/checkpoint", f"1 {attempt}".encode())
    for number, view in enumerate(world.views):
        put(view, f"{tag}/model/{number}.pt", f"{attempt} {number}".encode())
    home.link_new(f"{tag}/manifest.json", attempt.encode())
    home.link_new(f"{tag}/done", f"{order_time} {attempt}".encode())


def files(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())


def test_each_file_lies_where_it_belongs(make: Make) -> None:
    """Data on its writer's host alone, what says what it is on every host, the job's own files at home, but intents."""
    world = make()
    save(world, "t", "run-1", 5)
    world.views[1].link_new("t/index/1.json", b"{}")
    world.views[2].write(f"{VOTES}/run-1/vote", b"1")
    world.views[0].write(f"{STAGING}/run-1", b"1")
    common = [f"{STAGING}/run-1", "t/checkpoint", "t/done", "t/manifest.json"]
    own = [[f"{VOTES}/run-1/vote", "t/model/0.pt"], ["t/index/1.json", "t/model/1.pt"], ["t/model/2.pt"]]
    assert [sorted(common + one) for one in own] == [files(path) for path in world.paths]


def test_each_host_sees_all(make: Make) -> None:
    """Listings, sizes and bytes of what the others wrote."""
    world = make()
    save(world, "t", "run-1", 5)
    for view in world.views:
        assert [DirEntry(f"{number}.pt", False) for number in range(3)] == view.list("t/model")
        assert [b"run-1 0", b"run-1 1", b"run-1 2"] == [view.read(f"t/model/{number}.pt") for number in range(3)]
        assert 2 * len(b"run-1 0") == view.received
    world.views[1].remove("t")
    assert [[], [], []] == [view.list() for view in world.views]


def test_the_disk_of_a_host_that_was_replaced_is_empty(make: Make) -> None:
    """What says what the tag is is still there; its data is missing, which is no other error."""
    world = make()
    save(world, "t", "run-1", 5)
    shutil.rmtree(world.paths[0])
    world = make()
    for view in world.views:
        assert b"5 run-1" == view.read("t/done")
        assert ["1.pt", "2.pt"] == [entry.name for entry in view.list("t/model")]
        with pytest.raises(FileNotFoundError, match=r"t/model/0\.pt does not exist on any of 3 hosts"):
            view.read("t/model/0.pt")


def test_a_host_that_does_not_answer_is_named(make: Make) -> None:
    """It is not taken for one without the file; what every host has is read from the others."""
    world = make()
    save(world, "t", "run-1", 5)
    world.lose(2)
    view = world.views[0]
    assert [b"5 run-1", b"run-1 1"] == [view.read("t/done"), view.read("t/model/1.pt")]
    for refused in (lambda: view.read("t/model/2.pt"), lambda: view.list("t/model"), lambda: view.remove("t")):
        with pytest.raises(ConnectionError, match=r"host 2 \(host 2\) is away"):
            refused()
    assert [] == files(world.paths[0] / "t"), "the others removed it all the same"


def test_an_older_save_of_the_name_is_not_mixed_in(make: Make, tmp_path: Path) -> None:
    """A host comes back with files that the others have replaced meanwhile: they are shadowed, and removed with the
    tag."""
    world = make()
    save(world, "t", "run-1", 5)
    shutil.copytree(world.paths[2], tmp_path / "old")
    world.views[0].remove("t")
    save(world, "t", "run-2", 7)
    shutil.rmtree(world.paths[2])
    shutil.move(tmp_path / "old", world.paths[2])
    world = make()
    for view in world.views:
        assert b"7 run-2" == view.read("t/done")
        assert b"run-2" == view.read("t/manifest.json")
        assert ["0.pt", "1.pt"] == [entry.name for entry in view.list("t/model")]
        with pytest.raises(FileNotFoundError):
            view.read("t/model/2.pt")
    world.views[0].remove("t")
    assert [[], [], []] == [files(path) for path in world.paths]


def test_rank_0_may_be_on_another_host_after_a_restart(make: Make, tmp_path: Path) -> None:
    """What lies on the host that was its own is found there, and replaced there."""
    world = make()
    assert world.views[0].link_new(LEASE, b"one")
    world.views[0].write(f"{VOTES}/run-1/vote", b"1")
    (tmp_path / "0").rename(tmp_path / "1")
    home = make().views[0]
    assert not home.link_new(LEASE, b"two")
    assert b"one" == home.read(LEASE)
    assert [False, True] == [home.exchange(LEASE, b"other", b"two"), home.exchange(LEASE, b"one", b"two")]
    assert [DirEntry("run-1", True)] == home.list(VOTES)
    assert b"1" == home.read(f"{VOTES}/run-1/vote")
    home.remove(LEASE)
    assert home.link_new(LEASE, b"three")


def test_the_heartbeat_of_a_job_that_took_over_is_the_one_that_is_read(make: Make, tmp_path: Path) -> None:
    """From any host, wherever the dead job had its own."""
    world = make()
    dead = lease.acquire(world.views[2], "dead", 1.0)
    lease.Heartbeat(world.views[2], dead, 0.01).stop()
    world.views[2].write(LEASE, world.views[2].read(LEASE).replace(b'"born": "', b'"born": "1'))  # its process is gone
    held = lease.acquire(world.views[0], "new", 1.0)
    assert [0] * 3 == [lease.last_beat(view, held) for view in world.views]
    beats = lease.Heartbeat(world.views[0], held, 0.01)
    while lease.last_beat(world.views[2], held) == 0:
        time.sleep(0.01)
    beats.stop()
    lease.release(world.views[0], held)
    assert [None] * 3 == [lease.last_beat(view, held) for view in world.views]


def test_files_of_replicas_are_on_the_next_host_too(make: Make) -> None:
    """Complete when their writer has closed. Whatever host is replaced then, every file is there."""
    world = make(4, 2)
    save(world, "t", "run-1", 5)
    world.views[3].link_new("t/index/3.json", b"{}")
    data = ["t/index/3.json", "t/model/2.pt", "t/model/3.pt"]
    assert data == [file for file in files(world.paths[3]) if file.count("/") == 2]
    for lost in range(4):
        kept = world.paths[lost].with_name("kept")
        world.paths[lost].rename(kept)
        again = make(4, 2)
        for view in again.views:
            found = [view.read(f"t/model/{number}.pt") for number in range(4)]
            assert [f"run-1 {number}".encode() for number in range(4)] == found
            assert b"{}" == view.read("t/index/3.json")
        shutil.rmtree(world.paths[lost], ignore_errors=True)
        kept.rename(world.paths[lost])


def test_a_replica_that_cannot_be_written_fails_the_file(make: Make) -> None:
    """With an error that names the host."""
    world = make(3, 2)
    world.lose(1)
    with pytest.raises(ConnectionError, match="host 1"):
        put(world.views[0], "t/model/0.pt", b"x" * 100)


@pytest.mark.parametrize(("hosts", "has_it"), [(3, [True, False, True]), (2, [False, False])])
def test_what_says_that_a_tag_is_complete_is_on_as_many_hosts(
    make: Make, monkeypatch: pytest.MonkeyPatch, hosts: int, has_it: list[bool]
) -> None:
    """Where one is lost meanwhile, on all that answer, and on none if that is fewer than replicas are: it would be lost
    with them, though the files are not."""
    world = make(hosts, 2)
    world.views[0].link_new("t/checkpoint", b"1 run-1")
    home = world.own[0].link_new

    def lose_another(key: str, data: bytes) -> bool:
        world.lose(1)
        return home(key, data)

    monkeypatch.setattr(world.own[0], "link_new", lose_another)
    with pytest.raises(ConnectionError, match="host 1"):
        world.views[0].link_new("t/done", b"5 run-1")
    assert has_it == [(path / "t" / "done").exists() for path in world.paths]


def test_it_is_used_together_or_not_at_all(tmp_path: Path) -> None:
    """One host's view alone reads and writes nothing."""
    alone = HostsStorage(OwnDirectory(tmp_path), ON_HOSTS)
    with pytest.raises(CheckpointError, match="the part of one host"):
        alone.list()
