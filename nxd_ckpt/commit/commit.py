"""Rank 0's part of a save: judge the votes, complete the tag, make it visible, apply retention.

The order is derived from *visible means complete*: all data and indexes are durable before the last vote; the manifest
is durable before the publication makes the tag visible (see commit.publication); that is durable before the
verdict is written.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from nxd_ckpt import effects
from nxd_ckpt.commit.publication import Publication
from nxd_ckpt.commit.retention import judge_tags, retire_unpinned
from nxd_ckpt.commit.session import Session
from nxd_ckpt.commit.tier import Draining
from nxd_ckpt.commit.voting import AttemptVotes
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import STAGING, VOTES, staging_dir, votes_dir
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import (
    FileEntry,
    Manifest,
    ParameterSpec,
    Parts,
    RankPhases,
    dump_manifest,
    load_index,
    load_parameters,
)
from nxd_ckpt.core.mesh import MeshGroup, leaders_of
from nxd_ckpt.core.retention_rules import Metrics, Rule
from nxd_ckpt.core.tags import TagInfo, next_order_time, seconds_until_after
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.core.votes import Vote, judge, tp_groups_that_differ
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.directory import find_tag, list_tags
from nxd_ckpt.tag.range_reader import answers_of, in_parallel

_CATCHES_UP = 2.0
"""Seconds for which a commit waits until the clock is past the newest tag."""


@dataclass(frozen=True)
class Commit:
    """An attempt that rank 0 is about to decide.

    ``rules`` say which tags stay; None keeps all. ``parameters`` are those of rank 0's own index. ``groups`` are the
    mesh groups of a mesh job. ``draining`` is set if there are further tiers. ``voted`` is the time of rank 0's own
    vote (seconds, as effects.monotonic()). ``per_rank`` are names of what ranks saved for themselves. ``guests`` are
    files of others that it was given.
    """

    publication: Publication
    parts: Parts
    rules: Sequence[Rule] | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, ParameterSpec] | None = None
    groups: Sequence[MeshGroup] | None = None
    metrics: Metrics = field(default_factory=dict)
    draining: Draining | None = None
    voted: float | None = None
    per_rank: tuple[str, ...] = ()
    guests: Mapping[str, FileEntry] = field(default_factory=dict)

    def leaders(self, topology: Topology) -> list[int]:
        """Return ranks that together have every parameter.

        One of each pipeline stage and expert group, or of each mesh group.
        """
        if self.groups is not None:
            return [group.ranks[0] for group in self.groups]
        places = (Coordinates(pp_rank, ep_rank) for pp_rank in range(topology.pp) for ep_rank in range(topology.ep))
        return list(map(topology.rank_of, places))


def commit(session: Session, topology: Topology, votes: Sequence[Vote], request: Commit) -> None:
    """Make the tag visible, complete and durable; then apply retention.

    ``topology`` is that of the tag's ranks.

    Raises:
        DirectoryInUse: another job took the directory over.
        SaveFailed, RanksDisagree, OutcomeUnknown: see core.votes.judge and Publication.publish.
    """
    storage = session.storage
    publication = request.publication
    _, tags = answers_of(storage, session.require, partial(list_tags, storage))
    judge(votes, topology, leaders_of(request.groups))
    folder = publication.folder
    leaders = request.leaders(topology)
    index_of = partial(_read_index, storage, folder, topology)
    parameters: dict[str, ParameterSpec] = {}
    # Rank 0 need not read its own index, which it has just written.
    by_rank = {} if request.parameters is None else {0: request.parameters}
    others = [rank for rank in leaders if rank not in by_rank]
    for rank, index in zip(others, in_parallel(storage, others, index_of), strict=True):
        by_rank[rank] = load_parameters(*index)
    for rank in leaders:
        parameters.update(by_rank[rank])
    parameters.update(_unknown_where_replicas_differ(index_of, topology, votes, parameters))
    lines = tuple(vote.index or FileEntry(0, 0) for vote in votes)
    order_time = _order_time(storage, tags, 0.0 if request.draining is None else request.draining.newest)
    manifest = Manifest(
        tag=publication.tag,
        attempt=publication.attempt,
        order_time=order_time,
        topology=topology,
        parts=request.parts,
        ranks=lines,
        parameters=parameters,
        timings=_timings(votes, request),
        versions=request.versions,
        leaders=None if request.groups is None else tuple(leaders),
        metrics=request.metrics,
        phases=_phases(votes),
        per_rank=request.per_rank,
        guests=request.guests,
    )
    indexes = [names.index_file(topology.coordinates_of(rank)) for rank in range(topology.world_size)]
    session.require()  # again: in place, a late write would disturb another job that saves this tag
    publication.publish(session, order_time, indexes, {names.MANIFEST: dump_manifest(manifest)})
    if request.rules is not None:
        unread = () if request.draining is None else request.draining.unread
        # A file system is listed again: in a store that takes two requests for each tag.
        retain(session, publication, request.rules, unread, None if storage.renames else tags)


def _order_time(storage: Storage, tags: Sequence[TagInfo], elsewhere: float) -> float:
    """Return an order time after that of every tag, including ``elsewhere``, the newest on other tiers.

    Other programs' next tags are dated by the clock. So order times do not run ahead of it, and the commit waits for a
    clock that is a little behind. It also waits until the second is over that dates another program's tag.
    """
    now = effects.time()
    newest = max([elsewhere, *(info.order_time for info in tags)])
    end = max([elsewhere, *(info.latest_time for info in tags)])
    ahead = newest - now
    if 0 < ahead <= _CATCHES_UP:
        effects.sleep(ahead)
        return next_order_time(newest, newest)  # not more, else it might lie within such a second
    if ahead > 0:
        logger.warning(
            "%s: the newest tag is dated %.0f s after this host's clock. This save is dated after it; a tag that "
            "another program saves before that time counts as older. Correct the clock",
            storage.url,
            ahead,
        )
    elif (seconds := seconds_until_after(end, now)) > 0:
        effects.sleep(seconds)
        newest = end
    return next_order_time(effects.time(), newest)


def _timings(votes: Sequence[Vote], request: Commit) -> dict[str, float]:
    """Return the manifest's timings, in seconds and bytes; commit_seconds ends where the manifest is made."""
    timings = {**request.timings, "write_seconds": round(max(vote.seconds for vote in votes), 6)}
    if request.voted is not None:
        before = timings.get("commit_seconds", 0.0)
        timings["commit_seconds"] = round(before + effects.monotonic() - request.voted, 6)
    duplicated = sum(vote.duplicated for vote in votes)
    nbytes = {"bytes": sum(vote.nbytes for vote in votes)}
    return {**timings, **nbytes, **({"duplicated_bytes": duplicated} if duplicated else {})}


