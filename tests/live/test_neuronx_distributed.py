"""The topology of a live neuronx-distributed job."""

import sys

import pytest
import torch

from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.live.environment import live_topology
from tests.interop.saving import save_as_every_rank
from tests.support.parallel_state import FakeParallelState, installed_parallel_state

pytestmark = pytest.mark.both

TRN1 = [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_nothing_is_imported():
    """A process that does not use neuronx-distributed has no live topology, and is not made to import it."""
    assert live_topology() is None
    assert "neuronx_distributed" not in sys.modules


def test_groups_that_are_not_initialised_say_nothing():
    """Importing parallel_state is not enough: before initialisation there is no topology."""
    with installed_parallel_state(FakeParallelState(initialized=False)):
        assert live_topology() is None


@pytest.mark.parametrize("rank", [0, 5, 7])
def test_sizes_and_coordinates_are_read(rank):
    """tp, pp and ep of the groups, and this rank's place in them."""
    with installed_parallel_state(FakeParallelState(tp=2, pp=2, ep=2, world=8, rank=rank)):
        assert Topology(dp=2, tp=2, pp=2, ep=2, rank=rank) == live_topology()


def test_strided_groups_are_read_not_assumed():
    """tp = 4 on Trn1 strides over the node: the rank map follows the groups."""
    with installed_parallel_state(FakeParallelState(tp=4, world=8, rank=3, tp_groups=TRN1)):
        topology = live_topology()
    assert topology is not None
    assert (3, 1, 1) == (topology.rank, topology.dp_rank, topology.tp_rank)
    assert [0, 1] == topology.at(0).replicas(topology.at(0).coordinates)


def test_older_versions_give_groups_as_lists():
    """Before there were get_*_replica_groups(), the groups came from get_*_group(as_list=True)."""
    state = FakeParallelState(tp=2, world=4, rank=3)
    for name in ("tensor_model", "data", "pipeline_model"):
        groups = getattr(state, f"get_{name}_parallel_replica_groups")()
        delattr(state, f"get_{name}_parallel_replica_groups")
        setattr(state, f"get_{name}_parallel_group", lambda as_list, groups=groups: groups if as_list else None)
    with installed_parallel_state(state):
        assert Topology(dp=2, tp=2, rank=3) == live_topology()


def context_parallel(rank: int) -> Topology:
    """What a rank of dp=2, cp=2, tp=2 finds."""
    with installed_parallel_state(FakeParallelState(tp=2, cp=2, world=8, rank=rank)):
        topology = live_topology()
    assert topology is not None
    return topology


def test_context_parallel_ranks_are_data_parallel_ranks_to_files():
    """In the order of ZeRO-1's shards: those of one data-parallel rank are neighbours."""
    found = [context_parallel(rank) for rank in range(8)]
    assert [Topology(dp=4, tp=2, rank=rank) for rank in range(8)] == found
    assert [0, 0, 1, 1, 2, 2, 3, 3] == [topology.dp_rank for topology in found]


def test_context_parallel_ranks_write_the_model_once_and_their_own_shards(tmp_path):
    """NxD calls the files of all of them alike, and each would overwrite another's."""
    topologies = [context_parallel(rank) for rank in range(8)]

    def what(rank):
        state = {0: {"step": 3, "exp_avg": torch.full((1, 4), float(topologies[rank].dp_rank))}}
        options = {"lr": 0.1, "params": [0]}
        shapes = {0: torch.Size([4, 4])}
        optimizer = {"state": {}, "param_groups": [options], "base_state": state, "shape_info": shapes}
        return {"model": {"w": torch.ones(4, 4)}, "optimizer": optimizer, "param_names": [["w"]]}

    save_as_every_rank(tmp_path, "t", topologies, what, durable=False, zero1_optimizer=True)
    expected = {f"dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_00.pt": float(dp) for dp in range(4) for tp in range(2)}
    written = {path.name: torch.load(path)["base_state"][0]["exp_avg"] for path in (tmp_path / "t/optim").iterdir()}
    assert expected == {name: shard.unique().item() for name, shard in written.items()}
    ranks = [f"dp_rank_00_tp_rank_0{tp}_pp_rank_00.pt" for tp in range(2)]
    assert ranks == sorted(path.name for path in (tmp_path / "t/model").iterdir())


def test_context_parallelism_with_experts_is_refused():
    """How NxD then shares experts among ranks is not known."""
    state = FakeParallelState(ep=2, world=2)
    vars(state)["get_context_model_parallel_size"] = lambda: 2
    with installed_parallel_state(state), pytest.raises(UnsupportedState, match="of size 2 with expert parallelism"):
        live_topology()


def test_ranks_that_contradict_the_groups_are_refused():
    """Files are named by NxD's ranks: if its groups say otherwise, nothing is guessed."""
    state = FakeParallelState(ep=2, world=4, rank=3)
    vars(state)["get_expert_model_parallel_rank"] = lambda: 0
    with installed_parallel_state(state), pytest.raises(InvalidArgument, match="'expert_model': 0}, its replica"):
        live_topology()
