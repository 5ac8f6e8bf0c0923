"""What a save or a load asks of the storage does not grow faster than what it saves or loads. Never a timing."""

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_ckpt import Checkpointer, Topology, load_checkpoint, save_checkpoint
from nxd_ckpt.api import finalize_checkpoint
from nxd_ckpt.commit.commit import Commit, commit
from nxd_ckpt.commit.publication import Staged
from nxd_ckpt.commit.session import Session
from nxd_ckpt.commit.voting import AttemptVotes
from nxd_ckpt.coordination.control_files import rank_file, staging_dir, verdict_dir
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry, Parts, RankIndex, dump_index
from nxd_ckpt.core.retention_rules import Last
from nxd_ckpt.core.votes import Verdict, Vote
from nxd_ckpt.errors import KeyMismatch
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.loading.filters import Filter
from nxd_ckpt.loading.load_context import load_context
from nxd_ckpt.loading.load_planner import LoadPlanner
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.choosing import choose_tag, open_complete_tag
from nxd_ckpt.testing.storage import HookedStorage, MemoryStorage, Operation, recording

ATTEMPT = "run-1"
READS = ("read", "read_into", "read_ranges")


def voted(path: Path, ranks: int) -> LocalStorage:
    """A directory in which all ranks have voted for an empty tag."""
    storage = LocalStorage(path, durable=False)
    storage.make_dir(verdict_dir(ATTEMPT))
    for rank in range(ranks):
        vote = Vote(rank, plan={"tag": "t"}, replica="same", index=FileEntry(1, 1))
        AttemptVotes(storage, ATTEMPT).cast(vote)
        at = Topology(dp=ranks).coordinates_of(rank)
        storage.write(f"{staging_dir(ATTEMPT)}/{names.index_file(at)}", dump_index(RankIndex(at, {}, ())))
    return storage


def operations(storage: LocalStorage, work: Callable[[HookedStorage], object]) -> Counter[tuple[str, str]]:
    """How often ``work`` does what, by operation and key."""
    log: list[Operation] = []
    work(HookedStorage(storage, recording(log)))
    return Counter((operation.name, operation.key) for operation in log)


def test_the_verdict_costs_a_rank_the_same_whatever_their_number(tmp_path: Path) -> None:
    """One listing, of a directory with nothing else in it, and one read."""
    costs = []
    for ranks in (2, 64):
        storage = voted(tmp_path / str(ranks), ranks)
        AttemptVotes(storage, ATTEMPT).announce(Verdict())
        assert 1 == len(storage.list(verdict_dir(ATTEMPT)))
        costs.append(operations(storage, lambda storage: AttemptVotes(storage, ATTEMPT).await_verdict("t", 30.0)))
    assert costs[0] == costs[1]
    assert 2 == costs[0].total()


def test_every_vote_is_read_once(tmp_path: Path) -> None:
    """However many there are, and nothing else is read; votes that are all there take one listing."""
    storage = voted(tmp_path, 64)
    requests = operations(storage, lambda storage: AttemptVotes(storage, ATTEMPT).collect(64, 30.0))
    expected = {("read", rank_file(ATTEMPT, rank, "vote")): 1 for rank in range(64)}
    assert expected == {key: count for key, count in requests.items() if key[0] != "list"}
    assert 65 == requests.total()


