"""One save in several places, each of which may have lost or damaged files of it: from where each file is taken."""

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
from nxd_ckpt.tag.read_pool import ReadPool
from nxd_ckpt.tag.verification import verify_file

logger = logging.getLogger("nxd_ckpt")


class Taken(NamedTuple):
    """A file that the nearest place does not have as it was saved, and ``why``. ``place`` is the number of the one that
    does; None if there is none."""

    place: int | None
    why: str


Wrong = Callable[[Storage, str, FileEntry, memoryview], str | None]
"""What is wrong with a file in a storage, None if nothing; it is given memory to read through."""


class SameSave(NamedTuple):
    """The numbers of the places that hold a save, the nearest first, and which of these has the ``manifest`` that it
    is known by."""

    places: tuple[int, ...]
    manifest: int


def same_save(storages: Sequence[Storage], place: int, tag: str) -> SameSave | None:
    """Where else the save is that has the name ``tag`` at ``place``: at places after it, complete, with the same
    manifest, to the last byte. The nearest one's own may be damaged: then the order time must be the same.

    None for what is no save of ours. A place that cannot be asked does not hold it.
    """
    order_time, own = choose(storages[place], tag).order_time, _manifest(storages[place], tag)
    places, first, known = [place], place, own
    for other in range(place + 1, len(storages)):
        try:
            info = choose(storages[other], tag)
        except (CheckpointError, OSError):
            continue
        found = _manifest(storages[other], tag) if info.order_time == order_time else None
        if found is None or known not in (None, found):
            continue
        places.append(other)
        first, known = (other, found) if known is None else (first, known)
    return None if known is None else SameSave(tuple(places), first)


def manifest_of(storage: Storage, tag: str) -> Manifest:
    """Raises MalformedFile, OSError."""
    key = f"{tag}/{names.MANIFEST}"
    return load_manifest(storage.read(key), f"{storage.url}/{key}")


def survey(
    places: Sequence[Storage],
    tag: str,
    manifest: Manifest,
    ranks: Iterable[int],
    wrong: Wrong,
    without: Sequence[str] = (),
) -> dict[str, Taken]:
    """By key, the files that ``ranks`` saved and that the first of ``places``, which hold the same save, has not as
    they were saved. Their indexes are read and verified; of other files ``wrong`` tells.

    Files that begin with one of ``without`` are left out; so are those that no index that is left lists.
    """
    found: dict[str, Taken] = {}
    of_index = changed if isinstance(wrong, Listed) else wrong
    with ReadPool(max(place.concurrency for place in places)) as pool:
        for rank in ranks:
            for key, entry in _files(places, tag, manifest, rank, found, of_index):
                if not key.startswith(tuple(f"{tag}/{part}" for part in without)):
                    pool.submit(partial(_find, found, places, key, entry, wrong))
        pool.wait_for(pool.submitted)
    return found


def changed(storage: Storage, key: str, entry: FileEntry, memory: memoryview) -> str | None:
    """All of the file is read."""
    try:
        verify_file(storage, key, entry, memory, Counter())
    except (CheckpointError, OSError, EOFError) as error:
        return f"{error}"
    return None


def changed_everywhere(storage: Storage, key: str, entry: FileEntry, memory: memoryview) -> str | None:
    """The same, of all copies of the file that the storage has: nothing is wrong if one is good, and those that are not
    are distrusted from now on."""
    return _good_copy(storage, key, lambda copy: changed(copy, key, entry, memory))


def distrust_manifests(storage: Storage, tag: str) -> None:
    """The same for the copies of a manifest."""
    key = f"{tag}/{names.MANIFEST}"
    _good_copy(storage, key, lambda copy: "it is damaged" if _manifest(copy, tag) is None else None)


def _good_copy(storage: Storage, key: str, wrong: Callable[[Storage], str | None]) -> str | None:
    if not isinstance(storage, Replicated):
        return wrong(storage)
    found = {number: wrong(copy) for number, copy in storage.copies(key).items()}
    if None not in found.values():
        return next(iter(found.values()), f"{storage.url}/{key} is missing")
    for number, why in found.items():
        if why is not None:
            logger.warning("%s/%s is read from another copy than that of host %d: %s", storage.url, key, number, why)
            storage.distrusted.add((key, number))
    return None


class Listed:
    """Whether a file is missing, by listings alone: one for each directory of each storage."""

    def __init__(self) -> None:
        self._listings: dict[tuple[int, str], set[str]] = {}
        self._lock = effects.Lock()

    def __call__(self, storage: Storage, key: str, entry: FileEntry, memory: memoryview) -> str | None:
        directory, _, name = key.rpartition("/")
        with self._lock:
            if (id(storage), directory) not in self._listings:
                self._listings[id(storage), directory] = _names(storage, directory)
            there = name in self._listings[id(storage), directory]
        return None if there else f"{storage.url}/{key} is missing"


def _names(storage: Storage, directory: str) -> set[str]:
    try:
        return {entry.name for entry in storage.list(directory) if not entry.is_dir}
    except (CheckpointError, OSError):
        return set()


def _manifest(storage: Storage, tag: str) -> bytes | None:
    """The manifest's bytes; None if it is damaged, or cannot be read."""
    try:
        manifest_of(storage, tag)
        return storage.read(f"{tag}/{names.MANIFEST}")
    except (CheckpointError, OSError):
        return None


def _files(
    places: Sequence[Storage], tag: str, manifest: Manifest, rank: int, found: dict[str, Taken], wrong: Wrong
) -> Iterator[tuple[str, FileEntry]]:
    """What this rank saved, by its index; nothing where no place has that. What is to be said of the index is
    ``found``."""
    line = manifest.ranks[rank]
    key = f"{tag}/{names.index_file(manifest.topology.coordinates_of(rank))}"
    _find(found, places, key, FileEntry(line.nbytes, line.crc32), wrong, memoryview(bytearray(line.nbytes)))
    place = found[key].place if key in found else 0
    if place is not None:
        files = load_index(places[place].read(key), f"{places[place].url}/{key}").files
        yield from ((f"{tag}/{file}", entry) for file, entry in files.items())


def _find(
    found: dict[str, Taken],
    places: Sequence[Storage],
    key: str,
    entry: FileEntry,
    wrong: Wrong,
    memory: memoryview,
) -> None:
    """Add the file to what is ``found`` unless nothing is wrong with it in the nearest place."""
    first = None
    for number, storage in enumerate(places):
        why = wrong(storage, key, entry, memory)
        if why is None:
            if first is not None:
                found[key] = Taken(number, first)
            return
        first = first or why
    found[key] = Taken(None, first or "")