def _phases(votes: Sequence[Vote]) -> tuple[RankPhases, ...]:
    """Return each rank's share of the save; empty for one rank, or where nothing live was saved."""
    if len(votes) < 2 or not all(vote.host for vote in votes):
        return ()
    return tuple(RankPhases(vote.stage_seconds, vote.seconds, vote.nbytes, vote.host) for vote in votes)


def clear_failed(session: Session) -> None:
    """Remove, on rank 0 before an attempt, what earlier attempts of this run left, once no rank writes for them.

    This is for full disks, where the files of ranks that learn late of a failure take the space of this attempt. It
    takes no longer than the other ranks take to come to this attempt. The files of ranks that ended, or made no
    progress for ``timeout`` seconds, stay: then this attempt fails too, or has enough room. A disk that takes nothing
    for another reason is not waited for: raises its OSError.
    """
    storage = session.storage
    timeout = session.timeout
    own_votes = AttemptVotes(storage, session.attempt(session.counter))
    for entry in storage.list(STAGING) if storage.may_be_unmounted else ():
        number = session.counter_of(entry.name)
        if number is not None and number < session.counter:
            _show_work(own_votes)
            votes = AttemptVotes(storage, entry.name)
            ranks = session.topology.world_size
            if votes.await_votes(ranks, timeout, own_votes, session.is_leaving, session.is_gone):
                session.require()
                _clear(session, staging_dir(entry.name))
            else:
                timeout = 0.0  # a rank that is silent in one attempt is in all: they are looked at, not waited for


def _show_work(votes: AttemptVotes) -> None:
    try:
        votes.report_progress(0, effects.monotonic_ns())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def clean_up(session: Session, counter: int, *, is_saved: bool = False) -> None:
    """Remove what this run's attempts left, where no rank can still be writing.

    These are all attempts before ``counter`` once all ranks voted on ``counter``, and any on which all ranks voted;
    ``is_saved`` tells that ``counter`` is a visible tag. A failure is logged only: nobody waits for it, and the next
    job sweeps.
    """
    try:
        _clean_up(session, counter, is_saved)
    except (OSError, CheckpointError) as error:
        logger.warning("could not clean up %s: %s", session.storage.url, error)


