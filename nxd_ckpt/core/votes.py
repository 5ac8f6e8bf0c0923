"""Votes and verdicts: each rank's report on a save attempt, and rank 0's judgement. Pure.

A rank votes once, after its data and index are durable or after it failed. Rank 0 alone decides, from all votes; the
others read its verdict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nxd_ckpt.core import document
from nxd_ckpt.core.dcp_names import DcpChunk
from nxd_ckpt.core.limits import checked, checked_text, integers
from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import MalformedFile, RanksDisagree, SaveFailed, in_words

WHOLE, SAMPLES = "whole", "samples"
"""How copies are compared: all of each, or samples of large ones."""


VALUES = " values"
"""End of what a claim is about, if that is no tensors."""

FORMS = "forms"
"""Subject of an appeal to a rank that holds other tensors than its replica: their names, dtypes and shapes."""

_USER_CONTENT = f"0|user_content{VALUES}|{WHOLE}"
"""The claim of user content, of which a tag has rank 0's, for all."""

_BESIDE = {
    "user_content": "user_content=",
    "files": "files=",
    "scheduler": "a scheduler, or objects in state=",
}
"""Words for the parts that one rank writes for all, beside model and optimizer."""


REPLICAS_ALIKE = (
    "build both alike on all replicas, and step on all before the save. A state dict that was gathered on one rank "
    "(rank0_only=True) is not there on the others: gather it on all, or save it there as user_content=; what one rank "
    "alone has is saved by state= or rank_content="
)
"""Advice for replicas that hold other tensors than each other."""


class Claim(NamedTuple):
    """Copies that ranks hold: the rank that ``writes`` them, and ``what`` they are.

    The latter is equal on ranks that hold the same. ``how`` is `WHOLE` or `SAMPLES`. Who writes votes on both.
    """

    writes: int
    what: str
    how: str

    @property
    def key(self) -> str:
        return f"{self.writes}|{self.what}|{self.how}"

    @staticmethod
    def of(key: str) -> Claim:
        """Parse the key. Raises ValueError."""
        writes, what, how = key.split("|")
        return Claim(int(writes), what, how)


@dataclass(frozen=True)
class Vote:
    """One rank's report on one attempt.

    Attributes:
        rank: the global rank.
        error: class name and message of its failure, or None.
        plan: description of the save (tag, parts, format, sizes), which must be equal on all ranks.
        replica: digest of the names, shapes and dtypes of its model state. Ranks that share the writing of one replica
            each write a share of *the same* list, so equal digests mean that every tensor was written exactly once.
        common: digests of its parts of which the first ep rank writes what is no expert's: it must have the same ones.
        index: size and CRC-32 of its index file.
        replicated: digest of the contents of its tensors that should be equal on all tp ranks; None if it wrote none.
        nbytes: bytes of its files.
        seconds: how long it wrote.
        stage_seconds: how long its caller waited.
        host: name of its host.
        chunks: its chunks in a torch DCP directory, for the metadata that rank 0 writes.
        duplicated: how many of ``nbytes`` were not written, because an earlier tag has the same files.
        claims: digests of everything that other ranks hold copies of, by the key of a `Claim`.
        per_rank: names of what ranks save for themselves, because one that writes for all has other values. Those that
            were known before are here only if this rank has something of it.
        lost: those of them of which it had no copy any more when it noticed.
        rank_content: True if it saved content of its own.
    """

    rank: int
    error: tuple[str, str] | None = None
    plan: Mapping[str, Any] | None = None
    replica: str | None = None
    common: tuple[str, ...] = ()
    index: FileEntry | None = None
    replicated: int | None = None
    nbytes: int = 0
    seconds: float = 0.0
    stage_seconds: float = 0.0
    host: str = ""
    chunks: tuple[DcpChunk, ...] = ()
    duplicated: int = 0
    claims: Mapping[str, int] = field(default_factory=dict)
    per_rank: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    rank_content: bool = False


@dataclass(frozen=True)
class Verdict:
    """Rank 0's decision: the tag is visible, or the error (class name, message) and the rank that raised it.

    ``tag`` is the tag that rank 0 was saving, for ranks that took no part in it. ``per_rank`` are names of what ranks
    save for themselves from now on.
    """

    error: tuple[str, str] | None = None
    rank: int = 0
    tag: str | None = None
    per_rank: tuple[str, ...] = ()


