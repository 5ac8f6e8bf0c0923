"""Retries of a load whose tag could not be read: from another place with its files, or with another tag."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.core import names
from nxd_ckpt.errors import (
    CheckpointError,
    CheckpointNotFound,
    CorruptCheckpoint,
    PartLost,
    PeerTimeout,
    TagReplaced,
    UnreadableFormat,
)
from nxd_ckpt.loading.options import LoadRequest
from nxd_ckpt.loading.overwriting import PARTLY
from nxd_ckpt.storage.base import Replicated, Storage
from nxd_ckpt.tag.identity import Identity, manifest_of, note_damage
from nxd_ckpt.tag.union import (
    SaveCopies,
    Substitute,
    TagCopy,
    TagSource,
    changed_everywhere,
    copies_of_save,
    distrust_manifests,
    source_with_substitutes,
    survey,
    warn_of_substitutes,
)

_UNFIT = (CorruptCheckpoint, PartLost, EOFError)
"""Errors of a tag that a load may pass over. Except for UnreadableFormat they mean damage."""

Doubts = Sequence[tuple[str, int]]
"""Copies that are ``distrusted``, see `nxd_ckpt.storage.base.Replicated`."""


class LoadRetries:
    """The tries of one load, the same on all ranks. ``number`` counts failures that were followed by another try.

    ``unnamed``: any tag may be loaded. ``unfit`` says why copies are passed over that files of other places could not
    repair.
    """

    def __init__(self, storages: Sequence[Storage], request: LoadRequest, unnamed: bool) -> None:
        self._storages = storages
        self._agreement = request.agreement
        self._options = request.options
        self._falls_back = unnamed and self._options.fallback
        self._may_fall_back = unnamed and not self._falls_back
        self._with_optimizer = request.optimizer is not None and not self._options.loads_weights_only
        self._repaired: dict[TagCopy, TagSource] = {}
        self._downloaded_again: set[TagCopy] = set()
        self.unfit: dict[TagCopy, str] = {}

    @property
    def number(self) -> int:
        return len(self.unfit) + len(self._repaired) + len(self._downloaded_again)

    def source(self, chosen: TagSource) -> TagSource:
        """Return the source of a chosen copy, after earlier failures."""
        return self._repaired.get(chosen.copy, chosen)

    @property
    def skipped(self) -> str:
        """The tags that were passed over, each with the reason."""
        return "; ".join(f"{copy.tag!r} {why}" for copy, why in self.unfit.items())

    def failed(self, source: TagSource, error: Exception) -> None:
        """Return if there is something left to try, else raise ``error``, which names the remedy. Collective."""
        try:
            self._failed(source, error)
        except CheckpointError as last:
            if self.unfit:
                last.args = (f"{last}. {source.copy.tag!r} is tried, because {self.skipped}",)
            raise

    def _failed(self, source: TagSource, error: Exception) -> None:
        # Not if it may only be that of a downloaded copy, or of one of several copies.
        is_single = not (self._options.pre_download or _is_replicated(self._storages[source.copy.place]))
        if is_single and _is_damage(error):
            self._note_damage(source.copy, _report_of(error))
        if self._may_fall_back and isinstance(error, (CorruptCheckpoint, PartLost)):
            error.args = (f"{error}. With fallback=True the newest undamaged checkpoint is loaded in its place",)
        if isinstance(error, TagReplaced):
            self._repaired.clear()  # another save has the name
        has_others = len(self._storages) > 1 or _is_replicated(self._storages[0])
        if isinstance(error, (TagReplaced, PeerTimeout)) or not (self._falls_back or has_others):
            raise error
        failure = _common_failure(self._agreement, error, self._options.pre_download)
        copy = source.copy
        if self._falls_back and failure.downloads and copy not in self._downloaded_again:
            self._downloaded_again.add(copy)  # a local copy may be what is damaged: it is gone now
            return
        repaired = None if copy in self._repaired else self._repair(source)
        if repaired is not None:
            self._repaired[copy] = repaired
        elif self._falls_back and (failure.is_damage or failure.is_unreadable):
            self.unfit[copy] = f"{'is damaged' if failure.is_damage else 'is passed over'} ({failure.what})"
            if failure.is_damage:
                self._note_damage(copy, failure.what)
        else:
            raise error

    def _note_damage(self, copy: TagCopy, why: str) -> None:
        """Tell retention, which is rank 0's, of damage that any rank found."""
        if self._agreement.rank == 0:
            with suppress(OSError, CheckpointError):  # then it is not complete, or not there
                storage = self._storages[copy.place]
                note_damage(storage, Identity(storage, copy.tag), why)

    def _repair(self, source: TagSource) -> TagSource | None:
        """Return a source that reads each file from the nearest place with an intact copy; each rank checks a share.

        If a place has several copies of a file, bad ones are not read any more. None if the save is in no other place,
        or no place has the damaged files.
        """
        (place, tag), agreement = source.copy, self._agreement
        nearest = self._storages[place]
        before = _distrusted(nearest)

        def find() -> tuple[SaveCopies | None, Doubts]:
            distrust_manifests(nearest, tag)
            return copies_of_save(self._storages, place, tag), sorted(_distrusted(nearest))

        decided, of_manifests = decided_by_rank0(agreement, find)
        if decided is None or (len(decided[0]) == 1 and not _is_replicated(nearest)):
            return None
        _distrust(nearest, of_manifests)
        copies = SaveCopies(*decided)
        places = [self._storages[number] for number in copies.places]
        reference = self._storages[copies.manifest]

        def own_share() -> tuple[dict[str, Substitute], Doubts]:
            manifest = manifest_of(reference, tag)
            ranks = range(agreement.rank, len(manifest.ranks), agreement.world_size)
            without = () if self._with_optimizer else (f"{names.OPTIMIZER_DIR}/",)
            substitutes = survey(places, tag, manifest, ranks, changed_everywhere, without)
            return substitutes, sorted(_distrusted(nearest))

        gathered = agreement.gather(on_all(agreement, own_share))

        def of_all() -> tuple[TagSource, Doubts] | None:
            substitutes = {key: Substitute(*fields) for own, _ in gathered or () for key, fields in own.items()}
            distrusted = sorted({(key, number) for _, doubts in gathered or () for key, number in doubts})
            whole = source_with_substitutes(copies, tag, manifest_of(reference, tag).attempt, substitutes)
            if whole.elsewhere == source.elsewhere and {*distrusted} == before:
                return None
            warn_of_substitutes(places, whole, substitutes)
            return whole, distrusted

        repaired = decided_by_rank0(agreement, of_all)
        if repaired is None:
            return None
        _distrust(nearest, repaired[1])
        return TagSource(*repaired[0])


