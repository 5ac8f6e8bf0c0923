"""One save in several places, each of which may have lost or damaged files: the place from which to read each file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import FileEntry, Manifest, load_index, load_manifest
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.base import Replicated, Storage
from nxd_ckpt.storage.progress import Counter
from nxd_ckpt.tag.choosing import choose
from nxd_ckpt.tag.range_reader import ReadPool
from nxd_ckpt.tag.verification import verify_file

logger = logging.getLogger("nxd_ckpt")


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
    order_time, own = choose(storages[place], tag).order_time, _manifest(storages[place], tag)
    places, first, manifest = [place], place, own
    for other in range(place + 1, len(storages)):
        try:
            info = choose(storages[other], tag)
        except (CheckpointError, OSError):
            continue
        its = _manifest(storages[other], tag) if info.order_time == order_time else None
        if its is None or manifest not in (None, its):
            continue
        places.append(other)
        first, manifest = (other, its) if manifest is None else (first, manifest)
    return None if manifest is None else SaveCopies(tuple(places), first)


def manifest_of(storage: Storage, tag: str) -> Manifest:
    """Read the manifest of a tag. Raises MalformedFile, OSError."""
    key = f"{tag}/{names.MANIFEST}"
    return load_manifest(storage.read(key), f"{storage.url}/{key}")


def survey(
    places: Sequence[Storage],
    tag: str,
    manifest: Manifest,
    ranks: Iterable[int],
    check: Check,
    without: Sequence[str] = (),
) -> dict[str, Substitute]:
    """Return, by key, the files of ``ranks`` that the first of ``places`` does not have as they were saved.

    All places hold the same save. Indexes are read and verified; ``wrong`` checks the other files. Files that begin
    with one of ``without`` are left out, and so are those that no remaining index lists.
    """
    substitutes: dict[str, Substitute] = {}
    check_index = changed if isinstance(check, ListingCheck) else check
    with ReadPool(max(place.concurrency for place in places)) as pool:
        for rank in ranks:
            for key, entry in _files(places, tag, manifest, rank, substitutes, check_index):
                if not key.startswith(tuple(f"{tag}/{part}" for part in without)):
                    pool.submit(partial(_find_substitute, substitutes, places, key, entry, check))
        pool.wait_for(pool.submitted)
    return substitutes


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


def _files(
    places: Sequence[Storage], tag: str, manifest: Manifest, rank: int, substitutes: dict[str, Substitute], check: Check
) -> Iterator[tuple[str, FileEntry]]:
    """Yield the files that this rank saved, by its index; none if no place has that. Substitutes for it are added."""
    line = manifest.ranks[rank]
    key = f"{tag}/{names.index_file(manifest.topology.coordinates_of(rank))}"
    _find_substitute(
        substitutes, places, key, FileEntry(line.nbytes, line.crc32), check, memoryview(bytearray(line.nbytes))
    )
    place = substitutes[key].place if key in substitutes else 0
    if place is not None:
        files = load_index(places[place].read(key), f"{places[place].url}/{key}").files
        yield from ((f"{tag}/{file}", entry) for file, entry in files.items())


def _find_substitute(
    substitutes: dict[str, Substitute],
    places: Sequence[Storage],
    key: str,
    entry: FileEntry,
    check: Check,
    memory: memoryview,
) -> None:
    """Add a substitute for the file unless the nearest place has it intact."""
    first = None
    for number, storage in enumerate(places):
        why = check(storage, key, entry, memory)
        if why is None:
            if first is not None:
                substitutes[key] = Substitute(number, first)
            return
        first = first or why
    substitutes[key] = Substitute(None, first or "")
