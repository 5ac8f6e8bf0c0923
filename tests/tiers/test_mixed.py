"""A load takes each file from the nearest tier that has it as it was saved, and proves all of them."""

import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Tier, Topology, convert, has_checkpoint, load_checkpoint
from nxd_ckpt.errors import CorruptCheckpoint, DigestMismatch, PartLost
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.urls import open_storage
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation
from nxd_ckpt.tiers.drain import Drains
from tests.protocol.job import Job, until
from tests.storage.storages import s3
from tests.support.damage import flip
from tests.support.s3_server import S3Server
from tests.tiers.saving import save, state, tags_in

READS = ("read", "read_into", "read_ranges")
KNOWN = {"step_1/manifest.json", "step_1/done"}
"""What is read of the other tier to know that it has the same save."""


class Training:
    """A model and its optimizer after one step, the same for every ``seed`` that is."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.ones(40)).sum().backward()
        self.optimizer.step()

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Training)
        return [*map(torch.Tensor.tolist, self.tensors())] == [*map(torch.Tensor.tolist, other.tensors())]

    __hash__ = None  # type: ignore[assignment]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.model.state_dict().values()
        for entries in self.optimizer.state_dict()["state"].values():
            yield from entries.values()


class Places:
    """``step_1`` on a near tier, which is a directory, and on a far one, which records what is asked of it."""

    def __init__(self, path: Path, far: Storage, **options: Any) -> None:
        self.log: list[Operation] = []
        self.near = path / "near"
        self.tiers = [Tier(self.near), Tier("far", storage=HookedStorage(far, self.log.append))]
        with Checkpointer(tiers=self.tiers) as saver:
            saved = Training(1)
            saver.save("step_1", saved.model, saved.optimizer, user_content="of step 1", **options)
            saver.wait(tier=1)
        self.log.clear()

    def files(self, pattern: str) -> list[Path]:
        return sorted(path for path in (self.near / "step_1").glob(pattern) if path.is_file())

    def loads(self, tag: str | None = None, **options: Any) -> set[str]:
        """Load what was saved, bit for bit; the files that were read from the far tier."""
        live = Training(2)
        assert "of step 1" == load_checkpoint(None, tag, live.model, live.optimizer, tiers=self.tiers, **options)
        assert Training(1) == live
        return {done.key for done in self.log if done.name in READS} - KNOWN

    def names(self, files: list[Path]) -> set[str]:
        return {str(file.relative_to(self.near)) for file in files}


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


@pytest.mark.parametrize("damage", [Path.unlink, truncate, lambda file: flip(file)])
@pytest.mark.parametrize("pattern", ["model/*.pt", "model/**/*", "optim/*", "index/*", "manifest.json", "user*"])
@pytest.mark.one_in(2)
def test_each_file_from_the_nearest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], pattern: str
) -> None:
    """Whatever is missing, cut off or changed there is read from the next, and nothing else; one warning says which."""
    places = Places(tmp_path, LocalStorage(tmp_path / "far"), use_xser="**" in pattern)
    files = places.files(pattern)
    for file in files:
        damage(file)
    assert places.names(files) - KNOWN == places.loads()
    (warning,) = [line for line in caplog.messages if "lacks files of its save" in line]
    assert all(name in warning for name in sorted(places.names(files))[:8])


@pytest.mark.parametrize("far", ["store", "s3"])
@pytest.mark.parametrize("verify", [None, True, False])
def test_from_a_store(tmp_path: Path, s3_server: S3Server, far: str, verify: bool | None) -> None:
    """Where the order time is in another place. A load reads what it needs twice, or thrice if it verifies first."""
    places = Places(tmp_path, s3(s3_server) if far == "s3" else MemoryStorage(), use_xser=True)
    lost = places.files("model/*.tensors/*")
    nbytes = sum(file.stat().st_size for file in lost)
    shutil.rmtree(places.near / "step_1" / "model")
    files = {f"step_1/model/{name}" for name in places.loads("step_1", verify=verify)}
    assert {True} == {"/model/" in name for name in files}
    assert nbytes <= sum(done.nbytes for done in places.log) <= (4 if verify else 3) * nbytes


def test_a_disk_that_fails(tmp_path: Path) -> None:
    """A file that cannot be read counts as lost; the others are read where they are."""
    places = Places(tmp_path, LocalStorage(tmp_path / "far"))

    def hook(done: Operation) -> None:
        if done.name in READS and "/model/" in done.key:
            raise OSError(errno.EIO, "Input/output error")

    places.tiers[0] = Tier("near", storage=HookedStorage(LocalStorage(places.near), hook))
    assert places.names(places.files("model/*")) == places.loads()


def test_a_load_of_the_model_reads_no_optimizer(tmp_path: Path) -> None:
    """Not to find out where it is good either."""
    places = Places(tmp_path, LocalStorage(tmp_path / "far"))
    for file in places.files("*/*"):
        flip(file)
    model: dict[str, Any] = {}
    load_checkpoint(None, None, model, tiers=places.tiers)
    assert Training(1).model.state_dict().keys() == model.keys()
    assert not [done for done in places.log if "/optim/" in done.key]


def test_three_tiers_of_which_none_is_whole(tmp_path: Path) -> None:
    """As long as each file is somewhere, also where the second is an archive."""
    places = Places(tmp_path, LocalStorage(tmp_path / "far"))
    convert(tmp_path / "far" / "step_1", tmp_path / "packed.tar")
    places.tiers.insert(1, Tier("packed", storage=open_storage(tmp_path / "packed.tar")))
    for file in places.files("*/*"):
        file.unlink()
    assert set() == places.loads()


def test_two_saves_are_never_mixed(tmp_path: Path) -> None:
    """Another save of the same name, by another job, lends no files, and nothing changes."""
    near, far = tmp_path / "near", tmp_path / "far"
    for place, step in ((far, 7), (near, 1)):
        with Checkpointer(place) as saver:
            saver.save("same", state(step))
    (file,) = (near / "same" / "model").iterdir()
    flip(file, 300)
    live = state(3)
    with pytest.raises(DigestMismatch, match="near"):
        load_checkpoint(None, "same", live, tiers=[Tier(near), Tier(far)])
    assert state(3)["weight"].equal(live["weight"])


def test_what_is_damaged_everywhere(tmp_path: Path) -> None:
    """Is an error that names the file, or with ``fallback`` the reason for an older tag."""
    tiers = [Tier(tmp_path / "near"), Tier(tmp_path / "far")]
    with Checkpointer(tiers=tiers) as saver:
        save(saver, 1)
        saver.wait(tier=1)
        save(saver, 2)
    for tier in tiers:
        flip(next((Path(tier.path) / "step_2" / "model").iterdir()), 300)
    with pytest.raises(CorruptCheckpoint, match="step_2/model"):
        load_checkpoint(tiers=tiers, model={})
    assert {"step": 1} == load_checkpoint(tiers=tiers, model={}, fallback=True)


class HostsDisks(HookedStorage):
    """A directory that says of itself that files of hosts may be lost."""

    def __init__(self, path: Path) -> None:
        self.log: list[Operation] = []
        super().__init__(LocalStorage(path), self.log.append)
        self.may_lack_files = True


def test_a_host_that_was_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its files come from the next tier; where that has another tag only, the newest is passed over."""
    near, far = HostsDisks(tmp_path / "near"), Tier(tmp_path / "far")
    tiers = [Tier("near", storage=near), far]
    with Checkpointer(tiers=tiers) as saver:
        save(saver, 1)
        saver.wait(tier=1)
    with Checkpointer(tiers=tiers[:1]) as saver:
        save(saver, 2)
    near.log.clear()
    assert {"step": 2} == load_checkpoint(tiers=tiers, model={})
    asked = [done.key for done in near.log if done.name == "list" and done.key.startswith("step_2/")]
    assert sorted({*asked}) == ["step_2/model"]
    for step in ("step_1", "step_2"):
        shutil.rmtree(tmp_path / "near" / step / "model")
    model: dict[str, Any] = {}
    assert {"step": 1} == load_checkpoint(tiers=tiers, model=model)
    assert state(1)["weight"].equal(model["weight"])
    passed_over, taken = caplog.messages[-2:]
    assert "near/step_2 is passed over" in passed_over
    assert "step_2/model/" in passed_over
    assert "near/step_1 lacks files of its save, which are read from" in taken
    for tag in ("step_2", None):
        with pytest.raises(PartLost, match=r"lost files of 'step_2', and no other place has them: step_2/model/"):
            load_checkpoint(None, tag, {}, tiers=tiers[:1])


