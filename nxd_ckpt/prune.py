"""Removing tags by rules outside of a save, and pinning tags that no rule removes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from typing_extensions import Unpack

from nxd_ckpt.commit import retention
from nxd_ckpt.commit.publication import publication_of
from nxd_ckpt.commit.session import open_session
from nxd_ckpt.coordination import control_files, intents, journal
from nxd_ckpt.coordination.agreement import SingleProcessAgreement
from nxd_ckpt.core.option_classes import takes
from nxd_ckpt.core.retention import Retention, Rule, rules_of
from nxd_ckpt.core.tags import Tag, TagInfo, validate_tag
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidArgument,
    as_checkpoint_errors,
)
from nxd_ckpt.keywords import PruneKeywords
from nxd_ckpt.options.tags import PruneOptions
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import StorageOptions, StrPath, open_storage
from nxd_ckpt.tag.choosing import choose_tag, settled_tags
from nxd_ckpt.tag.directory import require_directory
from nxd_ckpt.tag.opening import open_complete_tag

__all__ = ["Pruned", "pin_checkpoint", "prune_checkpoints", "unpin_checkpoint"]


@dataclass(frozen=True)
class Pruned:
    """Result of `prune_checkpoints`, or with ``dry_run`` the result that it would have; tags are oldest first.

    ``kept`` has the rules that keep each tag.
    """

    directory: str
    kept: Mapping[str, tuple[str, ...]]
    removed: tuple[str, ...]


@as_checkpoint_errors()
@takes(PruneOptions)
def prune_checkpoints(path: StrPath, retain: Sequence[Rule], **options: Unpack[PruneKeywords]) -> Pruned:
    """Remove the complete tags that no rule keeps, except those that are pinned, and the newest.

    It takes the directory's lease, like a job that saves. Other directories and incomplete tags are left alone.

    Args:
        path: the checkpoint directory or URL.
        retain: rules such as ``[Last(3), Every(1000), Best("loss", 3), Within(hours=2)]``.

    Raises:
        CheckpointNotFound: no such directory.
        CorruptCheckpoint: no tag that would stay can be opened; nothing was removed.
        DirectoryInUse: a live job saves there.
        InvalidArgument: there are no rules, or one by a metric that no tag has; nothing was removed.
    """
    chosen, rules = PruneOptions(**options), rules_of(None, retain)
    if rules is None:
        raise InvalidArgument("prune_checkpoints() needs rules, such as [Last(3)]: without them all tags stay")
    storage = open_storage(path, storage_options=chosen.storage_options)
    require_directory(storage)
    if chosen.dry_run:
        judged = _judge(storage, settled_tags(storage), rules)
    else:
        with closing(open_session(storage, Topology(), SingleProcessAgreement(), None, chosen.timeout)) as session:
            tags = {info.tag: info for info in settled_tags(storage)}
            judged = _judge(storage, tags.values(), rules)
            removed = []
            for tag in judged.surplus:
                session.require()
                if retention.retire_unpinned(session, publication_of(session, 1, tag, None), tags[tag]):
                    removed.append(tag)
            if len(removed) < len(judged.surplus):
                kept = retention.judge_tags(storage, settled_tags(storage), rules).retention.kept
                judged = Retention(kept, tuple(removed))
            journal.discard_trash(storage, session.run_id, session.confirm)
    return Pruned(storage.url, judged.kept, judged.surplus)


@as_checkpoint_errors()
def pin_checkpoint(path: StrPath, tag: Tag, *, storage_options: StorageOptions | None = None) -> None:
    """Keep a complete tag whatever rules say, until `unpin_checkpoint`. A live job may save there meanwhile.

    Raises:
        CheckpointNotFound: no such tag, or it is incomplete; or it is removed meanwhile, or about to be.
    """
    storage = open_storage(path, storage_options=storage_options)
    chosen = choose_tag(storage, tag)
    control_files.pin(storage, chosen)
    try:
        choose_tag(storage, chosen)  # rules that were being applied may have removed it before they saw the pin
        if intents.is_being_removed(storage, chosen):
            raise CheckpointNotFound(
                f"{storage.url}/{chosen} is being removed by the rules of a job, or was when that job ended, and is "
                "not pinned; if it stays, pin it again once a job has saved there"
            )
    except CheckpointNotFound:
        if not intents.saves_of(storage, chosen):  # else it is only being replaced
            control_files.unpin(storage, chosen)
            raise


@as_checkpoint_errors()
def unpin_checkpoint(path: StrPath, tag: Tag, *, storage_options: StorageOptions | None = None) -> bool:
    """Let rules remove a tag again; return whether it was pinned. The tag itself may be gone."""
    storage = open_storage(path, storage_options=storage_options)
    require_directory(storage)
    return control_files.unpin(storage, validate_tag(tag))


def _judge(storage: Storage, tags: Iterable[TagInfo], rules: Sequence[Rule]) -> Retention:
    """Apply the rules. Raises CorruptCheckpoint if nothing would be left that loads, and InvalidArgument."""
    judged, unknown = retention.judge_tags(storage, tags, rules)
    if unknown:
        raise InvalidArgument(f"{storage.url}: {'; '.join(unknown)}. Nothing was removed")
    if judged.surplus and not any(_opens(storage, tag) for tag in reversed(list(judged.kept))):
        raise CorruptCheckpoint(
            f"{storage.url}: none of the tags that would stay ({', '.join(judged.kept)}) can be opened; nothing was "
            "removed. Verify the others, and keep one that is good by pinning it"
        )
    return judged


def _opens(storage: Storage, tag: str) -> bool:
    try:
        open_complete_tag(storage, tag)
    except CheckpointError:
        return False
    return True
