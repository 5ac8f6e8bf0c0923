"""File names are exactly NxD's, and reading a name gives back what made it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_ckpt.core import names
from nxd_ckpt.core.names import ParsedName
from nxd_ckpt.core.topology import Coordinates, Topology
from tests.golden.checkpoints import saved

ranks = st.integers(0, 12_000)


@given(ranks, st.none() | ranks, ranks, ranks)
def test_a_name_parses_to_the_ranks_that_made_it(dp: int, ep: int | None, tp: int, pp: int) -> None:
    """Every rank survives the way into a name and back, with two digits or more."""
    assert ParsedName(dp, ep, tp, pp) == names.parse(names.rank_file(dp, ep, tp, pp))


@pytest.mark.parametrize(
    "name",
    [
        "dp_rank_00_tp_rank_00_pp_rank_00", "dp_rank_00_tp_rank_00_pp_rank_00.pt.info.pt",
        "dp_rank_00_tp_rank_00_pp_rank_00.pt.tensors", "dp_rank_0_tp_rank_00_pp_rank_00.pt",
        "dp_rank_007_tp_rank_00_pp_rank_00.pt", "tp_rank_00_pp_rank_00.pt", "dp_rank_00_tp_rank_00_pp_rank_00.pt\n",
        "full_tp_rank_00_pp_rank_00.pt", "",
    ],
)
def test_other_names_are_no_rank_files(name: str) -> None:
    """Only exactly NxD's names are taken for rank files, not what stands beside them."""
    assert names.parse(name) is None


def test_the_names_of_golden_checkpoints(golden: Path) -> None:
    """For every rank of every checkpoint that NxD wrote, the named files are those that exist."""
    for described in sorted(golden.glob("*/config.json")):
        config = json.loads(described.read_text())
        topology = Topology(config["dp"], config["tp"], config["pp"], config["ep"])
        checkpoint = saved(golden, described.parent.name)
        for tag in map(checkpoint.directory.joinpath, checkpoint.tags):
            expected = {path.relative_to(tag).as_posix() for path in tag.glob("*/*_pp_rank_*[0-9].pt")}
            at = [Coordinates(rank["pp"], rank["dp"], rank["tp"]) for rank in config["rank_coords"]]
            actual = {names.model_file(topology, place) for place in at}
            if not config["dcp"]:
                kind = "zero1" if config["zero1"] else "plain"
                actual |= {names.optimizer_file(topology, place, kind) for place in at}
            assert expected == actual, described.parent.name


def test_full_names_and_foreign_ones_are_told_apart() -> None:
    at = Coordinates(pp_rank=1, dp_rank=103, tp_rank=2)
    assert "optim/full_tp_rank_02_pp_rank_01.pt" == names.optimizer_file(Topology(tp=4, pp=2), at, "zero1_full")
    assert names.ParsedName(0, None, 2, 1) == names.parse_full("full_tp_rank_02_pp_rank_01.pt")
    assert names.parse_full("full_tp_rank_2_pp_rank_01.pt") is None
    assert names.parse_full("full_tp_rank_002_pp_rank_01.pt") is None
    assert "index/dp_rank_103_tp_rank_02_pp_rank_01.json" == names.index_file(at)
    assert "rank_content/rank_00103.pt" == names.rank_content_file(103)
