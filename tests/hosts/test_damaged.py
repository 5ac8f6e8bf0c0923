"""A file whose bytes changed on a host's disk: it is read from the copy on another host, and there is no other tier."""

from pathlib import Path
from typing import Any

from nxd_ckpt import Checkpointer, Tier
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.tag.verify import verify_checkpoint
from tests.hosts.jobs import RANKS, TIMEOUT, host_of, of, state, tier
from tests.protocol.job import Job
from tests.support.damage import flip
from tests.support.logged import logged

MODEL = "step_1/model/dp_rank_00_tp_rank_{:02d}_pp_rank_00.pt"


def saved(rank: int, path: Path) -> None:
    with Checkpointer(tiers=[tier(path, rank, replicas=2)], topology=of(rank), timeout=TIMEOUT) as saver:
        saver.save("step_1", state(1, rank), user_content={"step": 1})


def load_and_drain(rank: int, path: Path) -> tuple[Any, list[str]]:
    """What becomes of a load, and of the copy to the lower tier of the next launch; what was said of it."""
    model: dict[str, Any] = {}
    with logged() as messages:
        try:
            with Checkpointer(tiers=[tier(path, rank, replicas=2)], topology=of(rank), timeout=TIMEOUT) as loader:
                content = loader.load(model=model)
        except CheckpointError as error:
            return str(error), messages
        assert all(value.equal(model[name]) for name, value in state(1, rank).items())
        tiers = [tier(path, rank, replicas=2), Tier(path / "far")]
        with Checkpointer(tiers=tiers, topology=of(rank), timeout=TIMEOUT) as launch:
            launch.remove("of no name")
            launch.wait(tier=1)
    return content, messages


def test_the_other_copy_is_read(tmp_path: Path) -> None:
    """Of weights on the host that wrote them, of others on the host that has their replica, of an index, a manifest."""
    Job(RANKS, saved, tmp_path, group=True).values()
    hosts = [host_of(tmp_path, rank) for rank in range(RANKS)]
    index = next((hosts[3] / "step_1").rglob("*tp_rank_03*.json"))
    damaged = [hosts[1] / MODEL.format(1), hosts[0] / MODEL.format(3), hosts[0] / MODEL.format(0), index]
    for file in damaged:
        flip(file)
    (hosts[2] / "step_1" / "manifest.json").write_bytes(b"{")
    outcomes = Job(RANKS, load_and_drain, tmp_path, group=True).values()
    assert RANKS * [{"step": 1}] == [content for content, _ in outcomes]
    said = "\n".join(word for _, words in outcomes for word in words)
    for file, number in zip(damaged, (1, 0, 0, 3), strict=True):
        assert f"{file.name} is read from another copy than that of host {number}: " in said
    assert () == verify_checkpoint(tmp_path / "far", "step_1").problems


def test_where_no_copy_is_good_the_file_is_named(tmp_path: Path) -> None:
    """On all ranks, as ever."""
    Job(RANKS, saved, tmp_path, group=True).values()
    for rank in (2, 3):
        flip(host_of(tmp_path, rank) / MODEL.format(2))
    for error, _ in Job(RANKS, load_and_drain, tmp_path, group=True).values():
        assert MODEL.format(2).rpartition("/")[2] in error
