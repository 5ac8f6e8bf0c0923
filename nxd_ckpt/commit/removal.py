"""Removal of tags on request, outside of a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nxd_ckpt.commit.publication import publication_of
from nxd_ckpt.commit.retention import retire_unpinned
from nxd_ckpt.commit.session import Session
from nxd_ckpt.coordination import journal
from nxd_ckpt.coordination.control_files import pinned, unpin
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.tag.choosing import settle_swap
from nxd_ckpt.tag.directory import describe_incomplete, find_tag, list_tags, may_be_replaced


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
    pins, refused = pinned(storage), {}
    for tag in tags:
        if find_tag(storage, tag) is None:
            names = [info.tag for info in list_tags(storage)]
            refused[tag] = f"{storage.url}: no tag {listed([tag], names)}; {describe_incomplete(storage)}"
        elif not may_be_replaced(storage, tag):
            refused[tag] = f"{storage.url}/{tag} holds more than a checkpoint: remove it by other means"
        elif tag in pins and not with_pinned:
            refused[tag] = f"{storage.url}/{tag} is pinned: unpin it, or pass pinned=True"
    return Removed(() if refused else tuple(dict.fromkeys(tags)), refused)


def remove_tags(session: Session, tags: Sequence[str], with_pinned: bool) -> Removed:
    """Remove ``tags``, all or none of them; see `plan_removal`. One that is pinned, or saved again, meanwhile stays.

    Raises DirectoryInUse where another job took the directory over.
    """
    storage, plan = session.storage, plan_removal(session.storage, tags, with_pinned)
    removed, refused = [], dict(plan.refused)
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
