"""Where a conversion reads and where it writes: two tags, each by its checkpoint directory (or URL) and name."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field

from nxd_ckpt.coordination.replacement import Replacement
from nxd_ckpt.core.names import DONE
from nxd_ckpt.core.tags import validate_tag
from nxd_ckpt.errors import CheckpointNotFound, InvalidArgument
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.fsspec_storage import without_password
from nxd_ckpt.storage.urls import (
    ARCHIVES,
    StorageOptions,
    StrPath,
    directory_and_name,
    is_url,
    join,
    lies_in,
    local_path,
    open_storage,
)
from nxd_ckpt.tag import tiered
from nxd_ckpt.tag.directory import list_tags, may_be_replaced, require_directory, tag_around
from nxd_ckpt.tag.foreign import nemo

logger = logging.getLogger("nxd_ckpt")


@dataclass(frozen=True)
class Location:
    """A tag: its ``name`` in ``directory``, an absolute path with symbolic links resolved, or a URL.

    ``options`` are what a URL is opened with. They, and a URL, may hold secrets: neither is shown.
    """

    directory: str = field(repr=False)
    name: str
    options: StorageOptions | None = field(default=None, repr=False, hash=False)

    @property
    def path(self) -> str:
        """As errors and logs name it."""
        return join(without_password(self.directory), self.name)

    def open(self, durable: bool = True) -> Storage:
        """The storage of the directory."""
        return open_storage(self.directory, durable, self.options)

    def replacement(self, storage: Storage) -> Replacement:
        """Under which names an output that is no tag is written before it gets this one, where there are renames."""
        return Replacement(storage, f".{self.name}.incomplete", self.name, f".{self.name}.replaced")


def settle(place: Location, storage: Storage) -> None:
    """Finish a replacement of ``place`` that was interrupted between its two renames. Raises OSError."""
    replacement = place.replacement(storage)
    if storage.renames and replacement.is_there(replacement.aside) and not replacement.is_there(place.name):
        logger.warning("%s was being replaced when that was interrupted: it is finished now", place.path)
        replacement.settle()


def locate_input(path: StrPath, options: StorageOptions | None = None) -> Location:
    """The tag at ``path``, or the only one in the archive there. Raises CheckpointNotFound where there is none."""
    place = locate_made(path, options)
    if place.name.endswith(ARCHIVES) and place.open().is_file(place.name):
        place = _only_tag(place)
    require_directory(place.open(), place.name, "input")
    return place


def locate_any(path: StrPath, options: StorageOptions | None) -> Location:
    """The same; or the file there, which may be a checkpoint too. What is one rank's, of SageMaker's tiered storage or
    of neuronx-nemo-megatron, is named from the directory of all ranks. Raises CheckpointNotFound where there is none.
    """
    place = locate_made(path, options)
    directory, rank = directory_and_name(place.directory)
    of_all = Location(directory, f"{rank}/{place.name}", place.options)
    if place.open().is_file(place.name):
        if place.name.endswith(ARCHIVES):
            return _only_tag(place)
        return of_all if nemo.is_of_rank(of_all.name) else place
    require_directory(place.open(), place.name, "input")
    if tiered.holds_ranks(rank) and tiered.is_of_rank(of_all.open(), of_all.name):
        return of_all
    return place


def locate_made(path: StrPath, options: StorageOptions | None) -> Location:
    """The input ``path``, which may be an output of ours; see :func:`settle`."""
    place = location_of(path, "input", options)
    with suppress(OSError):  # reading needs no renames; whoever opens the input says what is missing
        settle(place, place.open())
    return place


def _only_tag(archive: Location) -> Location:
    directory = join(archive.directory, archive.name)
    tags = [info.tag for info in list_tags(open_storage(directory, storage_options=archive.options))]
    if len(tags) != 1:
        raise CheckpointNotFound(
            f"{archive.path} holds {', '.join(tags[:8]) or 'no tag'}; name one of them: {join(archive.path, 'TAG')}"
        )
    return Location(directory, tags[0], archive.options)


def locate_output(path: StrPath, source: Location, overwrite: bool, options: StorageOptions | None = None) -> Location:
    """Where the tag ``path`` is to be made: it is free, or may be replaced, and lies apart from ``source``.

    Raises:
        InvalidArgument: it is or contains the input, or lies inside it; it exists, and ``overwrite`` is not given or
            it is not a checkpoint; or it lies inside another tag. Nothing was touched.
    """
    target = location_of(path, "output", options)
    validate_tag(target.name)
    refuse_overlap(source, target)
    storage = target.open()
    refuse_inside_tag(target, storage)
    if storage.is_file(target.name):
        raise InvalidArgument(f"output {target.path} is a file; choose another path")
    held = {entry.name for entry in storage.list(target.name)}
    if not held:
        return target
    # On a store, an interrupted conversion leaves its files in the tag's place. None of them is worth keeping.
    remains = not storage.renames and DONE not in held
    if not overwrite and not remains:
        raise InvalidArgument(
            f"output {target.path} exists; pass overwrite=True to replace it once the conversion "
            "has succeeded, or choose another path"
        )
    if not may_be_replaced(storage, target.name):
        raise InvalidArgument(
            f"output {target.path} exists and holds more than a checkpoint; it is left alone: choose another path"
        )
    return target


def locate_apart(path: StrPath, source: Location, options: StorageOptions | None) -> Location:
    """Where something that is no tag is to be made. Whether ``path`` is free is not checked.

    Raises:
        InvalidArgument: it is or contains the input, or lies inside it or another tag.
    """
    target = location_of(path, "output", options)
    refuse_overlap(source, target)
    refuse_inside_tag(target, target.open())
    return target


def refuse_inside_tag(target: Location, storage: Storage) -> None:
    """Raise InvalidArgument for an output inside a tag: whoever copied or removed the tag would take it along."""
    around = tag_around(storage)
    if around is not None:
        raise InvalidArgument(f"output {target.path} lies inside the checkpoint {around}: choose a path outside of it")


def refuse_overlap(source: Location, target: Location) -> None:
    """Raise InvalidArgument where the output is or contains the input, or lies inside it."""
    refuse_inside(source, target)
    if lies_in(source.path, target.path):
        raise _overlap(source, target)


def refuse_inside(source: Location, target: Location) -> None:
    """Raise InvalidArgument where the output is the input, or lies inside it."""
    if lies_in(target.path, source.path):
        raise _overlap(source, target)


def _overlap(source: Location, target: Location) -> InvalidArgument:
    return InvalidArgument(
        f"output {target.path} and input {source.path} are the same, or one lies inside the other; a "
        "conversion never touches its input: write to a directory of its own"
    )


def location_of(path: StrPath, what: str, options: StorageOptions | None) -> Location:
    """The place that a path or URL names; ``what`` it is, for errors. Raises InvalidArgument where it names none."""
    text = os.fspath(path)
    if not text:
        raise InvalidArgument(f"{what} must not be empty")
    if not is_url(text):
        return Location(*os.path.split(_resolved(local_path(text))))
    directory, name = directory_and_name(text)
    if not name:
        url = without_password(text)
        raise InvalidArgument(f"{what} {url} names no tag; expected a URL such as {join(url, 'run', 'step_100')}")
    return Location(directory, name, options)


def _resolved(path: str) -> str:
    """Without links, where these lead to a path: those of /dev/fd, to a pipe, name something that is no path."""
    resolved = os.path.realpath(path)
    return os.path.abspath(path) if os.path.exists(path) and not os.path.lexists(resolved) else resolved
