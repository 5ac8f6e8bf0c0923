"""How rank 0 judges: one failed rank fails the save, and all must have meant the same one."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nxd_ckpt.core import votes as voting
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import MalformedFile, RanksDisagree, SaveFailed

TOPOLOGY = Topology(dp=4, tp=2, ep=2)
PLAN = {"tag": "step_3", "topology": TOPOLOGY.describe(), "model": True}


def votes() -> list[voting.Vote]:
    """One good vote of each of eight ranks; ranks with the same tp and ep rank are replicas."""
    at = [TOPOLOGY.at(rank) for rank in range(8)]
    return [voting.Vote(place.rank, plan=PLAN, replica=f"{place.tp_rank}{place.ep_rank}") for place in at]


def test_equal_votes_are_a_checkpoint() -> None:
    voting.judge(votes(), TOPOLOGY)


REFUSALS: list[tuple[int, dict[str, Any], type[Exception], str]] = [
    (5, {"error": ("DigestMismatch", "x.pt: found 2")}, SaveFailed, r"^rank 5 failed: DigestMismatch: x\.pt: found 2$"),
    (5, {"error": ("RanksDisagree", "other")}, RanksDisagree, r"^rank 5 failed: RanksDisagree: other$"),
    (5, {"lost": ("model/w",)}, SaveFailed, r"^rank 5 and the rank that writes for it differ in model/w since"),
    (
        3, {"plan": {**PLAN, "tag": "step_4"}}, RanksDisagree,
        r"ranks 0 and 3 disagree .*: tag='step_3' against 'step_4'; all ranks",
    ),
    (6, {"replica": "x"}, RanksDisagree, r"ranks 2 and 6 are replicas .* hold models or optimizers .* step on all"),
    (0, {"replica": "x"}, RanksDisagree, "ranks 0 and 4 are replicas of each other"),
]


@pytest.mark.parametrize(("rank", "other", "error", "message"), REFUSALS)
def test_one_vote_refuses_the_save(rank: int, other: dict[str, Any], error: type[Exception], message: str) -> None:
    """The error names rank and cause, and what differs: also where a rank that speaks for others is the odd one."""
    ballots = votes()
    ballots[rank] = replace(ballots[rank], **other)
    with pytest.raises(error, match=message):
        voting.judge(ballots, TOPOLOGY)


SCHEDULER, CONTENT = (
    voting.Claim(0, f"{part}{voting.VALUES}", voting.WHOLE).key for part in ("scheduler", "user_content")
)
TENSORS = voting.Claim(1, "model", voting.WHOLE).key


def test_values_that_their_writer_lacks_are_refused() -> None:
    """Of what is beside tensors. Values that differ are no matter here."""
    ballots = votes()
    ballots[0] = replace(ballots[0], claims={SCHEDULER: 1})
    ballots[5] = replace(ballots[5], claims={SCHEDULER: 2, TENSORS: 3})
    voting.judge(ballots, TOPOLOGY)
    ballots[0] = replace(ballots[0], claims={})
    with pytest.raises(RanksDisagree, match="rank 5 saves a scheduler, or objects in state=, and rank 0, which writes"):
        voting.judge(ballots, TOPOLOGY)


def test_copies_of_other_content_than_their_writers_are_disputed() -> None:
    """By their keys, in order; user content, of which rank 0's is saved for all, is told by ranks."""
    ballots = [replace(vote, claims={SCHEDULER: 1, CONTENT: 2, TENSORS: 3}) for vote in votes()]
    assert ([], []) == (voting.disputed(ballots), voting.with_other_user_content(ballots))
    ballots[5] = replace(ballots[5], claims={TENSORS: 4, SCHEDULER: 5, CONTENT: 6})
    assert [SCHEDULER, TENSORS] == voting.disputed(ballots)
    assert [5] == voting.with_other_user_content(ballots)
    ballots[0] = replace(ballots[0], claims={SCHEDULER: 5, TENSORS: 3})
    assert [] == voting.with_other_user_content(ballots)