def _is_replicated(storage: Storage) -> bool:
    return isinstance(storage, Replicated) and storage.is_replicated


def _distrusted(storage: Storage) -> set[tuple[str, int]]:
    return {*storage.distrusted} if isinstance(storage, Replicated) else set()


def _distrust(storage: Storage, doubts: Doubts) -> None:
    if isinstance(storage, Replicated):
        storage.distrusted.update((key, number) for key, number in doubts)


class _Failure(NamedTuple):
    """Failure of a rank: damage, a format of another version, or files that could not be read.

    ``downloads`` is True if any rank downloads.
    """

    what: str
    is_damage: bool
    is_unreadable: bool
    downloads: bool


def _is_damage(error: BaseException) -> bool:
    return isinstance(error, _UNFIT) and not isinstance(error, UnreadableFormat)


def _report_of(error: Exception) -> str:
    """Return the words of an error on the tag, without what became of the live state."""
    return str(error).removesuffix(f". {PARTLY}")


def _common_failure(agreement: Agreement, error: Exception, downloads: bool) -> _Failure:
    """Return why no rank could load a tag, as one of the ranks reported it.

    Raises ``error`` if no rank found the tag to be the reason.
    """
    is_system = isinstance(error, OSError) and not isinstance(error, CheckpointNotFound)
    report = _report_of(error) if isinstance(error, _UNFIT) or is_system else None
    gathered = agreement.gather([report, _is_damage(error), isinstance(error, UnreadableFormat), downloads]) or []

    def worst() -> _Failure | None:
        reports = sorted((of_rank for of_rank in gathered if of_rank[0]), key=lambda report: report[1:3], reverse=True)
        if not reports:
            return None
        what, is_damage, is_unreadable, _ = reports[0]
        return _Failure(what, is_damage, is_unreadable, any(downloads for *_, downloads in gathered))

    decided = decided_by_rank0(agreement, worst)
    if decided is None:
        raise error
    return _Failure(*decided)