def test_what_lost_files_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    """The next launch copies the newest tag that is whole; asking whether there is one meets what a load would."""
    tiers = [Tier("near", storage=HostsDisks(tmp_path / "near")), Tier(tmp_path / "far")]
    with Checkpointer(tiers=tiers[:1]) as saver:
        save(saver, 1, 2)
    shutil.rmtree(tmp_path / "near" / "step_2" / "model")
    drains = Drains(tiers, [tier.open(True, None) for tier in tiers], 60.0)
    drains.resume()
    until(lambda: drains.finished(1, 1.0))
    drains.close(None)
    assert ["step_1"] == tags_in(tmp_path / "far")
    shutil.rmtree(tmp_path / "near" / "step_1" / "model")
    assert has_checkpoint(tiers=tiers)
    assert {"step": 1} == load_checkpoint(tiers=tiers, model={})
    shutil.rmtree(tmp_path / "far")
    for ask in (lambda: has_checkpoint(tiers=tiers), lambda: load_checkpoint(tiers=tiers, model={})):
        with pytest.raises(PartLost, match="lost files of 'step_2', and no other place has them"):
            ask()


def on_ranks(rank: int, path: Path) -> list[Any]:
    """What two ranks load of a tag whose files are spread over two tiers, and what each reads from the second."""
    topology = Topology(tp=2, rank=rank)
    log: list[Operation] = []
    tiers = [Tier(path / "near"), Tier("far", storage=HookedStorage(LocalStorage(path / "far"), log.append))]
    with Checkpointer(tiers=tiers, topology=topology) as saver:
        saver.save("step_1", state(1 + rank))
        saver.wait(tier=1)
        log.clear()
        if rank == 0:
            (path / "near" / "step_1" / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt").unlink()
        model: dict[str, Any] = {}
        saver.load(model=model)
    read = {done.key for done in log if done.name in READS and done.key.startswith("step_1/")} - KNOWN
    return [model["weight"][0].item(), sorted(read)]


def test_all_ranks_read_from_the_same_places(tmp_path: Path) -> None:
    """Though only one of them met what is lost."""
    lost = "step_1/model/dp_rank_00_tp_rank_01_pp_rank_00.pt"
    assert [[1.0, []], [2.0, [lost]]] == Job(2, on_ranks, tmp_path, group=True).values()
