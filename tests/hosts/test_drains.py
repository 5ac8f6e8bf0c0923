"""A lower tier is filled by each host with what it holds: real processes, which are hosts as each has its directory."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import Checkpointer, Tier
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.hosts.hosts_storage import HostsStorage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import StoredFile, digest
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.tag.verify import verify_checkpoint
from nxd_ckpt.testing.storage import Hook, HookedStorage, Operation
from tests.hosts.jobs import RANKS, TIMEOUT, of, state, tier
from tests.protocol.job import Died, Job, until
from tests.support.s3_server import S3Server

NUMBERS = 5 * 2**19
"""Of each rank's model: 10 MiB, which are copied in two pieces."""
MODEL = 4 * NUMBERS


def saved(rank: int, path: Path) -> None:
    """One tag, on the hosts alone."""
    with Checkpointer(tiers=[tier(path, rank, replicas=2)], topology=of(rank), timeout=TIMEOUT) as saver:
        saver.save("step_1", state(1, rank, NUMBERS), user_content={"step": 1})


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hosts with that tag."""
    path = tmp_path_factory.mktemp("hosts")
    Job(RANKS, saved, path, group=True).values()
    return path


@pytest.fixture(autouse=True)
def _copies_of_the_hosts(hosts: Path, tmp_path: Path) -> None:
    shutil.copytree(hosts, tmp_path, dirs_exist_ok=True)


def drainer(
    rank: int,
    path: Path,
    hook: Hook,
    limit: str | None = None,
    store: dict[str, Any] | None = None,
    timeout: float = TIMEOUT,
) -> Checkpointer:
    """The next launch, whose lower tier tells what this process does there. It copies the newest tag at once."""
    place = LocalStorage(path / "far") if store is None else open_storage("s3://bucket/far", True, store)
    far = Tier("far", storage=HookedStorage(place, hook), max_bytes_per_second=limit)
    launch = Checkpointer(tiers=[tier(path, rank, replicas=2), far], topology=of(rank), timeout=timeout)
    launch.remove("of no name")
    return launch


def drain(rank: int, path: Path, store: dict[str, Any] | None = None) -> tuple[list[str], int]:
    """The model's files that this process wrote to the lower tier; the bytes that other hosts sent to it."""
    written: list[str] = []

    def note(operation: Operation) -> None:
        if operation.name == "create" and "/model/" in operation.key:
            written.append(operation.key.rpartition("/")[2])

    with drainer(rank, path, note, store=store) as launch:
        launch.wait(tier=1)
        assert isinstance(launch.storage, HostsStorage)
        return written, launch.storage.received


def read(rank: int, path: Path) -> int:
    """The step that the lower tier holds, bit-exact."""
    model: dict[str, Any] = {}
    with Checkpointer(path / "far", topology=of(rank), timeout=TIMEOUT) as loader:
        step = int(loader.load(model=model)["step"])
    assert all(value.equal(model[name]) for name, value in state(step, rank, NUMBERS).items())
    return step


