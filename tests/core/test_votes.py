"""How rank 0 judges: one failed rank fails the save, and all must have meant the same one."""

import json
from dataclasses import replace
from typing import Any

import pytest

from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.core.votes import (
    VALUES,
    WHOLE,
    Claim,
    Verdict,
    Vote,
    disputed,
    dump,
    judge,
    load_verdict,
    load_vote,
    tp_groups_that_differ,
    with_other_user_content,
)
from nxd_ckpt.errors import MalformedFile, RanksDisagree, SaveFailed

TOPOLOGY = Topology(dp=4, tp=2, ep=2)
PLAN = {"tag": "step_3", "topology": TOPOLOGY.describe(), "model": True}


def votes() -> list[Vote]:
    """One good vote of each of eight ranks; ranks with the same tp and ep rank are replicas."""
    at = [TOPOLOGY.at(rank) for rank in range(8)]
    return [Vote(place.rank, plan=PLAN, replica=f"{place.tp_rank}{place.ep_rank}") for place in at]


def test_equal_votes_are_a_checkpoint() -> None:
    """Nothing to object to."""
    judge(votes(), TOPOLOGY)


def test_a_failed_rank_fails_the_save() -> None:
    """The error names rank and cause, also if others disagree because of it."""
    ballots = votes()
    ballots[5] = Vote(5, error=("DigestMismatch", "model/x.pt: expected 1, found 2"))
    with pytest.raises(SaveFailed, match=r"^rank 5 failed: DigestMismatch: model/x\.pt: expected 1, found 2$"):
        judge(ballots, TOPOLOGY)


def test_a_rank_that_saw_the_ranks_disagree_says_so() -> None:
    """The error is of the kind that it met."""
    ballots = votes()
    ballots[5] = Vote(5, error=("RanksDisagree", "other names"))
    with pytest.raises(RanksDisagree, match=r"^rank 5 failed: RanksDisagree: other names$"):
        judge(ballots, TOPOLOGY)


def test_a_tag_that_lacks_what_a_rank_has_is_not_made() -> None:
    """A rank that differs from its writer, and of whose values there is no copy."""
    ballots = votes()
    ballots[5] = replace(ballots[5], lost=("model/w",))
    with pytest.raises(SaveFailed, match=r"^rank 5 and the rank that writes for it differ in model/w since"):
        judge(ballots, TOPOLOGY)


SCHEDULER, CONTENT = Claim(0, f"scheduler{VALUES}", WHOLE).key, Claim(0, f"user_content{VALUES}", WHOLE).key
TENSORS = Claim(1, "model", WHOLE).key


def test_values_that_their_writer_lacks_are_refused() -> None:
    """Of what is beside tensors. Values that differ are no matter here."""
    ballots = votes()
    ballots[0] = replace(ballots[0], claims={SCHEDULER: 1})
    ballots[5] = replace(ballots[5], claims={SCHEDULER: 2, TENSORS: 3})
    judge(ballots, TOPOLOGY)
    ballots[0] = replace(ballots[0], claims={})
    with pytest.raises(RanksDisagree, match="rank 5 saves a scheduler, or objects in state=, and rank 0, which writes"):
        judge(ballots, TOPOLOGY)


def test_copies_of_other_content_than_their_writers_are_disputed() -> None:
    """By their keys, in order; user content, of which rank 0's is saved for all, is told by ranks."""
    ballots = [replace(vote, claims={SCHEDULER: 1, CONTENT: 2, TENSORS: 3}) for vote in votes()]
    assert ([], []) == (disputed(ballots), with_other_user_content(ballots))
    ballots[5] = replace(ballots[5], claims={TENSORS: 4, SCHEDULER: 5, CONTENT: 6})
    assert [SCHEDULER, TENSORS] == disputed(ballots)
    assert [5] == with_other_user_content(ballots)
    ballots[0] = replace(ballots[0], claims={SCHEDULER: 5, TENSORS: 3})
    assert [] == with_other_user_content(ballots)


def test_another_tag_on_one_rank_is_shown() -> None:
    """Ranks that do not save the same thing are shown with what differs, and nothing else."""
    ballots = votes()
    ballots[3] = replace(ballots[3], plan={**PLAN, "tag": "step_4"})
    with pytest.raises(RanksDisagree, match=r"ranks 0 and 3 disagree .*: tag='step_3' against 'step_4'; all ranks"):
        judge(ballots, TOPOLOGY)


