"""One save in several places, each of which may have lost or damaged files: which to load, and from where each file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry, Manifest, load_index
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.tags import Tag
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CheckpointError, CheckpointNotFound, PartLost, TagReplaced
from nxd_ckpt.storage.base import Replicated, Storage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.storage.wrapper import LayeredStorage
from nxd_ckpt.tag.choosing import choose
from nxd_ckpt.tag.identity import manifest_of
from nxd_ckpt.tag.range_reader import ReadPool
from nxd_ckpt.tag.verification import verify_file


class Substitute(NamedTuple):
    """Replacement for a file that the nearest place lost or damaged.

    ``place`` is the number of a place with the file as it was saved, None if there is none; ``why`` describes the
    damage.
    """

    place: int | None
    why: str


Check = Callable[[Storage, str, FileEntry, memoryview], str | None]
"""Returns the problem of a file in a storage, None if there is none; gets memory to read through."""


class SaveCopies(NamedTuple):
    """Numbers of the places that hold a save, nearest first, and of the one with the valid ``manifest``."""

    places: tuple[int, ...]
    manifest: int


def copies_of_save(storages: Sequence[Storage], place: int, tag: str) -> SaveCopies | None:
    """Find copies of the save that has the name ``tag`` at ``place``.

    A copy is at a later place, complete, and has a byte-equal manifest. If the nearest one's own manifest is damaged,
    the order time must be equal. None if it is no save of ours. A place that cannot be read does not count.
    """
    order_time = choose(storages[place], tag).order_time
    own = _manifest(storages[place], tag)
    places = [place]
    first = place
    manifest = own
    for other in range(place + 1, len(storages)):
        try:
            info = choose(storages[other], tag)
        except (CheckpointError, OSError):
            continue
        copied = _manifest(storages[other], tag) if info.order_time == order_time else None
        if copied is None or manifest not in (None, copied):
            continue
        places.append(other)
        first, manifest = (other, copied) if manifest is None else (first, manifest)
    return None if manifest is None else SaveCopies(tuple(places), first)


def survey(
    places: Sequence[Storage],
    tag: str,
    manifest: Manifest,
    ranks: Iterable[int],
    check: Check,
    without: Sequence[str] = (),
) -> dict[str, Substitute]:
    """Return, by key, the files of ``ranks`` that the first of ``places`` does not have as they were saved.

    All places hold the same save. Indexes are read and verified; ``check`` looks at the other files. Files that begin
    with one of ``without`` are left out, and so are those that no remaining index lists.
    """
    search = _Search(places, tag, manifest)
    check_index = changed if isinstance(check, ListingCheck) else check
    with ReadPool(max(place.concurrency for place in places)) as pool:
        for rank in ranks:
            for key, entry in search.files(rank, check_index):
                if not key.startswith(tuple(f"{tag}/{part}" for part in without)):
                    pool.submit(partial(search.find, check, key, entry))
        pool.wait_for(pool.submitted)
    return search.substitutes


def changed(storage: Storage, key: str, entry: FileEntry, memory: memoryview) -> str | None:
    """Return the problem of a file after reading all of it."""
    try:
        verify_file(storage, key, entry, memory, Counter())
    except (CheckpointError, OSError, EOFError) as error:
        return f"{error}"
    return None


def changed_everywhere(storage: Storage, key: str, entry: FileEntry, memory: memoryview) -> str | None:
    """Return the problem of a file if all its copies in the storage are bad; bad copies are distrusted from now on."""
    return _check_copies(storage, key, lambda copy: changed(copy, key, entry, memory))


def distrust_manifests(storage: Storage, tag: str) -> None:
    """Distrust bad copies of a manifest from now on."""
    key = f"{tag}/{names.MANIFEST}"
    _check_copies(storage, key, lambda copy: "it is damaged" if _manifest(copy, tag) is None else None)


def _check_copies(storage: Storage, key: str, check: Callable[[Storage], str | None]) -> str | None:
    if not isinstance(storage, Replicated):
        return check(storage)
    problems = {number: check(copy) for number, copy in storage.copies(key).items()}
    if None not in problems.values():
        return next(iter(problems.values()), f"{storage.url}/{key} is missing")
    for number, why in problems.items():
        if why is not None:
            logger.warning("%s/%s is read from another copy than that of host %d: %s", storage.url, key, number, why)
            storage.distrusted.add((key, number))
    return None


class ListingCheck:
    """Check whether a file is missing, by listings alone: one for each directory of each storage."""

    def __init__(self) -> None:
        self._listings: dict[tuple[int, str], set[str]] = {}
        self._lock = effects.Lock()

    def __call__(self, storage: Storage, key: str, entry: FileEntry, memory: memoryview) -> str | None:
        directory, _, name = key.rpartition("/")
        with self._lock:
            if (id(storage), directory) not in self._listings:
                self._listings[id(storage), directory] = _names(storage, directory)
            exists = name in self._listings[id(storage), directory]
        return None if exists else f"{storage.url}/{key} is missing"


def _names(storage: Storage, directory: str) -> set[str]:
    try:
        return {entry.name for entry in storage.list(directory) if not entry.is_dir}
    except (CheckpointError, OSError):
        return set()


def _manifest(storage: Storage, tag: str) -> bytes | None:
    """Return the manifest's bytes; None if it is damaged, or cannot be read."""
    try:
        manifest_of(storage, tag)
        return storage.read(f"{tag}/{names.MANIFEST}")
    except (CheckpointError, OSError):
        return None


