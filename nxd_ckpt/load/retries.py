"""What a load does about a tag that it could not read: another place may have its files, or there is another tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nxd_ckpt.coordination.agreement import Agreement, decided_by_rank0, on_all
from nxd_ckpt.core import names
from nxd_ckpt.errors import CheckpointNotFound, CorruptCheckpoint, PartLost, PeerTimeout, TagReplaced
from nxd_ckpt.load.options import LoadOptions
from nxd_ckpt.load.overwriting import PARTLY
from nxd_ckpt.storage.base import Replicated, Storage
from nxd_ckpt.tag.nearest import Copy, Source, source_with_substitutes, warn_of_substitutes
from nxd_ckpt.tag.union import (
    SaveCopies,
    Substitute,
    changed_everywhere,
    copies_of_save,
    distrust_manifests,
    manifest_of,
    survey,
)

Doubts = Sequence[tuple[str, int]]
"""What is ``distrusted``, see :class:`~nxd_ckpt.storage.base.Replicated`."""


class LoadRetries:
    """The tries of one load, the same on all ranks. ``number`` is how many failed that others follow.

    ``unnamed``: any tag will do. ``damaged`` is what was wrong with copies that no file of another place helped.
    """

    def __init__(
        self,
        storages: Sequence[Storage],
        agreement: Agreement,
        options: LoadOptions,
        unnamed: bool,
        with_optimizer: bool,
    ) -> None:
        self._storages, self._agreement, self._options = storages, agreement, options
        self._falls_back = unnamed and options.fallback
        self._with_optimizer = with_optimizer and not options.load_weights_only
        self._mended: dict[Copy, Source] = {}
        self._downloaded_anew: set[Copy] = set()
        self.damaged: dict[Copy, str] = {}

    @property
    def number(self) -> int:
        return len(self.damaged) + len(self._mended) + len(self._downloaded_anew)

    def source(self, chosen: Source) -> Source:
        """From where to read a copy that was chosen, after what was met in it."""
        return self._mended.get(chosen.copy, chosen)

    def failed(self, source: Source, error: Exception) -> None:
        """Return if there is something left to try; all ranks call it. Raises ``error`` if not."""
        if isinstance(error, TagReplaced):
            self._mended.clear()  # another save has the name
        has_others = len(self._storages) > 1 or _is_replicated(self._storages[0])
        if isinstance(error, (TagReplaced, PeerTimeout)) or not (self._falls_back or has_others):
            raise error
        found = _found(self._agreement, error, self._options.pre_download)
        copy = source.copy
        if self._falls_back and found.downloads and copy not in self._downloaded_anew:
            self._downloaded_anew.add(copy)  # a local copy may be what is damaged: it is gone now
            return
        mended = None if copy in self._mended else self._mend(source)
        if mended is not None:
            self._mended[copy] = mended
        elif self._falls_back and found.is_damage:
            self.damaged[copy] = found.what
        else:
            raise error

    def _mend(self, source: Source) -> Source | None:
        """Each file from the nearest place that has it as it was saved, which every rank finds out for a share of all.
        Where a place has copies of a file, none is read any more that is not good.

        None where the save is in no other place, or none has what is wrong in the nearest.
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
        held = SaveCopies(*decided)
        places, known_by = [self._storages[number] for number in held.places], self._storages[held.manifest]

        def own_share() -> tuple[dict[str, Substitute], Doubts]:
            manifest = manifest_of(known_by, tag)
            ranks = range(agreement.rank, len(manifest.ranks), agreement.world_size)
            without = () if self._with_optimizer else (f"{names.OPTIMIZER_DIR}/",)
            found = survey(places, tag, manifest, ranks, changed_everywhere, without)
            return found, sorted(_distrusted(nearest))

        words = agreement.gather(on_all(agreement, own_share))

        def of_all() -> tuple[Source, Doubts] | None:
            found = {key: Substitute(*taken) for word, _ in words or () for key, taken in word.items()}
            distrusted = sorted({(key, number) for _, doubts in words or () for key, number in doubts})
            whole = source_with_substitutes(held, tag, manifest_of(known_by, tag).attempt, found)
            if whole.elsewhere == source.elsewhere and {*distrusted} == before:
                return None
            warn_of_substitutes(places, whole, found)
            return whole, distrusted

        mended = decided_by_rank0(agreement, of_all)
        if mended is None:
            return None
        _distrust(nearest, mended[1])
        return Source(*mended[0])


def _is_replicated(storage: Storage) -> bool:
    return isinstance(storage, Replicated) and storage.is_replicated


def _distrusted(storage: Storage) -> set[tuple[str, int]]:
    return {*storage.distrusted} if isinstance(storage, Replicated) else set()


def _distrust(storage: Storage, doubts: Doubts) -> None:
    if isinstance(storage, Replicated):
        storage.distrusted.update((key, number) for key, number in doubts)


class _Found(NamedTuple):
    """``what`` a rank met in a tag: damage, or else files that could not be read. Whether any rank ``downloads`` it."""

    what: str
    is_damage: bool
    downloads: bool


def _found(agreement: Agreement, error: Exception, downloads: bool) -> _Found:
    """What is wrong with a tag that no rank could load, as one of the ranks found it.

    Raises ``error`` where no rank found the tag to be the reason.
    """
    is_damage = isinstance(error, (CorruptCheckpoint, PartLost, EOFError))
    is_unreadable = isinstance(error, OSError) and not isinstance(error, CheckpointNotFound)
    word = str(error).removesuffix(f". {PARTLY}") if is_damage or is_unreadable else None
    words = agreement.gather([word, is_damage, downloads]) or []

    def worst() -> _Found | None:
        found = sorted(((what, damage) for what, damage, _ in words if what), key=lambda one: not one[1])
        return _Found(*found[0], any(downloads for *_, downloads in words)) if found else None

    decided = decided_by_rank0(agreement, worst)
    if decided is None:
        raise error
    return _Found(*decided)