def test_another_state_on_a_replica_is_refused() -> None:
    """Replicas share the writing of one list of tensors: another list would lose some of them."""
    ballots = votes()
    ballots[6] = replace(ballots[6], replica="other")
    with pytest.raises(RanksDisagree, match=r"ranks 2 and 6 are replicas .* hold models or optimizers .* step on all"):
        judge(ballots, TOPOLOGY)


def test_a_leader_that_differs_is_noticed_too() -> None:
    """The rank that speaks for a replica is compared with the others, not taken as right without them."""
    ballots = votes()
    ballots[0] = replace(ballots[0], replica="other")
    with pytest.raises(RanksDisagree, match="ranks 0 and 4 are replicas of each other"):
        judge(ballots, TOPOLOGY)


def test_ranks_of_a_mesh_job_are_compared_with_their_own_leader() -> None:
    """Those that share the writing must hold the same; what others hold is no matter."""
    ballots = [Vote(rank, plan=PLAN, replica="one" if rank in (0, 3) else "other") for rank in range(4)]
    leader_of = {0: 0, 3: 0, 1: 1, 2: 1}
    judge(ballots, Topology(dp=4), leader_of)
    ballots[3] = replace(ballots[3], replica="other")
    with pytest.raises(RanksDisagree, match="ranks 0 and 3 held the same tensors on the same meshes at the first save"):
        judge(ballots, Topology(dp=4), leader_of)


def test_replicated_tensors_that_differ_over_tp() -> None:
    """tp ranks of one dp rank whose replicated tensors have other content are found, and only they."""
    same = [replace(vote, replicated=7) for vote in votes()]
    assert [] == tp_groups_that_differ(same, TOPOLOGY)
    same[3] = replace(same[3], replicated=8)
    assert [[2, 3]] == tp_groups_that_differ(same, TOPOLOGY)


def test_ranks_that_wrote_none_of_them_are_not_compared() -> None:
    """Without a digest there is nothing to compare with."""
    ballots = [replace(vote, replicated=vote.rank if vote.rank % 2 else None) for vote in votes()]
    assert [] == tp_groups_that_differ(ballots, TOPOLOGY)


@pytest.mark.parametrize(
    "vote",
    [
        Vote(3, plan=PLAN, replica="ab", index=FileEntry(120, 9), replicated=2**32 - 1, nbytes=5, seconds=0.5),
        Vote(0, error=("OSError", "disk full")),
    ],
)
def test_a_vote_is_read_back(vote: Vote) -> None:
    """As it was cast."""
    assert vote == load_vote(dump(vote), "vote")


@pytest.mark.parametrize("verdict", [Verdict(), Verdict(("SaveFailed", "rank 3 failed"), 3, "step_3")])
def test_a_verdict_is_read_back(verdict: Verdict) -> None:
    """As it was given."""
    assert verdict == load_verdict(dump(verdict), "verdict")


def test_an_empty_verdict_is_a_visible_tag() -> None:
    """Without an error the tag is visible; rank 0 decided, unless another is named."""
    assert Verdict() == load_verdict(b"{}", "verdict")


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
    fields = {**json.loads(dump(Vote(3, plan=PLAN))), **field}
    with pytest.raises(MalformedFile, match=r"^vote: not a vote of this version"):
        load_vote(json.dumps(fields).encode(), "vote")


@pytest.mark.parametrize("data", [*DAMAGED, b'{"rank":0,"index":[1]}', b'{"rank":0,"colour":1}', b"{}"])
def test_a_damaged_vote_is_named(data: bytes) -> None:
    """A vote that cannot be read is an error of that file, not of the reader."""
    with pytest.raises(MalformedFile, match=r"^votes/rank_0\.json: "):
        load_vote(data, "votes/rank_0.json")


@pytest.mark.parametrize("data", [*DAMAGED, b'{"rank":"x"}', b'{"rank":null}'])
def test_a_damaged_verdict_is_named(data: bytes) -> None:
    """The same for rank 0's decision, which every rank reads."""
    with pytest.raises(MalformedFile, match=r"^verdict\.json: "):
        load_verdict(data, "verdict.json")