def dump(document: Vote | Verdict) -> bytes:
    """Return a vote or verdict as JSON."""
    return json.dumps(document, default=vars).encode()


def load_vote(data: bytes, where: str) -> Vote:
    """Parse a vote. Raises MalformedFile, naming ``where``, for anything else."""
    fields = document.small(data, where)
    try:
        index, plan, replica, replicated = (fields[key] for key in ("index", "plan", "replica", "replicated"))
        integers([fields["rank"], fields["nbytes"], fields["duplicated"]])
        return Vote(
            rank=fields["rank"],
            error=_error_of(fields["error"]),
            plan=None if plan is None else checked(dict, plan),
            replica=None if replica is None else checked_text(replica),
            common=_texts(fields["common"]),
            index=None if index is None else FileEntry(*integers(index, 2)),
            replicated=None if replicated is None else integers([replicated])[0],
            nbytes=fields["nbytes"],
            seconds=float(fields["seconds"]),
            stage_seconds=float(fields["stage_seconds"]),
            host=checked_text(fields["host"]),
            chunks=tuple(map(DcpChunk.from_json, fields["chunks"])),
            duplicated=fields["duplicated"],
            claims=_digests(fields["claims"]),
            per_rank=_texts(fields["per_rank"]),
            lost=_texts(fields["lost"]),
            rank_content=checked(bool, fields["rank_content"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise MalformedFile(f"{where}: not a vote of this version ({problem})") from problem


def load_verdict(data: bytes, where: str) -> Verdict:
    """Parse a verdict. Raises MalformedFile, naming ``where``, for anything else."""
    fields = document.small(data, where)
    try:
        error = _error_of(fields.get("error"))
        tag = fields.get("tag")
        rank = integers([fields.get("rank", 0)])[0]
        per_rank = _texts(fields.get("per_rank", []))
        return Verdict(error, rank, None if tag is None else str(tag), per_rank)
    except (TypeError, ValueError) as problem:
        raise MalformedFile(f"{where}: not a verdict of this version ({problem})") from problem


def raise_error_of(vote: Vote) -> None:
    """Raise SaveFailed, naming rank and cause, if this vote reports a failure; RanksDisagree if that was the cause."""
    if vote.error is not None:
        kind = RanksDisagree if vote.error[0] == RanksDisagree.__name__ else SaveFailed
        raise kind(f"rank {vote.rank} failed: {in_words(vote.error)}")


def _raise_loss_of(vote: Vote, votes: Sequence[Vote]) -> None:
    """Raise if no file has what this rank alone has."""
    if vote.lost:
        raise SaveFailed(
            f"rank {vote.rank} and the rank that writes for it differ in {first_of(vote.lost)} since this save, "
            "which has no copy of this rank's values: an async save stages samples of such tensors, or memory_cap= has "
            "no room for more. A tag without them is not made; the next save keeps each rank's own"
        )
    for claim in map(Claim.of, vote.claims):
        if claim.what.endswith(VALUES) and claim.key not in votes[claim.writes].claims:
            what = claim.what.removesuffix(VALUES)
            alone = "" if what == "files" else ", or save what this rank alone has by rank_content="
            raise RanksDisagree(
                f"rank {vote.rank} saves {_BESIDE.get(what, what)}, and rank {claim.writes}, which writes that for "
                f"all, has none: pass it on all ranks{alone}"
            )


def judge(votes: Sequence[Vote], topology: Topology, leader_of: Mapping[int, int] | None = None) -> None:
    """Raise unless these votes, one of each rank, add up to one complete checkpoint.

    ``leader_of`` gives, for each rank of a mesh job, the first rank of the group that shares its writing.

    Raises:
        SaveFailed: a rank failed; the message names it and its error.
        RanksDisagree: two ranks were not saving the same thing.
    """
    require_one_plan(votes)
    for vote in votes:
        _raise_loss_of(vote, votes)
    pair = unlike([(vote.replica, vote.common) for vote in votes], topology, leader_of)
    if pair is not None and leader_of is not None:
        raise RanksDisagree(
            f"ranks {pair[0]} and {pair[1]} held the same tensors on the same meshes at the first save, but now "
            "their states differ in names, shapes, dtypes or placements; tensors would be missing or written "
            "twice. Make the states equal, or restart the job"
        )
    if pair is not None:
        raise RanksDisagree(
            f"ranks {pair[0]} and {pair[1]} are replicas of each other (same tp, pp and ep rank), but hold models "
            "or optimizers of other parameters, names, shapes or dtypes, or in another order: some tensors would "
            f"be missing or written twice; {REPLICAS_ALIKE}"
        )


def unlike(
    replicas: Sequence[tuple[str | None, Sequence[str]]],
    topology: Topology,
    leader_of: Mapping[int, int] | None = None,
) -> tuple[int, int] | None:
    """Return two ranks that share the writing of one replica, with other digests of it; None if there are none.

    ``replicas`` are ``replica`` and ``common`` of the votes of all ranks, ``leader_of`` as for `judge`.
    """
    for rank, (replica, common) in enumerate(replicas):
        leader = _leader(rank, topology) if leader_of is None else leader_of[rank]
        if replica != replicas[leader][0]:
            return leader, rank
        if common:
            first = topology.rank_of(replace(topology.coordinates_of(rank), dp_rank=0))
            if not {*common} <= {*replicas[first][1]}:
                return first, rank
    return None


def require_one_plan(votes: Sequence[Vote]) -> None:
    """Raise SaveFailed, naming the rank, if one failed; RanksDisagree if two were not saving the same thing."""
    for vote in votes:
        raise_error_of(vote)
    first = votes[0]
    for vote in votes:
        if vote.plan != first.plan:
            raise RanksDisagree(plan_difference((first.rank, vote.rank), first.plan or {}, vote.plan or {}))


def disputed(votes: Sequence[Vote]) -> list[str]:
    """Return the keys of claims that do not hold: a rank that counts as a replica has other values than who writes."""
    keys = {
        key
        for vote in votes
        for key, digest in vote.claims.items()
        if votes[Claim.of(key).writes].claims.get(key) != digest
    }
    return sorted(keys - {_USER_CONTENT})


def with_other_user_content(votes: Sequence[Vote]) -> list[int]:
    """Return the ranks that passed other user content than rank 0's, which is saved for all."""
    digests = {vote.rank: vote.claims[_USER_CONTENT] for vote in votes if _USER_CONTENT in vote.claims}
    return [rank for rank, digest in digests.items() if digest != digests.get(0, digest)]


def _leader(rank: int, topology: Topology) -> int:
    return topology.rank_of(topology.writer_of(topology.coordinates_of(rank)))


def tp_groups_that_differ(votes: Sequence[Vote], topology: Topology) -> list[list[int]]:
    """Return groups of tp ranks whose replicated tensors have different contents."""
    groups: dict[tuple[int, int], list[int]] = {}
    for vote in votes:
        if vote.replicated is not None:
            at = topology.coordinates_of(vote.rank)
            groups.setdefault((at.pp_rank, at.dp_rank), []).append(vote.rank)
    return [ranks for ranks in groups.values() if len({votes[rank].replicated for rank in ranks}) > 1]


def plan_difference(ranks: tuple[int, int], mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return the error of two ranks whose plans of one save differ."""
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    differences = ", ".join(f"{key}={mine.get(key)!r} against {theirs.get(key)!r}" for key in keys)
    return (
        f"ranks {ranks[0]} and {ranks[1]} disagree on what is being saved: {differences}; all ranks must call "
        "save_checkpoint with the same arguments, in the same order"
    )


def _digests(raw: Any) -> dict[str, int]:
    digests: dict[str, int] = checked(dict, raw)
    integers(list(digests.values()))
    for key in digests:
        Claim.of(key)
    return digests


def _texts(raw: Any) -> tuple[str, ...]:
    return tuple(map(checked_text, checked(list, raw)))


def _error_of(fields: Any) -> tuple[str, str] | None:
    if fields is None:
        return None
    name, message = fields
    return checked_text(name), checked_text(message)
