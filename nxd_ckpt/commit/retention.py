"""Which tags of a directory stay, by rules, pins, the metrics in the tags, and what no newer tag holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nxd_ckpt.commit.publication import Publication
from nxd_ckpt.commit.session import Session
from nxd_ckpt.coordination.pins import pinned
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.core.retention import BY_AGE, Best, Metrics, Retention, Rule, decide, unknown_metrics
from nxd_ckpt.core.tags import TagInfo, in_order, undated
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.directory import find_tag, is_checkpoint_of_ours_or_nxd


class Judgement(NamedTuple):
    """Which tags stay; and a sentence for each rule by a metric that no tag has, which therefore removes nothing."""

    retention: Retention
    unknown_metrics: Sequence[str]


def judged(storage: Storage, tags: Iterable[TagInfo], rules: Sequence[Rule]) -> Judgement:
    """Decide which of ``tags``, those of the directory, stay. Tags of neither ours nor NxD's are in neither list.

    The newest tag with a model stays while all newer ones lack one, and so does the newest with an optimizer. No rule
    that goes by age removes a tag of unknown age.

    Raises OSError or CheckpointError where it cannot be told.
    """
    ours = [info for info in tags if info.complete and is_checkpoint_of_ours_or_nxd(storage, info.tag)]
    # Only where they are asked for: reading a manifest of many parameters takes its time.
    asked = ours if any(isinstance(rule, Best) for rule in rules) else []
    metrics = {info.tag: _metrics(storage, info) for info in asked}
    retention = decide(ours, rules, metrics, pinned(storage))
    if retention.surplus:
        kept, surplus = dict(retention.kept), list(retention.surplus)
        reasons = dict[str, str]()
        for part, folder in (("a model", names.MODEL_DIR), ("an optimizer", names.OPTIMIZER_DIR)):
            having = (info.tag for info in reversed(in_order(ours)) if _has_files(storage, f"{info.tag}/{folder}"))
            reasons.setdefault(next(having, ""), f"the newest with {part}")
        if any(isinstance(rule, BY_AGE) for rule in rules):
            reasons.update({info.tag: "saved at an unknown time" for info in undated(ours)})
        for tag in reasons.keys() & set(surplus):
            surplus.remove(tag)
            kept[tag] = (reasons[tag],)
        order = [info.tag for info in in_order(ours)]
        retention = Retention({tag: kept[tag] for tag in order if tag in kept}, tuple(surplus))
    return Judgement(retention, unknown_metrics(rules, metrics))


def retire_unpinned(session: Session, publication: Publication, info: TagInfo) -> bool:
    """Make a tag invisible, unless it is pinned by the time at which that cannot be taken back, or another save than
    was judged: whether it is. (If this job stood still meanwhile, another may have taken over, and saved that tag.)"""
    storage = session.storage

    def stays(key: str) -> bool:
        now = find_tag(storage, key)
        is_same = now is not None and (now.order_time, now.marked) == (info.order_time, info.marked)
        return info.tag in pinned(storage) or not is_same

    return not stays(info.tag) and publication.retire(session, info.tag, stays)


def _has_files(storage: Storage, folder: str) -> bool:
    """True unless a part is absent, or its folder is empty."""
    return any(not entry.is_dir or _has_files(storage, f"{folder}/{entry.name}") for entry in storage.list(folder))


def _metrics(storage: Storage, info: TagInfo) -> Metrics:
    key = f"{info.tag}/{names.MANIFEST}"
    return load_manifest(storage.read(key), f"{storage.url}/{key}").metrics if info.ours else {}
