"""Retention in a directory: rules, pins, metrics, the newest tag with a model or an optimizer; removal by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import NamedTuple, TypeAlias

from nxd_ckpt.commit.publication import Publication, publication_of
from nxd_ckpt.commit.session import Session
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import pinned, unpin
from nxd_ckpt.core import names
from nxd_ckpt.core.retention_rules import BY_AGE, Best, Metrics, Retention, Rule, decide, unknown_metrics
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.tags import TagInfo, in_order, undated
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, MalformedFile, UnreadableFormat
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.choosing import settle_swap
from nxd_ckpt.tag.directory import (
    describe_incomplete,
    find_tag,
    is_checkpoint_of_ours_or_nxd,
    list_tags,
    may_be_removed,
)
from nxd_ckpt.tag.identity import manifest_of
from nxd_ckpt.tag.listing import metrics_of
from nxd_ckpt.tag.range_reader import answers_of, in_parallel
from nxd_ckpt.tag.verify import lost_names

DamageOf: TypeAlias = Callable[[Storage, str], str | None]
"""Returns a sentence about the damage of a complete tag; None for an undamaged one."""


class Judgement(NamedTuple):
    """Tags to keep and to remove, and a sentence for each rule that removes nothing because no tag has its metric.

    ``damaged`` has a sentence for each of the kept tags that does not count, because it lost files.
    """

    retention: Retention
    unknown_metrics: Sequence[str]
    damaged: Mapping[str, str]


def judge_tags(
    storage: Storage,
    tags: Iterable[TagInfo],
    rules: Sequence[Rule],
    damage_of: DamageOf = lost_names,
    whole: Collection[str] = (),
    damage_of_newest: DamageOf | None = None,
    asks_of_all: bool = False,
) -> Judgement:
    """Decide which of ``tags``, all tags of the directory, stay.

    Tags of other programs than this and NxD are in neither list. The newest tag with a model stays while all newer ones
    lack one, and so does the newest with an optimizer. No rule about age removes a tag of unknown age. A tag that a
    rule keeps, but that ``damage_of`` says has lost files, stays too, and the rule keeps another one in its place. One
    that this version cannot read is not counted either, and never removed. With
    ``asks_of_all`` it is asked also about tags that stay for other reasons, such as a pin, if any tag may go. Tags that
    are known to be ``whole`` are not asked about. Before any tag may go, ``damage_of_newest`` is asked about those to
    resume from: the newest tag, the newest with a model, and the newest with an optimizer.

    Raises OSError or CheckpointError if this cannot be decided.
    """
    ours = _ours(storage, tags)
    # Only for a rule by metric: reading a manifest of many parameters takes its time.
    measured = ours if any(isinstance(rule, Best) for rule in rules) else []
    metrics = {info.tag: metrics_of(storage, info) for info in measured}
    examined = set(whole)
    read = set(whole)
    damaged: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    while True:
        counting = [info for info in ours if info.tag not in damaged and info.tag not in unreadable]
        retention, newest = _decide(storage, counting, rules, metrics)
        if not retention.surplus:
            break
        asked = {*retention.counted, *(retention.kept if asks_of_all else ())} - examined
        before = len(unreadable)
        losses = _damage(storage, asked, damage_of, unreadable)
        examined |= asked
        if not losses and damage_of_newest is not None:
            losses = _damage(storage, newest - read, damage_of_newest, unreadable)
            read |= newest
        if not losses and len(unreadable) == before:
            break
        damaged |= losses
    unreadable |= _unreadable(storage, retention.surplus)
    reasons = {**retention.kept, **{tag: (f"damaged, and not counted: {why}",) for tag, why in damaged.items()}}
    reasons |= {tag: (f"not counted: {why}",) for tag, why in unreadable.items()}
    kept = {info.tag: reasons[info.tag] for info in in_order(ours) if info.tag in reasons}
    going = (tag for tag in retention.surplus if tag not in unreadable)
    surplus = tuple(tag for tag in going if is_checkpoint_of_ours_or_nxd(storage, tag))
    return Judgement(replace(retention, kept=kept, surplus=surplus), unknown_metrics(rules, metrics), damaged)


def _damage(storage: Storage, tags: Iterable[str], damage_of: DamageOf, unreadable: dict[str, str]) -> dict[str, str]:
    """Return the damage of ``tags`` that have any. Those that this version cannot read go to ``unreadable``."""

    def look(tag: str) -> str | None:
        try:
            return damage_of(storage, tag)
        except UnreadableFormat as error:
            unreadable[tag] = str(error)
            return None

    names = sorted(tags)
    # Others read files of any size, so one tag at a time.
    sentences = in_parallel(storage, names, look) if damage_of is lost_names else map(look, names)
    return {tag: why for tag, why in zip(names, sentences, strict=True) if why is not None}


def _unreadable(storage: Storage, tags: Iterable[str]) -> dict[str, str]:
    """Return why this version cannot read tags, by name. They may be all that another version's job has."""
    unreadable: dict[str, str] = {}
    for tag in tags:
        try:
            manifest_of(storage, tag)
        except UnreadableFormat as error:
            unreadable[tag] = str(error)
        except (MalformedFile, FileNotFoundError):
            continue
    return unreadable