def test_a_commit_costs_the_same_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """Votes are compared in memory: what is read, written and renamed does not depend on them."""
    costs = []
    for ranks in (2, 64):
        storage, topology = voted(tmp_path / str(ranks), ranks), Topology(dp=ranks)
        votes = AttemptVotes(storage, ATTEMPT).collect(ranks, 30.0)
        request = Commit(Staged(ATTEMPT, "t"), Parts(), rules=[Last(1)])

        def decide(
            storage: HookedStorage, topology: Topology = topology, votes: list[Vote] = votes, request: Commit = request
        ) -> None:
            commit(Session(storage, topology, "run", 30.0), topology, votes, request)

        costs.append(operations(storage, decide))
    assert costs[0] == costs[1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """xser tags of 4 and of 40 tensors, and the moments of each, written by two ranks; by their number."""
    found = {}
    for count in (4, 40):
        found[count] = tmp_path_factory.mktemp(f"of_{count}")
        for rank in (0, 1):
            save_checkpoint(
                found[count],
                "t",
                model_of(count),
                {**optimizer_of(count, rank)},
                topology=Topology(dp=2, rank=rank),
                run_id="run",
                use_xser=True,
                zero1_optimizer=True,
                async_save=True,
                param_names=[list(model_of(count))],
            )
        finalize_checkpoint()
    return found


def model_of(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": torch.full((6, 2), float(number)) for number in range(count)}


def optimizer_of(count: int, rank: int) -> dict[str, Any]:
    return {
        "state": {},
        "param_groups": [{"lr": 0.1, "params": list(range(count))}],
        "base_state": {number: {"exp_avg": torch.full((3, 2), float(rank))} for number in range(count)},
        "shape_info": {number: [6, 2] for number in range(count)},
    }


def planned(path: Path, topology: Topology, count: int, *, verify: bool = True) -> Counter[tuple[str, str]]:
    """What a rank of ``topology`` asks of the storage until it knows what it will load."""

    def plan(storage: HookedStorage) -> None:
        opened = open_complete_tag(storage, choose_tag(storage, "t"))
        options = LoadOptions(verify=verify, param_names=[list(model_of(count))])
        context = load_context(opened, topology, open_model(model_of(count)), {}, options, Filter(options))
        LoadPlanner(context).trees()

    return operations(LocalStorage(path), plan)


LOOKED_AT = {("time", "t/done"), ("list", "t")}
"""What tells that the tag is still the same save, whatever its size."""


@pytest.mark.parametrize("dp", [2, 3])
def test_planning_a_load_opens_no_tensor_file(shared: dict[int, Path], dp: int) -> None:
    """Indexes say what xser's tensor files hold, on the same sizes and on others; what is read does not grow."""
    reads = []
    for count, path in shared.items():
        found = planned(path, Topology(dp=dp), count)
        assert set() == {name for name, key in found if ".pt.tensors/tensor_" in key} - {"size"}
        assert {} == {key: times for key, times in found.items() if times > 2 and key not in LOOKED_AT}
        reads.append(sum(times for (name, _), times in found.items() if name in READS))
    assert reads[0] == reads[1]


def test_without_a_digest_pass_tensor_files_are_opened(shared: dict[int, Path]) -> None:
    """Else a file of another save would be met when live state has changed already."""
    found = planned(shared[4], Topology(dp=2), 4, verify=False)
    assert 8 == len({key for name, key in found if ".pt.tensors/tensor_" in key and name in READS})


def test_in_a_store_planning_asks_nothing_for_each_tensor() -> None:
    """With xser every tensor is an object: what is known of it from the index costs no request."""
    counts = []
    for count in (4, 40):
        store = MemoryStorage()
        with Checkpointer(store.url, storage=store) as saver:
            saver.save("t", model_of(count), use_xser=True)
        log: list[Operation] = []
        opened = open_complete_tag(HookedStorage(store, recording(log)), "t")
        options = LoadOptions(verify="reading")
        context = load_context(opened, Topology(), open_model(model_of(count)), None, options, Filter(options))
        LoadPlanner(context).trees()
        counts.append(len(log))
    assert counts[0] == counts[1]


def test_planning_leaves_the_garbage_collector_as_it_was(shared: dict[int, Path]) -> None:
    """Running, also after a load that was refused; and off where the program had turned it off."""
    with pytest.raises(KeyMismatch):
        load_checkpoint(shared[4], "t", model_of(5), topology=Topology(dp=2))
    assert gc.isenabled()
    gc.disable()
    try:
        planned(shared[4], Topology(dp=2), 4)
        assert not gc.isenabled()
    finally:
        gc.enable()
