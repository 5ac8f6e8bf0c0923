"""Removing tags by rules outside of a save, or by name, and pinning tags that no rule removes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from typing_extensions import Unpack

from nxd_ckpt.commit import retention
from nxd_ckpt.commit.publication import publication_of
from nxd_ckpt.commit.retention import Removed
from nxd_ckpt.commit.session import Session, open_session_alone
from nxd_ckpt.coordination import control_files, journal
from nxd_ckpt.core.option_classes import options_of, takes
from nxd_ckpt.core.retention_rules import Rule, rules_of
from nxd_ckpt.core.tags import Tag, TagInfo, validate_tag
from nxd_ckpt.errors import CheckpointNotFound, InvalidArgument, as_checkpoint_errors
from nxd_ckpt.keywords import PruneKeywords
from nxd_ckpt.layouts.files import require_directory
from nxd_ckpt.options.checkpointer_options import DEFAULT_TIMEOUT
from nxd_ckpt.options.execution import PruneOptions
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.urls import StorageOptions, StrPath, open_storage
from nxd_ckpt.tag.choosing import choose_tag, name_of, settled_tags
from nxd_ckpt.tag.identity import Identity, of_latest
from nxd_ckpt.tag.verify import Reading, lost_files, read_whole

__all__ = ["Pruned", "Removed", "pin_checkpoint", "prune_checkpoints", "remove_alone", "unpin_checkpoint"]


@dataclass(frozen=True)
class Pruned:
    """Result of `prune_checkpoints`, or with ``dry_run`` the result that it would have; tags are oldest first.

    ``kept`` has the rules that keep each tag, and ``damaged`` a sentence for each of them that no rule counts.
    ``verified`` are the tags that stay of which all contents were read, and match their digests. ``unverified`` has a
    sentence for each tag that has contents without a digest, or that could not be opened: it counts, and tags may go
    in its favor. Of all others only names and sizes of files were compared.
    """

    directory: str
    kept: Mapping[str, tuple[str, ...]]
    removed: tuple[str, ...]
    damaged: Mapping[str, str] = field(default_factory=dict)
    verified: tuple[str, ...] = ()
    unverified: Mapping[str, str] = field(default_factory=dict)


@as_checkpoint_errors
@takes(PruneOptions)
def prune_checkpoints(path: StrPath, retain: Sequence[Rule] = (), **options: Unpack[PruneKeywords]) -> Pruned:
    """Remove the complete tags that no rule keeps, except those that are pinned, and the newest.

    Other directories and incomplete tags are left alone. Before anything is removed, the newest tag is read, and its
    digests are compared; a dry run reads it too. A tag that is damaged stays, but no rule counts it: then the next
    newest is read, and kept. Other tags that lost files, or have one of another size, are not counted either, and with
    ``verify`` those whose bytes changed. It takes the directory's lease, like a job that saves; not while it reads, but
    it takes it before for a moment, to be refused at once if a job saves there.

    Args:
        path: the checkpoint directory or URL.
        retain: rules such as ``[Last(3), Every(1000), Best("loss", 3), Within(hours=2)]``.

    Raises:
        CheckpointNotFound: no such directory.
        DirectoryInUse: a live job saves there.
        InvalidArgument: there are no rules, or one by a metric that no tag has. Nothing was removed.
    """
    chosen = options_of(PruneOptions, options)
    rules = rules_of(None, retain)
    if not rules:
        raise InvalidArgument("prune_checkpoints() needs rules, such as [Last(3)]: without them all tags stay")
    storage = open_storage(path, storage_options=chosen.storage_options)
    require_directory(storage)
    judge = _Judge(storage, rules, chosen)

    def leased() -> closing[Session]:
        return closing(open_session_alone(storage, chosen.timeout))

    if chosen.dry_run:
        judged = judge.judge_latest()
        return judge.result(judged.retention.kept, judged.retention.surplus, judged.damaged)
    if chosen.verify is not False:
        with leased():
            pass  # a directory in use is refused before tags of any size are read
        judge.judge_latest()  # reading takes its time: under the lease only what is new is read
    with leased() as session:
        tags = {info.tag: info for info in settled_tags(storage)}
        judged = judge(tags.values())
        surplus = judged.retention.surplus
        kept = judged.retention.kept
        removed = []
        for tag in surplus:
            session.require()
            if retention.retire_unpinned(session, publication_of(session, 1, tag, None), tags[tag]):
                removed.append(tag)
        if len(removed) < len(surplus):
            kept = judge(settled_tags(storage)).retention.kept
        journal.discard_trash(storage, session.run_id, session.confirm)
    return judge.result(kept, tuple(removed), judged.damaged)


@as_checkpoint_errors
@takes()
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
        if journal.is_being_removed(storage, chosen):
            raise CheckpointNotFound(
                f"{storage.url}/{chosen} is being removed by the rules of a job, or was when that job ended, and is "
                "not pinned; if it stays, pin it again once a job has saved there"
            )
    except CheckpointNotFound:
        if not journal.saves_of(storage, chosen):  # else it is only being replaced
            control_files.unpin(storage, chosen)
            raise


@as_checkpoint_errors
@takes()
def unpin_checkpoint(path: StrPath, tag: Tag, *, storage_options: StorageOptions | None = None) -> bool:
    """Let rules remove a tag again; return whether it was pinned. The tag itself may be gone."""
    storage = open_storage(path, storage_options=storage_options)
    require_directory(storage)
    return control_files.unpin(storage, validate_tag(tag))


@as_checkpoint_errors
@takes()
def remove_alone(
    path: StrPath,
    tags: Sequence[Tag],
    *,
    pinned: bool = False,
    dry_run: bool = False,
    storage_options: StorageOptions | None = None,
) -> Removed:
    """Remove tags as `nxd_ckpt.remove_checkpoint` does, from a process that does not save to the directory.

    Raises:
        DirectoryInUse: a live job saves there.
    """
    storage = open_storage(path, storage_options=storage_options)
    names = [name_of(storage, tag) for tag in tags]
    if dry_run:
        return retention.plan_removal(storage, names, pinned)
    session = open_session_alone(storage, DEFAULT_TIMEOUT)
    try:
        return retention.remove_tags(session, names, pinned)
    finally:
        session.close(clean=True)


class _Judge:
    """The rules, and the damage of tags; each save is read once."""

    def __init__(self, storage: Storage, rules: Sequence[Rule], chosen: PruneOptions) -> None:
        self._storage = storage
        self._rules = rules
        self._progress = chosen.progress
        self._read: dict[str, tuple[str | None, Reading]] = {}
        self._reads_all = chosen.verify is True
        self._damage_of = self._changed if chosen.verify else lost_files
        self._damage_of_newest = self._changed if chosen.verify is None else None

    def result(
        self, kept: Mapping[str, tuple[str, ...]], removed: tuple[str, ...], damaged: Mapping[str, str]
    ) -> Pruned:
        """Return the result, with the tags among ``kept`` that were read, in their order."""
        whole = {tag: reading.doubt for tag in kept if (reading := self._reading(tag)) and reading.damage is None}
        doubts = {tag: doubt for tag, doubt in whole.items() if doubt is not None}
        verified = tuple(tag for tag in whole if tag not in doubts)
        return Pruned(self._storage.url, kept, removed, damaged, verified, doubts)

    def judge_latest(self) -> retention.Judgement:
        """Apply the rules to the tags that are there; again if a live job removes or replaces one that is read."""
        return of_latest(True, lambda: self(settled_tags(self._storage)))

    def __call__(self, tags: Iterable[TagInfo]) -> retention.Judgement:
        """Apply the rules. Raises InvalidArgument for a rule by a metric that no tag has."""
        storage = self._storage
        judged = retention.judge_tags(
            storage,
            tags,
            self._rules,
            self._damage_of,
            damage_of_newest=self._damage_of_newest,
            asks_of_all=self._reads_all,
        )
        if judged.unknown_metrics:
            raise InvalidArgument(f"{storage.url}: {'; '.join(judged.unknown_metrics)}. Nothing was removed")
        return judged

    def _changed(self, storage: Storage, tag: str) -> str | None:
        reading = self._reading(tag)
        if reading is None:
            fingerprint = Identity(storage, tag).fingerprint
            reading = read_whole(storage, tag, self._progress)
            self._read[tag] = fingerprint, reading
        return reading.damage

    def _reading(self, tag: str) -> Reading | None:
        """Return the reading of the save that has this name now."""
        fingerprint, reading = self._read.get(tag, (None, None))
        is_same = reading is not None and fingerprint == Identity(self._storage, tag).fingerprint
        return reading if is_same else None
