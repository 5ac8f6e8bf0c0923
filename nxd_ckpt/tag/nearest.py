"""Choice of the tag to load if several places, one nearer than the other, may have it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from nxd_ckpt.core import names
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, PartLost, TagReplaced
from nxd_ckpt.storage.base import Storage, may_lack_files
from nxd_ckpt.storage.wrapper import LayeredStorage
from nxd_ckpt.tag.choosing import choose
from nxd_ckpt.tag.union import ListingCheck, SaveCopies, Substitute, copies_of_save, manifest_of, survey

logger = logging.getLogger("nxd_ckpt")


class Copy(NamedTuple):
    """A tag in one of several places, by the place's number: 0 is the nearest."""

    place: int
    tag: str


class Source(NamedTuple):
    """Places from which the files of a tag are read.

    Files come from the first of ``places`` (numbers), except the keys in ``elsewhere``, each with its position in
    ``places``. All places hold the save of this ``attempt``.
    """

    tag: str
    places: Sequence[int]
    elsewhere: Mapping[str, int] = {}
    attempt: str | None = None

    @property
    def copy(self) -> Copy:
        """The copy from which most files are read."""
        return Copy(self.places[0], self.tag)

    def open(self, storages: Sequence[Storage]) -> Storage:
        """Return the storage to read it through."""
        places = [storages[number] for number in self.places]
        return LayeredStorage(places, self.elsewhere) if self.elsewhere else places[0]


def choose_nearest(storages: Sequence[Storage], tag: Tag | None, without: Collection[Copy] = ()) -> Source:
    """Return the newest complete tag that is not in ``without``, or the newest of that name, in the nearest place.

    Copies of one save have the same order time, so the newest save counts before the nearest place. A place without
    such a tag is skipped, with a warning if it cannot be read. A tag that lost files which no later place has is
    skipped too.

    Raises what the nearest place raised if no place has it: CheckpointNotFound, CorruptCheckpoint, OSError. PartLost if
    that has lost files. TagReplaced if it is removed meanwhile.
    """
    lost: dict[Copy, PartLost] = {}
    while True:
        try:
            copy = _newest(storages, tag, {*without, *lost})
        except (CheckpointError, OSError):
            if lost:
                raise next(iter(lost.values())) from None
            raise
        if copy in lost:  # it was named
            raise lost[copy]
        try:
            return _complete_source(storages, copy)
        except PartLost as error:
            logger.warning("%s/%s is passed over: %s", storages[copy.place].url, copy.tag, error)
            lost[copy] = error
        except CheckpointNotFound as error:
            where = f"{storages[copy.place].url}/{copy.tag}"
            raise TagReplaced(f"{where} was removed since it was looked up; read it again, or another tag") from error


def _newest(storages: Sequence[Storage], tag: Tag | None, without: Collection[Copy]) -> Copy:
    candidates: list[tuple[float, Copy]] = []
    failed: list[Exception] = []
    for place, storage in enumerate(storages):
        try:
            info = choose(storage, tag, [copy.tag for copy in without if copy.place == place])
            candidates.append((info.order_time, Copy(place, info.tag)))
        except (CheckpointError, OSError) as error:
            failed.append(error)
            if len(storages) > 1 and not isinstance(error, FileNotFoundError):
                logger.warning("%s is passed over: %s: %s", storage.url, type(error).__name__, error)
    if not candidates:
        raise failed[0]
    return max(candidates, key=lambda candidate: (candidate[0], -candidate[1].place))[1]


def _complete_source(storages: Sequence[Storage], copy: Copy) -> Source:
    """Return a source with all files of a copy.

    A file that its storage lost comes from another place. Raises PartLost.
    """
    storage, single = storages[copy.place], Source(copy.tag, [copy.place])
    if not may_lack_files(storage):
        return single
    copies = copies_of_save(storages, copy.place, copy.tag)
    if copies is None:  # NxD's; or damage, which opening it names
        return single
    places = [storages[number] for number in copies.places]
    manifest = manifest_of(storages[copies.manifest], copy.tag)
    substitutes = survey(places, copy.tag, manifest, range(len(manifest.ranks)), ListingCheck())
    source = source_with_substitutes(copies, copy.tag, manifest.attempt, substitutes)
    gone = sorted(key for key, substitute in substitutes.items() if substitute.place is None)
    if gone:
        raise PartLost(f"{storage.url} lost files of {copy.tag!r}, and no other place has them: {first_of(gone)}")
    warn_of_substitutes(places, source, substitutes)
    return source


def source_with_substitutes(
    copies: SaveCopies, tag: str, attempt: str, substitutes: Mapping[str, Substitute]
) -> Source:
    """Return the source of all files: the nearest place, except for ``substitutes`` and the manifest."""
    elsewhere = {key: substitute.place for key, substitute in substitutes.items() if substitute.place is not None}
    if copies.manifest != copies.places[0]:
        elsewhere[f"{tag}/{names.MANIFEST}"] = copies.places.index(copies.manifest)
    return Source(tag, copies.places, elsewhere, attempt)


def warn_of_substitutes(places: Sequence[Storage], source: Source, substitutes: Mapping[str, Substitute]) -> None:
    """Warn, once, of files that are not read from the nearest of ``places``, and why."""
    if source.elsewhere:
        far = first_of(places[number].url for number in sorted({*source.elsewhere.values()}))
        whys = (substitutes[key].why if key in substitutes else f"{key} is damaged" for key in sorted(source.elsewhere))
        where = f"{places[0].url}/{source.tag}"
        logger.warning("%s lacks files of its save, which are read from %s: %s", where, far, first_of(whys))
