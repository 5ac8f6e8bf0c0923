"""Ranks and coordinates: the standard order, the maps of real clusters, and what no job can be."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core.topology import Coordinates, Topology, topology_from_groups
from nxd_ckpt.errors import InvalidArgument


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any small job, seen from any rank, in the standard order or in one of its own."""
    ep, expert_dp, tp, pp = (draw(st.integers(1, 3)) for _ in range(4))
    standard = Topology(ep * expert_dp, tp, pp, ep)
    places = [standard.coordinates_of(rank) for rank in range(standard.world_size)]
    rank_map = draw(st.none() | st.permutations(places))
    rank = draw(st.integers(0, standard.world_size - 1))
    return Topology(ep * expert_dp, tp, pp, ep, rank=rank, rank_map=rank_map)


def transposed(topology: Topology) -> dict[str, list[list[int]]]:
    """The replica groups that parallel_state would hold for the job."""
    ranks = {topology.coordinates_of(rank): rank for rank in range(topology.world_size)}
    pps, dps, tps = range(topology.pp), range(topology.dp), range(topology.tp)
    return {
        "tp_groups": [[ranks[Coordinates(p, d, t)] for t in tps] for p in pps for d in dps],
        "dp_groups": [[ranks[Coordinates(p, d, t)] for d in dps] for p in pps for t in tps],
        "pp_groups": [[ranks[Coordinates(p, d, t)] for p in pps] for d in dps for t in tps],
    }


@given(topologies())
def test_ranks_and_coordinates_are_one_to_one(topology: Topology) -> None:
    """Every rank has coordinates of its own, and they lead back to it."""
    places = [topology.coordinates_of(rank) for rank in range(topology.world_size)]
    assert list(range(topology.world_size)) == [topology.rank_of(place) for place in places]
    assert topology.coordinates == places[topology.rank]


@given(topologies())
def test_replicas_hold_the_same_experts(topology: Topology) -> None:
    """Expert replicas share tp, pp and ep rank, there are expert_dp of them, the rank itself among them."""
    own = topology.replicas(topology.coordinates, expert=True)
    others = [topology.at(rank) for rank in own]
    expected = (topology.tp_rank, topology.pp_rank, topology.ep_rank)
    assert {expected} == {(other.tp_rank, other.pp_rank, other.ep_rank) for other in others}
    assert list(range(topology.expert_dp)) == [other.expert_dp_rank for other in others]
    assert topology.rank in own
    assert topology.dp == len(topology.replicas(topology.coordinates))


@given(topologies())
def test_one_writer_speaks_for_each_replica(topology: Topology) -> None:
    """All expert replicas name the same writer, which is one of them."""
    group = topology.replicas(topology.coordinates, expert=True)
    writers = {topology.writer_of(topology.coordinates_of(rank)) for rank in group}
    assert [group[0]] == [topology.rank_of(writer) for writer in writers]


@given(topologies())
def test_live_groups_give_the_topology_back(topology: Topology) -> None:
    """Read from its replica groups, a job is equal to what it was, whatever the order of its ranks."""
    assert topology == topology_from_groups(topology.rank, **transposed(topology), ep=topology.ep)


def test_the_standard_order_is_pp_dp_tp() -> None:
    topology = Topology(dp=2, tp=4, rank=5)
    assert Coordinates(pp_rank=0, dp_rank=1, tp_rank=1) == topology.coordinates
    assert topology == Topology(dp=2, tp=4, dp_rank=1, tp_rank=1)
    assert 13 == Topology(dp=2, tp=4, pp=2, dp_rank=1, tp_rank=1, pp_rank=1).rank


def test_experts_split_data_parallel() -> None:
    """ep is the faster part of dp: dp rank 5 of 6 with ep = 3 is the second replica of the last experts."""
    topology = Topology(dp=6, ep=3, dp_rank=5)
    assert (2, 1) == (topology.ep_rank, topology.expert_dp_rank)
    assert [2, 5] == topology.replicas(topology.coordinates, expert=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "dp must be a whole number of at least 1, found 0"),
        ({"tp": 2.5}, "tp must be a whole number of at least 1, found 2.5"),
        ({"pp": True}, "pp must be a whole number of at least 1, found True"),
        ({"dp": 3, "ep": 2}, "ep=2 must divide dp=3"),
        ({"dp": 2, "rank": 2}, r"rank 2 is not in \[0, 2\)"),
        ({"dp": 2, "rank": -1}, r"rank -1 is not in \[0, 2\)"),
        ({"tp": 2, "tp_rank": 2}, r"tp_rank 2 is not in \[0, 2\)"),
        ({"dp": 2, "rank": 1, "dp_rank": 0}, "contradicts {'dp_rank': 0}"),
        ({"dp": 2, "rank_map": [Coordinates(), Coordinates()]}, "coordinates of its own"),
        ({"dp": 2, "rank_map": [Coordinates()]}, "found 1 entries"),
    ],
)
def test_what_no_job_can_be(arguments: dict[str, Any], message: str) -> None:
    """Sizes, ranks and maps that contradict each other are refused with what was found."""
    with pytest.raises(InvalidArgument, match=message):
        Topology(**arguments)


def test_groups_that_leave_a_rank_out_are_refused() -> None:
    """Replica groups that do not cover the world are not a topology."""
    with pytest.raises(InvalidArgument, match=r"cover the ranks 0\.\.1"):
        topology_from_groups(0, [[0, 1]], [[0]], [[0], [1]])


def test_a_topology_is_described_for_people() -> None:
    assert "dp=4 tp=2 pp=1 ep=2" == Topology(dp=4, tp=2, ep=2).describe()
