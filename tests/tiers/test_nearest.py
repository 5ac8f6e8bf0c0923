"""A load takes the newest tag, from the nearest of the tiers that have it."""

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import Checkpointer, Tier, Topology, effects, has_checkpoint, load_checkpoint
from nxd_ckpt.errors import CheckpointNotFound, PeerTimeout, RanksDisagree, StorageError
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation
from tests.protocol.job import Job
from tests.support.damage import flip
from tests.tiers.saving import save, state, tags_in


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    """Both have step_1, and the first step_2 too."""
    near, far = Tier(tmp_path / "near"), Tier(tmp_path / "far", every=2)
    with Checkpointer(tiers=[near, far]) as saver:
        save(saver, 1)
        saver.wait(tier=1)
        save(saver, 2)
    return [near, far]


def loaded_from(tiers: list[Tier], caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[int, str]:
    """The step that is loaded, and the directory that it is loaded from."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "nxd_ckpt"):
        model: dict[str, Any] = {}
        step: int = load_checkpoint(tiers=tiers, model=model, **options)["step"]
    assert state(step)["weight"].equal(model["weight"])
    (line,) = (line for line in caplog.messages if line.startswith("loaded"))
    return step, Path(line.split()[1].rstrip(":")).parent.name


def test_the_newest_counts_before_the_nearest(tiers: list[Tier], caplog: pytest.LogCaptureFixture) -> None:
    """Whether a tag is named or not."""
    assert (2, "near") == loaded_from(tiers, caplog)
    assert (1, "near") == loaded_from(tiers, caplog, tag="step_1")
    shutil.rmtree(Path(tiers[0].path) / "step_2")
    assert (1, "near") == loaded_from(tiers, caplog)
    shutil.rmtree(tiers[0].path)
    assert [True, False] == [has_checkpoint(tiers=tiers), has_checkpoint(tiers=tiers[:1])]
    assert (1, "far") == loaded_from(tiers, caplog)
    assert (1, "far") == loaded_from(tiers, caplog, tag="step_1")
    with pytest.raises(CheckpointNotFound, match="near"):
        loaded_from(tiers, caplog, tag="step_2")


def test_a_file_that_is_damaged_is_loaded_from_the_next(tiers: list[Tier], caplog: pytest.LogCaptureFixture) -> None:
    """Another copy of the same save counts before an older save."""
    shutil.rmtree(Path(tiers[0].path) / "step_2")
    flip(next((Path(tiers[0].path) / "step_1" / "model").iterdir()), 300)
    assert (1, "near") == loaded_from(tiers, caplog, fallback=True)
    assert any("lacks files of its save" in line for line in caplog.messages)


@pytest.mark.parametrize("tag", ["step_1", None])
def test_a_tag_that_is_removed_from_the_nearest_while_it_is_loaded(
    tiers: list[Tier], caplog: pytest.LogCaptureFixture, tag: str | None
) -> None:
    """Retention there need not wait for readers: the tag is loaded from the next tier, named or not."""
    near = Path(tiers[0].path)
    shutil.rmtree(near / "step_2")

    def remove(operation: Operation) -> None:
        if operation.name in ("open", "read") and "/model/" in operation.key and (near / "step_1").exists():
            (near / "step_1").rename(near / ".removed")

    removed_from = Tier(near, storage=HookedStorage(LocalStorage(near), remove))
    assert (1, "far") == loaded_from([removed_from, tiers[1]], caplog, tag=tag)
    with pytest.raises(CheckpointNotFound, match="no tag 'step_1'"):
        loaded_from([removed_from, Tier(near.parent / "absent")], caplog, tag="step_1")


@pytest.mark.parametrize("tag", ["step_1", None])
def test_a_tag_that_is_removed_while_its_files_are_looked_for(
    tiers: list[Tier], caplog: pytest.LogCaptureFixture, tag: str | None
) -> None:
    """As storage that may lose some is asked before; then what the other tier has is loaded."""
    near, looked = Path(tiers[0].path), threading.Event()
    shutil.rmtree(near / "step_2")

    def remove(operation: Operation) -> None:
        if operation.name == "is_dir" and operation.key == "step_1":
            if (tag is None or looked.is_set()) and (near / "step_1").exists():
                (near / "step_1").rename(near / ".removed")
            looked.set()

    storage = HookedStorage(LocalStorage(near), remove)
    storage.may_lack_files = True
    assert (1, "far") == loaded_from([Tier(near, storage=storage), tiers[1]], caplog, tag=tag)
    assert not (near / "step_1").exists()


def test_a_tier_that_cannot_be_reached_is_passed_over(tiers: list[Tier], caplog: pytest.LogCaptureFixture) -> None:
    """With a warning; if there is no other, its error is raised."""

    def unreachable(_: Operation) -> None:
        raise ConnectionError("no route to host")

    away = Tier("away", storage=HookedStorage(MemoryStorage("away"), unreachable))
    assert (1, "far") == loaded_from([away, tiers[1]], caplog)
    assert any("memory://away is passed over" in line for line in caplog.messages)
    with pytest.raises(StorageError, match="no route"):
        load_checkpoint(tiers=[away], model={})


def test_what_is_saved_after_the_first_tier_was_lost_is_the_newest(
    tiers: list[Tier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the clock of the host that replaces the lost one is behind."""
    shutil.rmtree(tiers[0].path)
    now = effects.time()
    monkeypatch.setattr(effects, "time", lambda: now - 7200)
    with Checkpointer(tiers=[tiers[0], Tier(tiers[1].path, every=99)]) as saver:
        saver.load(model={})
        save(saver, 3, 4)
    assert (4, "near") == loaded_from(tiers, caplog)


def of_two_ranks(rank: int, path: Path) -> list[Any]:
    """What a rank meets: a save, the wait for the copy, a load without the first tier, and other numbers of tiers."""
    topology = Topology(tp=2, rank=rank)
    tiers = [Tier(path / "near"), Tier(path / "far")]
    with Checkpointer(tiers=tiers, topology=topology) as saver:
        saver.save("step_1", state(1), user_content={"rank": rank}, rank_content=rank)
        saver.wait(tier=1)
        there = tags_in(path / "far")
    content = load_checkpoint(tiers=[Tier(path / "absent"), tiers[1]], model={}, topology=topology)
    try:
        load_checkpoint(tiers=tiers[: rank + 1], model={}, topology=topology)
    except (RanksDisagree, PeerTimeout) as error:
        return [there, content, type(error).__name__]
    return [there, content]


def test_ranks_agree(tmp_path: Path) -> None:
    """All learn when a tier has the tag, and load it from the same tier; other tiers than the others' are refused."""
    assert 2 * [[["step_1"], {"rank": 0}, "RanksDisagree"]] == Job(2, of_two_ranks, tmp_path, group=True).values()
    assert LocalStorage(tmp_path / "far").is_file("step_1/done")