def test_ranks_of_a_mesh_job_are_compared_with_their_own_leader() -> None:
    """Those that share the writing must hold the same; what others hold is no matter."""
    ballots = [voting.Vote(rank, plan=PLAN, replica="one" if rank in (0, 3) else "other") for rank in range(4)]
    leader_of = {0: 0, 3: 0, 1: 1, 2: 1}
    voting.judge(ballots, Topology(dp=4), leader_of)
    ballots[3] = replace(ballots[3], replica="other")
    with pytest.raises(RanksDisagree, match="ranks 0 and 3 held the same tensors on the same meshes at the first save"):
        voting.judge(ballots, Topology(dp=4), leader_of)


def test_replicated_tensors_that_differ_over_tp() -> None:
    """tp ranks of one dp rank whose replicated tensors have other content are found, and only they; ranks that wrote
    none of them are not compared."""
    same = [replace(vote, replicated=7) for vote in votes()]
    assert [] == voting.tp_groups_that_differ(same, TOPOLOGY)
    same[3] = replace(same[3], replicated=8)
    assert [[2, 3]] == voting.tp_groups_that_differ(same, TOPOLOGY)
    ballots = [replace(vote, replicated=vote.rank if vote.rank % 2 else None) for vote in votes()]
    assert [] == voting.tp_groups_that_differ(ballots, TOPOLOGY)


@pytest.mark.parametrize(
    "vote",
    [
        voting.Vote(3, plan=PLAN, replica="ab", index=FileEntry(120, 9), replicated=2**32 - 1, nbytes=5, seconds=0.5),
        voting.Vote(0, error=("OSError", "disk full")),
    ],
)
def test_a_vote_is_read_back(vote: voting.Vote) -> None:
    assert vote == voting.load_vote(voting.dump(vote), "vote")


@pytest.mark.parametrize("verdict", [voting.Verdict(), voting.Verdict(("SaveFailed", "rank 3 failed"), 3, "step_3")])
def test_a_verdict_is_read_back(verdict: voting.Verdict) -> None:
    """Without an error the tag is visible; rank 0 decided, unless another is named."""
    assert verdict == voting.load_verdict(voting.dump(verdict), "verdict")
    assert voting.Verdict() == voting.load_verdict(b"{}", "verdict")


DAMAGED = [b"", b"{", b"[]", b"3", b'{"error":["x"]}', b'{"error":{"a":1}}', b'{"error":5}', b"[" * 100_000]


@pytest.mark.parametrize(
    "field",
    [
        *({"rank": "1"}, {"rank": -1}, {"nbytes": 1.5}, {"nbytes": True}),
        *({"claims": {SCHEDULER: "1"}}, {"claims": {"scheduler": 1}}),
    ],
)
def test_the_numbers_of_a_vote_are_numbers(field: dict[str, Any]) -> None:
    """Counts and digests, and nothing that looks like one; keys of claims say whose they are."""
    fields = {**json.loads(voting.dump(voting.Vote(3, plan=PLAN))), **field}
    with pytest.raises(MalformedFile, match=r"^vote: not a vote of this version"):
        voting.load_vote(json.dumps(fields).encode(), "vote")


OF_VOTES = [*DAMAGED, b'{"rank":0,"index":[1]}', b'{"rank":0,"colour":1}', b"{}"]
OF_VERDICTS = [*DAMAGED, b'{"rank":"x"}', b'{"rank":null}']


@pytest.mark.parametrize(
    ("load", "data"),
    [*((voting.load_vote, data) for data in OF_VOTES), *((voting.load_verdict, data) for data in OF_VERDICTS)],
)
def test_a_damaged_vote_or_verdict_is_named(load: Callable[[bytes, str], object], data: bytes) -> None:
    """What cannot be read is an error of that file, not of the reader."""
    with pytest.raises(MalformedFile, match=r"^votes/rank_0\.json: "):
        load(data, "votes/rank_0.json")