def test_each_host_copies_what_it_holds(tmp_path: Path) -> None:
    """As many files each, and no bytes of them go over the network to rank 0."""
    found = Job(RANKS, drain, tmp_path, group=True).values()
    files = [f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt" for tp in range(RANKS)]
    assert files == sorted(file for written, _ in found for file in written)
    assert RANKS * [1] == [len(written) for written, _ in found]
    assert max(received for _, received in found) < MODEL / 10
    assert () == verify_checkpoint(tmp_path / "far", "step_1").problems
    assert RANKS * [1] == Job(RANKS, read, tmp_path, group=True).values()


def test_each_host_copies_what_it_holds_to_a_store(tmp_path: Path, s3_server: S3Server) -> None:
    """There a directory begins with its first file."""
    found = Job(RANKS, drain, tmp_path, s3_server.options, group=True).values()
    assert () == verify_checkpoint("s3://bucket/far", "step_1", storage_options=s3_server.options).problems
    assert RANKS * [1] == [len(written) for written, _ in found]


def drain_and_die(rank: int, path: Path, victim: int) -> bool:
    """A host is killed in the middle of a file that it copies; the others go on."""
    asked: list[str] = []

    def die(operation: Operation) -> None:
        asked.extend([operation.key] * (operation.name == "write_at" and "/model/" in operation.key))
        if rank == victim and len(asked) == 2:
            until(lambda: len([*path.glob("begun_*")]) == RANKS)  # a rank that begins needs all hosts
            os.kill(os.getpid(), signal.SIGKILL)

    launch = drainer(rank, path, die)
    (path / f"begun_{rank}").touch()
    until((path / "far" / "step_1" / "done").exists)
    launch.abandon()
    return True


def test_a_host_that_dies_is_replaced_by_rank_0(tmp_path: Path) -> None:
    """It copies those files from their replicas, and the tag is there."""
    outcomes = Job(RANKS, drain_and_die, tmp_path, 2, group=True).outcomes()
    assert isinstance(outcomes.pop(2), Died)
    assert [True] * 3 == outcomes
    assert () == verify_checkpoint(tmp_path / "far", "step_1").problems


def drain_elsewhere(rank: int, path: Path) -> int:
    """Rank 3 sees another place as lower tier. How many of the model's files this process wrote."""
    if rank != 3:
        return len(drain(rank, path)[0])
    tiers = [tier(path, rank, replicas=2), Tier(path / "other")]
    with Checkpointer(tiers=tiers, topology=of(rank), timeout=TIMEOUT) as launch:
        launch.remove("of no name")
        launch.wait(tier=1)
    return 0


def test_a_host_that_sees_another_place_copies_nothing_there(tmp_path: Path) -> None:
    """Rank 0 copies what that host should have."""
    assert [2, 1, 1, 0] == Job(RANKS, drain_elsewhere, tmp_path, group=True).values()
    assert () == verify_checkpoint(tmp_path / "far", "step_1").problems
    assert not (tmp_path / "other").exists()


def drain_and_stop(rank: int, path: Path) -> None:
    """Rank 0 leaves once the others have begun: their copies wait for its word."""

    def wait_or_note(operation: Operation) -> None:
        if operation.name == "write_at" and "/model/" in operation.key:
            (path / f"begun_{rank}").touch()

    launch = drainer(rank, path, wait_or_note, "100kB")
    until(lambda: all((path / f"begun_{number}").exists() for number in range(1, RANKS)))
    launch.abandon()
    until(lambda: not any((path / "far").rglob("model/*.pt")))


def test_a_copy_that_is_stopped_is_given_up_by_all_hosts(tmp_path: Path) -> None:
    """Nothing of a file is left that is not complete, and the next launch brings it."""
    Job(RANKS, drain_and_stop, tmp_path, group=True).values()
    assert not (tmp_path / "far" / "step_1").exists()
    assert RANKS == sum(len(written) for written, _ in Job(RANKS, drain, tmp_path, group=True).values())
    assert () == verify_checkpoint(tmp_path / "far", "step_1").problems


def ask(rank: int, path: Path) -> list[str]:
    """What another host answers that is asked for a copy that is not to be."""
    launch = drainer(rank, path, lambda _: None)
    launch.wait(tier=1)
    refused = []
    if rank == 0:
        hosts = launch.storage
        assert isinstance(hosts, HostsStorage)
        key = "step_1/model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
        right = FileEntry(hosts.size(key), digest(StoredFile(hosts, key), lambda _: None).crc32)
        (path / "far" / "folder").mkdir()
        for where, file, entry in [
            ((-1, "folder", "x"), key, right),
            ((2, "folder", "x"), key, right),
            ((1, "elsewhere", "x"), key, right),
            ((1, "folder", "../../x"), key, right),
            ((1, "folder", "x"), "../x", right),
            ((1, "folder", "x"), key, right._replace(crc32=right.crc32 ^ 1)),
            ((1, "folder", "x"), key, right._replace(nbytes=right.nbytes + 1)),
        ]:
            with pytest.raises((OSError, MalformedFile)) as error:
                list(hosts.copy_out(1, file, *where, entry))
            refused.append(str(error.value))
        assert [] == list((path / "far" / "folder").iterdir())
    launch.close()
    return refused


def test_what_a_host_refuses_to_copy(tmp_path: Path) -> None:
    """To no tier, out of its directory, into nothing, what is not what it was: it says why, and leaves nothing."""
    refused = Job(RANKS, ask, tmp_path, group=True).values()[0]
    for expected, found in zip(
        [
            "there is no tier -1",
            "there is no tier 2",
            "elsewhere, which rank 0 made, is not there",
            "leaves the directory",
            "leaves the directory",
            "its bytes changed",
            "truncated or replaced",
        ],
        refused,
        strict=True,
    ):
        assert expected in found
        assert "host 1 (" in found
