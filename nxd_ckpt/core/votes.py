"""Votes and verdicts: what each rank reports of an attempt, and how rank 0 judges it. Pure.

A rank votes once, after its data and index are durable or after it failed. Rank 0 alone decides, from all votes; the
others learn its verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.dcp_chunks import DcpChunk
from nxd_ckpt.core.entries import checked, integers
from nxd_ckpt.core.keys import checked_text
from nxd_ckpt.core.manifest import RankLine
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import MalformedFile, RanksDisagree, SaveFailed, in_words


@dataclass(frozen=True)
class Vote:
    """One rank's word on one attempt.

    ``plan`` describes what the rank believes is being saved (tag, parts, format, sizes) and must be equal on all
    ranks. ``replica`` is a digest of the names, shapes and dtypes of its model state: ranks that share the writing of
    one replica each write their share of *the same* list, so equal digests mean that every tensor was written exactly
    once. ``replicated`` is a digest of the content of its tensors that are believed equal on all tp ranks, None if it
    wrote none of them. ``seconds`` it wrote, and ``stage_seconds`` its caller waited. ``chunks`` is what
    rank 0 needs to know of its files of a torch DCP directory. ``duplicated`` of its ``nbytes`` were not written, since
    an earlier tag has the same files. ``numbers`` are digests of the plain numbers in the optimizer of a mesh job, by
    what they are called: the first rank of each group writes its own.
    """

    rank: int
    error: tuple[str, str] | None = None
    plan: Mapping[str, Any] | None = None
    replica: str | None = None
    index: RankLine | None = None
    replicated: int | None = None
    nbytes: int = 0
    seconds: float = 0.0
    stage_seconds: float = 0.0
    host: str = ""
    chunks: tuple[DcpChunk, ...] = ()
    duplicated: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Rank 0's decision: visible, or the error (class name, message) and the rank it came from.

    ``tag`` is what rank 0 was saving, for ranks that were not in it.
    """

    error: tuple[str, str] | None = None
    rank: int = 0
    tag: str | None = None


def dump(word: Vote | Verdict) -> bytes:
    return json.dumps(word, default=vars).encode()


def load_vote(data: bytes, where: str) -> Vote:
    fields = document.small(data, where)
    try:
        index, plan, replica, replicated = (fields[key] for key in ("index", "plan", "replica", "replicated"))
        integers([fields["rank"], fields["nbytes"], fields["duplicated"]])
        return Vote(
            rank=fields["rank"],
            error=_error_of(fields["error"]),
            plan=None if plan is None else checked(dict, plan),
            replica=None if replica is None else checked_text(replica),
            index=None if index is None else RankLine(*integers([index["nbytes"], index["crc32"]])),
            replicated=None if replicated is None else integers([replicated])[0],
            nbytes=fields["nbytes"],
            seconds=float(fields["seconds"]),
            stage_seconds=float(fields["stage_seconds"]),
            host=checked_text(fields["host"]),
            chunks=tuple(map(DcpChunk.from_json, fields["chunks"])),
            duplicated=fields["duplicated"],
            numbers=_digests(fields["numbers"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise MalformedFile(f"{where}: not a vote of this version ({problem})") from problem


def load_verdict(data: bytes, where: str) -> Verdict:
    fields = document.small(data, where)
    try:
        error, tag = _error_of(fields.get("error")), fields.get("tag")
        return Verdict(error, integers([fields.get("rank", 0)])[0], None if tag is None else str(tag))
    except (TypeError, ValueError) as problem:
        raise MalformedFile(f"{where}: not a verdict of this version ({problem})") from problem


def raise_error_of(vote: Vote) -> None:
    """Raise SaveFailed, naming rank and cause, if this vote reports a failure."""
    if vote.error is not None:
        raise SaveFailed(f"rank {vote.rank} failed: {in_words(vote.error)}")


def judge(votes: Sequence[Vote], topology: Topology, leader_of: Mapping[int, int] | None = None) -> None:
    """Raise unless these votes, one of each rank, add up to one complete checkpoint.

    ``leader_of`` says of each rank of a mesh job which is the first that shares the writing with it.

    Raises:
        SaveFailed: a rank failed; the message names it and its error.
        RanksDisagree: two ranks were not saving the same thing.
    """
    for vote in votes:
        raise_error_of(vote)
    first = votes[0]
    for vote in votes:
        if vote.plan != first.plan:
            raise RanksDisagree(_difference(first, vote))
        leader = _leader(vote.rank, topology) if leader_of is None else leader_of[vote.rank]
        if vote.replica != votes[leader].replica and leader_of is not None:
            raise RanksDisagree(
                f"ranks {leader} and {vote.rank} held the same tensors on the same meshes at the first save, and now "
                "hold states with different names, shapes, dtypes or placements; tensors would be missing or written "
                "twice"
            )
        if leader_of is not None and vote.numbers != votes[leader].numbers:
            raise RanksDisagree(_different_numbers(votes[leader], vote))
        if vote.replica != votes[leader].replica:
            raise RanksDisagree(
                f"ranks {leader} and {vote.rank} are replicas of each other (same tp, pp and ep rank), but hold model "
                "states with different names, shapes or dtypes; a replica's tensors would be missing or written twice"
            )


def _leader(rank: int, topology: Topology) -> int:
    return topology.rank_of(topology.writer_of(topology.coordinates_of(rank)))


def tp_groups_that_differ(votes: Sequence[Vote], topology: Topology) -> list[list[int]]:
    """Groups of tp ranks whose tensors that should be replicas of each other have different content."""
    groups: dict[tuple[int, int], list[int]] = {}
    for vote in votes:
        if vote.replicated is not None:
            at = topology.coordinates_of(vote.rank)
            groups.setdefault((at.pp_rank, at.dp_rank), []).append(vote.rank)
    return [ranks for ranks in groups.values() if len({votes[rank].replicated for rank in ranks}) > 1]


def _difference(first: Vote, other: Vote) -> str:
    mine, theirs = dict(first.plan or {}), dict(other.plan or {})
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    found = ", ".join(f"{key}={mine.get(key)!r} against {theirs.get(key)!r}" for key in keys)
    return (
        f"ranks {first.rank} and {other.rank} disagree on what is being saved: {found}; all ranks must call "
        "save_checkpoint with the same arguments, in the same order"
    )


def _different_numbers(leader: Vote, vote: Vote) -> str:
    names = {**leader.numbers, **vote.numbers}
    differ = sorted(name for name in names if leader.numbers.get(name) != vote.numbers.get(name))
    return (
        f"ranks {leader.rank} and {vote.rank} hold different numbers in the optimizer: {first_of(differ)}. A tag has "
        "one number for all ranks of a mesh: keep each rank's own as a plain tensor of one dimension in the state of a "
        "sharded parameter, which comes back to its rank, or in rank_content=; or make them equal on all ranks"
    )


def _digests(raw: Any) -> dict[str, int]:
    digests: dict[str, int] = checked(dict, raw)
    integers(list(digests.values()))
    return digests


def _error_of(wire: Any) -> tuple[str, str] | None:
    if wire is None:
        return None
    name, message = wire
    return checked_text(name), checked_text(message)
