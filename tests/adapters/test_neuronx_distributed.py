"""The topology of a live neuronx-distributed job."""

from __future__ import annotations

import sys

import pytest

from nxd_ckpt.adapters.neuronx_distributed import live_topology
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from tests.rigs.parallel_state import FakeParallelState, installed_parallel_state

pytestmark = pytest.mark.plain

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


def test_context_parallelism_is_refused():
    """Ranks of a context group would overwrite each other's files."""
    state = FakeParallelState(world=2)
    vars(state)["get_context_model_parallel_size"] = lambda: 2
    with installed_parallel_state(state), pytest.raises(UnsupportedState, match="context parallelism of size 2"):
        live_topology()


def test_ranks_that_contradict_the_groups_are_refused():
    """Files are named by NxD's ranks: if its groups say otherwise, nothing is guessed."""
    state = FakeParallelState(ep=2, world=4, rank=3)
    vars(state)["get_expert_model_parallel_rank"] = lambda: 0
    with installed_parallel_state(state), pytest.raises(InvalidArgument, match="'expert_model': 0}, its replica"):
        live_topology()