def _ours(storage: Storage, tags: Iterable[TagInfo]) -> list[TagInfo]:
    """Return the complete tags of this package and NxD, ours as their markers say: what may go is looked at again."""
    complete = [info for info in tags if info.complete]
    is_ours = in_parallel(
        storage, complete, lambda info: info.ours or is_checkpoint_of_ours_or_nxd(storage, info.tag)
    )
    return list(compress(complete, is_ours))


def _decide(
    storage: Storage, ours: Sequence[TagInfo], rules: Sequence[Rule], metrics: Mapping[str, Metrics]
) -> tuple[Retention, Set[str]]:
    """Return the retention, and the tags that a job would resume from; the latter only if there is a surplus."""
    retention = decide(ours, rules, metrics, pinned(storage))
    if not retention.surplus:
        return retention, set()
    newest_with: dict[str, str] = {}
    for part, folder in (("a model", names.MODEL_DIR), ("an optimizer", names.OPTIMIZER_DIR)):
        having = (info.tag for info in reversed(in_order(ours)) if _has_files(storage, f"{info.tag}/{folder}"))
        newest_with.setdefault(next(having, ""), f"the newest with {part}")
    reasons = dict(newest_with)
    if any(isinstance(rule, BY_AGE) for rule in rules):
        reasons.update({info.tag: "saved at an unknown time" for info in undated(ours)})
    stay = {tag: (reasons[tag],) for tag in retention.surplus if tag in reasons}
    newest = (newest_with.keys() - {""}) | {in_order(ours)[-1].tag}
    surplus = tuple(tag for tag in retention.surplus if tag not in stay)
    return Retention({**retention.kept, **stay}, surplus, retention.counted | newest), newest


def retire_unpinned(session: Session, publication: Publication, info: TagInfo) -> bool:
    """Make a tag invisible, unless it is pinned, or its name is another save's by now. True if it was removed.

    Both are checked at the last moment before the removal is final. (If this job stood still meanwhile, another may
    have taken over and saved a tag of that name.)
    """
    storage = session.storage

    def stays(key: str) -> bool:
        now, pins = answers_of(storage, partial(find_tag, storage, key), partial(pinned, storage))
        is_same = now is not None and (now.order_time, now.marked) == (info.order_time, info.marked)
        return info.tag in pins or not is_same

    return not stays(info.tag) and publication.retire(session, info.tag, stays, info.order_time)


def _has_files(storage: Storage, folder: str) -> bool:
    """True unless a part is absent, or its folder is empty."""
    return any(not entry.is_dir or _has_files(storage, f"{folder}/{entry.name}") for entry in storage.list(folder))


@dataclass(frozen=True)
class Removed:
    """Result of a removal, or with ``dry_run`` the result that it would have; true if tags are gone.

    Attributes:
        removed: names of the tags that are gone.
        refused: why a tag stays, by name; then all stay.
    """

    removed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.removed)


def plan_removal(storage: Storage, tags: Sequence[str], with_pinned: bool) -> Removed:
    """Decide whether ``tags`` may be removed: all or none of them.

    A tag may also be incomplete or damaged. What holds more than a checkpoint's files stays, and what is pinned, except
    ``with_pinned``.
    """
    settle_swap(storage)
    pins = pinned(storage)
    refused = {}
    for tag in tags:
        if find_tag(storage, tag) is None:
            names = [info.tag for info in list_tags(storage)]
            refused[tag] = f"{storage.url}: no tag {listed([tag], names)}; {describe_incomplete(storage)}"
        elif not may_be_removed(storage, tag):
            refused[tag] = f"{storage.url}/{tag} holds more than a checkpoint: remove it by other means"
        elif tag in pins and not with_pinned:
            refused[tag] = f"{storage.url}/{tag} is pinned: unpin it, or pass pinned=True"
    return Removed(() if refused else tuple(dict.fromkeys(tags)), refused)


def remove_tags(session: Session, tags: Sequence[str], with_pinned: bool) -> Removed:
    """Remove ``tags``, all or none of them; see `plan_removal`. One that is pinned, or saved again, meanwhile stays.

    Raises DirectoryInUse where another job took the directory over.
    """
    storage = session.storage
    plan = plan_removal(session.storage, tags, with_pinned)
    removed = []
    refused = dict(plan.refused)
    for tag in plan.removed:
        session.require()
        if with_pinned:
            unpin(storage, tag)  # first: a pinned tag that is being removed gets its name back
        info = find_tag(storage, tag)
        if info is not None and retire_unpinned(session, publication_of(session, session.counter, tag, None), info):
            removed.append(tag)
        else:
            refused[tag] = f"{storage.url}/{tag} was pinned, saved again or removed meanwhile"
    journal.discard_trash(storage, session.run_id, session.confirm)
    return Removed(tuple(removed), refused)


def remove_surplus(session: Session, saved: str | None = None) -> None:
    """Remove the tags in ``session.surplus``, except the one that was ``saved`` since. Those that stay are logged."""
    storage = session.storage
    while session.surplus:
        tag = session.surplus.popleft()
        try:
            if tag != saved and find_tag(storage, tag) is not None:
                for why in remove_tags(session, [tag], False).refused.values():
                    logger.warning("nxd_ckpt: not removed: %s", why)
        except (CheckpointError, OSError) as error:
            logger.warning("nxd_ckpt: %s/%s is not removed: %s", storage.url, tag, error)
