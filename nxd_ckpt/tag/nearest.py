"""Choosing the tag to load where several places, one nearer than the other, may have it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from nxd_ckpt.core import names
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, PartLost, TagReplaced
from nxd_ckpt.storage.base import Storage, may_lack_files
from nxd_ckpt.storage.layered import LayeredStorage
from nxd_ckpt.tag.choosing import choose
from nxd_ckpt.tag.union import Listed, SameSave, Taken, manifest_of, same_save, survey

logger = logging.getLogger("nxd_ckpt")


class Copy(NamedTuple):
    """A tag in one of several places, by the place's number: 0 is the nearest."""

    place: int
    tag: str


class Source(NamedTuple):
    """From where the files of a tag are read: from the first of ``places``, by number, but for those ``elsewhere``, by
    key: these from the one at that position in ``places``, all of which hold the save of this ``attempt``."""

    tag: str
    places: Sequence[int]
    elsewhere: Mapping[str, int] = {}
    attempt: str | None = None

    @property
    def copy(self) -> Copy:
        """The copy that most of it is read from."""
        return Copy(self.places[0], self.tag)

    def open(self, storages: Sequence[Storage]) -> Storage:
        """What it is read through."""
        places = [storages[number] for number in self.places]
        return LayeredStorage(places, self.elsewhere) if self.elsewhere else places[0]


def choose_nearest(storages: Sequence[Storage], tag: Tag | None, without: Collection[Copy] = ()) -> Source:
    """The newest complete tag that is not in ``without``, or the newest of the name that is asked for, where it is
    nearest.

    Copies of one save have the same order time, so the newest save counts before the nearest place. A place that has
    no such tag, or cannot be reached, is passed over, with a warning if it could not be asked. So is a tag that lost
    files which no place after it has either.

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
            return _whole(storages, copy)
        except PartLost as error:
            logger.warning("%s/%s is passed over: %s", storages[copy.place].url, copy.tag, error)
            lost[copy] = error
        except CheckpointNotFound as error:
            where = f"{storages[copy.place].url}/{copy.tag}"
            raise TagReplaced(f"{where} was removed since it was looked up; read it again, or another tag") from error


def _newest(storages: Sequence[Storage], tag: Tag | None, without: Collection[Copy]) -> Copy:
    found: list[tuple[float, Copy]] = []
    failed: list[Exception] = []
    for place, storage in enumerate(storages):
        try:
            info = choose(storage, tag, [copy.tag for copy in without if copy.place == place])
            found.append((info.order_time, Copy(place, info.tag)))
        except (CheckpointError, OSError) as error:
            failed.append(error)
            if len(storages) > 1 and not isinstance(error, FileNotFoundError):
                logger.warning("%s is passed over: %s: %s", storage.url, type(error).__name__, error)
    if not found:
        raise failed[0]
    return max(found, key=lambda one: (one[0], -one[1].place))[1]


def _whole(storages: Sequence[Storage], copy: Copy) -> Source:
    """All files of a copy, which are looked for where its storage may have lost some. Raises PartLost."""
    storage, alone = storages[copy.place], Source(copy.tag, [copy.place])
    if not may_lack_files(storage):
        return alone
    held = same_save(storages, copy.place, copy.tag)
    if held is None:  # NxD's; or damage, which opening it names
        return alone
    places = [storages[number] for number in held.places]
    manifest = manifest_of(storages[held.manifest], copy.tag)
    found = survey(places, copy.tag, manifest, range(len(manifest.ranks)), Listed())
    source = taken_from(held, copy.tag, manifest.attempt, found)
    gone = sorted(key for key, taken in found.items() if taken.place is None)
    if gone:
        raise PartLost(f"{storage.url} lost files of {copy.tag!r}, and no other place has them: {first_of(gone)}")
    say_taken(places, source, found)
    return source


def taken_from(held: SameSave, tag: str, attempt: str, found: Mapping[str, Taken]) -> Source:
    """Every file from the nearest place, but for those that are ``found`` to be elsewhere, and the manifest."""
    elsewhere = {key: taken.place for key, taken in found.items() if taken.place is not None}
    if held.manifest != held.places[0]:
        elsewhere[f"{tag}/{names.MANIFEST}"] = held.places.index(held.manifest)
    return Source(tag, held.places, elsewhere, attempt)


def say_taken(places: Sequence[Storage], source: Source, found: Mapping[str, Taken]) -> None:
    """Warn, once, of what is not read from the nearest of ``places``, and why."""
    if source.elsewhere:
        far = first_of(places[number].url for number in sorted({*source.elsewhere.values()}))
        whys = (found[key].why if key in found else f"{key} is damaged" for key in sorted(source.elsewhere))
        where = f"{places[0].url}/{source.tag}"
        logger.warning("%s lacks files of its save, which are read from %s: %s", where, far, first_of(whys))