class _Search:
    """Search for the nearest place with each file of a save; its result are the ``substitutes``."""

    def __init__(self, places: Sequence[Storage], tag: str, manifest: Manifest) -> None:
        self._places = places
        self._tag = tag
        self._manifest = manifest
        self.substitutes: dict[str, Substitute] = {}

    def files(self, rank: int, check: Check) -> Iterator[tuple[str, FileEntry]]:
        """Yield the files that this rank saved, by its index; none if no place has that."""
        line = self._manifest.ranks[rank]
        key = f"{self._tag}/{names.index_file(self._manifest.topology.coordinates_of(rank))}"
        self.find(check, key, line, memoryview(bytearray(line.nbytes)))
        place = self.substitutes[key].place if key in self.substitutes else 0
        if place is not None:
            storage = self._places[place]
            files = load_index(storage.read(key), f"{storage.url}/{key}").files
            yield from ((f"{self._tag}/{file}", entry) for file, entry in files.items())

    def find(self, check: Check, key: str, entry: FileEntry, memory: memoryview) -> None:
        """Add a substitute for the file unless the nearest place has it intact."""
        first = None
        for number, storage in enumerate(self._places):
            why = check(storage, key, entry, memory)
            if why is None:
                if first is not None:
                    self.substitutes[key] = Substitute(number, first)
                return
            first = first or why
        self.substitutes[key] = Substitute(None, first or "")


class TagCopy(NamedTuple):
    """A tag in one of several places, by the place's number: 0 is the nearest."""

    place: int
    tag: str


class TagSource(NamedTuple):
    """Places from which the files of a tag are read.

    Files come from the first of ``places`` (numbers), except the keys in ``elsewhere``, each with its position in
    ``places``. All places hold the save of this ``attempt``.
    """

    tag: str
    places: Sequence[int]
    elsewhere: Mapping[str, int] = {}
    attempt: str | None = None

    @property
    def copy(self) -> TagCopy:
        """The copy from which most files are read."""
        return TagCopy(self.places[0], self.tag)

    def open(self, storages: Sequence[Storage]) -> Storage:
        """Return the storage to read it through."""
        places = [storages[number] for number in self.places]
        return LayeredStorage(places, self.elsewhere) if self.elsewhere else places[0]


def choose_nearest(storages: Sequence[Storage], tag: Tag | None, without: Collection[TagCopy] = ()) -> TagSource:
    """Return the newest complete tag that is not in ``without``, or the newest of that name, in the nearest place.

    Copies of one save have the same order time, so the newest save counts before the nearest place. A place without
    such a tag is skipped, with a warning if it cannot be read. A tag that lost files which no later place has is
    skipped too.

    Raises what the nearest place raised if no place has it: CheckpointNotFound, CorruptCheckpoint, OSError. PartLost if
    that has lost files. TagReplaced if it is removed meanwhile.
    """
    lost: dict[TagCopy, PartLost] = {}
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


def _newest(storages: Sequence[Storage], tag: Tag | None, without: Collection[TagCopy]) -> TagCopy:
    candidates: list[tuple[float, TagCopy]] = []
    failed: list[Exception] = []
    for place, storage in enumerate(storages):
        try:
            info = choose(storage, tag, [copy.tag for copy in without if copy.place == place])
            candidates.append((info.order_time, TagCopy(place, info.tag)))
        except (CheckpointError, OSError) as error:
            failed.append(error)
            if len(storages) > 1 and not isinstance(error, FileNotFoundError):
                logger.warning("%s is passed over: %s: %s", storage.url, type(error).__name__, error)
    if not candidates:
        raise failed[0]
    return max(candidates, key=lambda candidate: (candidate[0], -candidate[1].place))[1]


def _complete_source(storages: Sequence[Storage], copy: TagCopy) -> TagSource:
    """Return a source with all files of a copy.

    A file that its storage lost comes from another place. Raises PartLost.
    """
    storage = storages[copy.place]
    single = TagSource(copy.tag, [copy.place])
    if not storage.may_lack_files:
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
) -> TagSource:
    """Return the source of all files: the nearest place, except for ``substitutes`` and the manifest."""
    elsewhere = {key: substitute.place for key, substitute in substitutes.items() if substitute.place is not None}
    if copies.manifest != copies.places[0]:
        elsewhere[f"{tag}/{names.MANIFEST}"] = copies.places.index(copies.manifest)
    return TagSource(tag, copies.places, elsewhere, attempt)


def warn_of_substitutes(places: Sequence[Storage], source: TagSource, substitutes: Mapping[str, Substitute]) -> None:
    """Warn, once, of files that are not read from the nearest of ``places``, and why."""
    if source.elsewhere:
        far = first_of(places[number].url for number in sorted({*source.elsewhere.values()}))
        whys = (substitutes[key].why if key in substitutes else f"{key} is damaged" for key in sorted(source.elsewhere))
        where = f"{places[0].url}/{source.tag}"
        logger.warning("%s lacks files of its save, which are read from %s: %s", where, far, first_of(whys))