def _clean_up(session: Session, counter: int, is_saved: bool) -> None:
    """Raise DirectoryInUse if another job took over a storage where it may be writing the same tags."""
    storage = session.storage
    world_size = session.topology.world_size
    if not storage.renames:
        session.require()
    everyone_is_past = is_saved or AttemptVotes(storage, session.attempt(counter)).all_voted(world_size)
    for entry in storage.list(STAGING):
        number = session.counter_of(entry.name)
        votes = AttemptVotes(storage, entry.name)
        if number is None:
            continue
        if (everyone_is_past and number <= counter) or votes.all_voted(world_size):
            # What was saved in place is complete: its intent need not be looked at again.
            if is_saved and number == counter and not storage.renames:
                _drop(session, staging_dir(entry.name), storage.remove)
            else:
                _clear(session, staging_dir(entry.name))
    if everyone_is_past:
        # Not those of ``counter`` itself: the other ranks may still have to read its verdict.
        for entry in storage.list(VOTES):
            number = session.counter_of(entry.name)
            if number is not None and number < counter:
                _drop(session, votes_dir(entry.name), storage.remove)
    journal.discard_trash(storage, session.run_id, session.confirm)


def _clear(session: Session, key: str) -> None:
    _drop(session, key, lambda key: journal.clear(session.storage, key, session.confirm))


def _drop(session: Session, key: str, drop: Callable[[str], object]) -> None:
    try:
        drop(key)
    except OSError as error:
        logger.warning("could not remove %s/%s: %s", session.storage.url, key, error)


def _unknown_where_replicas_differ(
    index_of: Callable[[int], tuple[bytes, str]],
    topology: Topology,
    votes: Sequence[Vote],
    parameters: Mapping[str, ParameterSpec],
) -> dict[str, ParameterSpec]:
    """Return parameters that seem replicated over tp but differ: their partition attributes were lost."""
    unknown: dict[str, ParameterSpec] = {}
    for ranks in tp_groups_that_differ(votes, topology):
        content: dict[str, set[tuple[int, ...]]] = {}
        for rank in ranks:
            for entry in load_index(*index_of(rank)).tensors:
                name = entry.name.removeprefix("model/")
                spec = parameters.get(name) if entry.name.startswith("model/") else None
                if spec is not None and spec.partition.replicated_over_tp:
                    content.setdefault(name, set()).add(entry.crc32)
        for name in (name for name, digests in content.items() if len(digests) > 1):
            spec = parameters[name]
            unknown[name] = replace(spec, partition=replace(spec.partition, known=False), explicit=False)
    if unknown:
        logger.warning(
            "these parameters carry no tensor-parallel attributes, but differ between tp ranks: %s. They load on the "
            "same topology only, until partitions= says how they are cut (attributes are lost when .to(device) "
            "replaces a parameter: set them again after it)",
            ", ".join(sorted(unknown)),
        )
    return unknown


def _read_index(storage: Storage, folder: str, topology: Topology, rank: int) -> tuple[bytes, str]:
    """The bytes of a rank's index file, and its name for errors."""
    key = f"{folder}/{names.index_file(topology.coordinates_of(rank))}"
    return storage.read(key), f"{storage.url}/{key}"


def retain(
    session: Session,
    publication: Publication,
    rules: Sequence[Rule],
    unread: Collection[str] = (),
    before: Sequence[TagInfo] | None = None,
) -> None:
    """Make surplus tags invisible, except ``unread`` ones. Never fails the save: the new tag is already safe.

    ``before`` are the tags that were there before it, if that is known.
    """
    storage = session.storage
    try:
        new = publication.tag
        there = list_tags(storage) if before is None else [*before, find_tag(storage, new)]
        tags = {info.tag: info for info in there if info is not None}
        judgement = judge_tags(storage, tags.values(), rules, whole=[new])
        for sentence in judgement.unknown_metrics:
            logger.warning("%s: this retention rule removes nothing. %s", storage.url, sentence)
        for sentence in judgement.damaged.values():
            logger.warning("%s. Retention does not count this tag, and keeps an older one in its place", sentence)
        for tag in judgement.retention.surplus:
            if tag not in (new, *unread):
                session.require()
                retire_unpinned(session, publication, tags[tag])
    except (OSError, CheckpointError) as error:
        logger.warning("retention in %s failed, the next save tries again: %s", storage.url, error)
