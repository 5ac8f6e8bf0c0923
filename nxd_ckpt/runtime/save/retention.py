"""What decides which tags of a directory stay: what is pinned there, and the metrics in the tags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.core.retention import Best, Metrics, Retention, Rule, decide
from nxd_ckpt.core.tags import TagInfo
from nxd_ckpt.layout import names
from nxd_ckpt.layout.directory import find_tag, is_checkpoint_of_ours_or_nxd
from nxd_ckpt.runtime.coordination.pins import pinned
from nxd_ckpt.runtime.save.publication import Publication
from nxd_ckpt.runtime.save.session import Session
from nxd_ckpt.storage.base import Storage


def judged(storage: Storage, tags: Iterable[TagInfo], rules: Sequence[Rule]) -> Retention:
    """Which of ``tags``, those of the directory, stay. What is no checkpoint of ours or NxD's is in neither list.

    Raises OSError or CheckpointError where it cannot be told.
    """
    ours = [info for info in tags if info.complete and is_checkpoint_of_ours_or_nxd(storage, info.tag)]
    # Only where they are asked for: reading a manifest of many parameters takes its time.
    asked = ours if any(isinstance(rule, Best) for rule in rules) else []
    return decide(ours, rules, {info.tag: _metrics(storage, info) for info in asked}, pinned(storage))


def retire_unpinned(session: Session, publication: Publication, info: TagInfo) -> bool:
    """Make a tag invisible, unless it is pinned by the time at which that cannot be taken back, or another save than
    was judged: whether it is. (If this job stood still meanwhile, another may have taken over, and saved that tag.)"""
    storage = session.storage

    def stays(key: str) -> bool:
        found = find_tag(storage, key)
        return info.tag in pinned(storage) or found is None or found.order_time != info.order_time

    return not stays(info.tag) and publication.retire(session, info.tag, stays)


def _metrics(storage: Storage, info: TagInfo) -> Metrics:
    key = f"{info.tag}/{names.MANIFEST}"
    return load_manifest(storage.read(key), f"{storage.url}/{key}").metrics if info.ours else {}
