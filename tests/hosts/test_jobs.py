"""Jobs whose first tier is each host's own disk: real processes, which are hosts because each has its directory."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxd_ckpt import Checkpointer, Tier, Topology, load_checkpoint
from nxd_ckpt.errors import CheckpointError, InvalidArgument
from nxd_ckpt.storage.local import LocalStorage
from tests.hosts.jobs import RANKS, TIMEOUT, host_of, load, save, state, there, tier
from tests.protocol.job import Job, until
from tests.support.refusals import refusal


def save_and_load(rank: int, path: Path, ranks_per_host: int) -> list[Any]:
    tiers = [tier(path, rank, ranks_per_host)]
    before = there(tiers)
    save(rank, path, [1, 2, 3], ranks_per_host, keep=2)
    return [before, there(tiers), load(rank, path, tiers)]


@pytest.mark.parametrize("ranks_per_host", [1, 2, 4])
def test_a_job_saves_and_loads(tmp_path: Path, ranks_per_host: int) -> None:
    """Each rank writes on its own host alone, and all of them load what they saved."""
    assert RANKS * [[False, True, 3]] == Job(RANKS, save_and_load, tmp_path, ranks_per_host, group=True).values()
    for rank in range(RANKS):
        folder = host_of(tmp_path, rank, ranks_per_host)
        assert ["step_2", "step_3"] == sorted(found.name for found in folder.glob("step_*"))
        own = sorted(found.name for found in (folder / "step_3" / "model").iterdir())
        first = rank // ranks_per_host * ranks_per_host
        assert [f"dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt" for tp in range(first, first + ranks_per_host)] == own


def test_without_a_process_group_it_is_refused(tmp_path: Path) -> None:
    """By saves, loads and has_checkpoint alike; a job of one process needs none."""
    tiers = [Tier(tmp_path / "run", per_host=True)]
    with Checkpointer(tiers=tiers, topology=Topology(tp=2, rank=1)) as saver:
        with pytest.raises(CheckpointError, match=r"per_host=True\), which needs torch.distributed"):
            saver.save("step_1", {})
        with pytest.raises(CheckpointError, match=r"per_host=True\), which needs torch.distributed"):
            saver.load()
    with Checkpointer(tiers=tiers) as saver:
        saver.save("step_1", state(1, 0), user_content=1)
    assert there(tiers)
    assert 1 == load_checkpoint(tiers=tiers, model={})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"replicas": 2}, "are for per_host=True"),
        ({"interface": "lo"}, "are for per_host=True"),
        ({"per_host": True, "replicas": 0}, "at least 1, found 0"),
        ({"per_host": True, "path": "s3://bucket/run"}, "no URL"),
        ({"per_host": True, "storage": LocalStorage("x")}, "no URL or storage="),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], complaint: str) -> None:
    """Before anything is done."""
    with pytest.raises(InvalidArgument, match=complaint):
        Checkpointer(tiers=[Tier(**{"path": "run", **options})])


def disagree(rank: int, path: Path, options: Sequence[dict[str, Any]]) -> list[str]:
    """What each pair of options is refused with."""
    found = []
    for option in options:
        shared = {"replicas": 2 if "only" not in option else 1 + rank, **option}
        shared.pop("only", None)
        with Checkpointer(tiers=[tier(path, rank, **shared)], topology=Topology(tp=2, rank=rank)) as saver:
            found.append(refusal(partial(saver.save, "step_1", {})))
    return found


def test_replicas_must_be_possible_and_the_same_on_all_ranks(tmp_path: Path) -> None:
    """More than hosts, other numbers on other ranks, an interface that is not there."""
    options: list[dict[str, Any]] = [{"replicas": 3}, {"only": 1}, {"interface": "nxd9"}]
    for found in Job(2, disagree, tmp_path, options, group=True).values():
        more, other, interface = found
        assert "InvalidArgument" in more
        assert "replicas=3: each file must be on as many hosts, of 2 in all" in more
        assert "RanksDisagree" in other
        assert "interface='nxd9'" in interface


def save_while(rank: int, path: Path, hosts: Sequence[int], steps: Sequence[int], begun: str, other: str) -> list[str]:
    """Save on these hosts; after each step, note that it has ``begun``, and wait until the ``other`` did."""
    tiers = [tier(path, hosts[rank])]
    outcomes = []
    with Checkpointer(tiers=tiers, topology=Topology(tp=2, rank=rank), timeout=TIMEOUT) as saver:
        for step in steps:
            save_step = partial(saver.save, f"step_{step}", state(step, rank), user_content={"step": step})
            outcomes.append(refusal(save_step) or "saved")
            (path / f"{begun}-{rank}").touch()
            until((path / f"{other}-0").exists)
    return outcomes


@pytest.mark.parametrize("others", [(1, 2), (2, 1)])
@pytest.mark.one_in(2)
def test_two_jobs_that_share_a_host_keep_apart(tmp_path: Path, others: tuple[int, int]) -> None:
    """The lease of one is on a host that the other does not have. The second job is refused, and says which host."""
    first = Job(2, save_while, tmp_path, (0, 1), (1, 2), "first", "second", group=True)
    until((tmp_path / "first-1").exists)
    second = Job(2, save_while, tmp_path, others, (1,), "second", "first", group=True)
    for of_rank in second.values():
        for one in of_rank:
            assert "DirectoryInUse" in one
            assert f"{host_of(tmp_path, 1)} on this host is being written by another live job, run " in one
    assert 2 * [["saved", "saved"]] == first.values()
    assert 2 * [[2]] == [[step] for step in Job(2, load_step, tmp_path, group=True).values()]
    third = Job(2, save_while, tmp_path, others, (3, 4), "third", "second", group=True)
    assert 2 * [["saved", "saved"]] == third.values()


def load_step(rank: int, path: Path) -> int:
    """The newest step of the job on hosts 0 and 1."""
    model: dict[str, Any] = {}
    topology = Topology(tp=2, rank=rank)
    content = load_checkpoint(tiers=[tier(path, rank)], model=model, topology=topology, timeout=TIMEOUT)
    assert all(value.equal(model[name]) for name, value in state(content["step"], rank).items())
    return int(content["step"])
