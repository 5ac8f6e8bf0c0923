"""Locations of a conversion's input and output, each a checkpoint directory (or URL) and a name in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from nxd_ckpt.coordination import lease
from nxd_ckpt.coordination.control_files import LEASE, PLACE
from nxd_ckpt.coordination.guests import entries_of
from nxd_ckpt.coordination.journal import Replacement
from nxd_ckpt.coordination.lease import other_job_lives
from nxd_ckpt.core.names import DONE, HIDDEN
from nxd_ckpt.core.tags import validate_tag
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.fsspec_storage import without_password
from nxd_ckpt.storage.system import missing_directories, remove_empty
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
from nxd_ckpt.tag.choosing import own_place
from nxd_ckpt.tag.directory import clash, holds_tags, tag_around


@dataclass(frozen=True)
class Location:
    """A tag: its ``name`` in ``directory``, an absolute path with symbolic links resolved, or a URL.

    ``options`` are the storage options of a URL. They, and a URL, may contain secrets, so neither is shown.
    """

    directory: str = field(repr=False)
    name: str
    options: StorageOptions | None = field(default=None, repr=False, hash=False)

    @property
    def path(self) -> str:
        """The path or URL for errors and logs."""
        return join(without_password(self.directory), self.name)

    def open(self, durable: bool = True) -> Storage:
        """Open the storage of the directory."""
        return open_storage(self.directory, durable, self.options)

    def replacement(self, storage: Storage) -> Replacement:
        """Return the replacement of an output that is no tag: its names until it is renamed, if the storage can."""
        return Replacement(storage, f".{self.name}.incomplete", self.name, f".{self.name}.replaced")

    @property
    def lease_path(self) -> str:
        """The directory with the lease of an output that is no tag, which is there while it is written."""
        return join(self.directory, f".{self.name}.lease")

    def lease_directory(self) -> Storage:
        """Open the directory with the lease."""
        return open_storage(self.lease_path, False, self.options)


def settle(place: Location, storage: Storage) -> None:
    """Finish a replacement of ``place`` that was interrupted between its two renames. Raises OSError."""
    replacement = place.replacement(storage)
    if storage.renames and replacement.is_there(replacement.aside) and not replacement.is_there(place.name):
        directory = place.lease_directory()
        holder = lease.read(directory)
        if holder is not None and other_job_lives(directory, holder, place.path):
            return  # it is between the two
        logger.warning("%s: its replacement was interrupted, and is finished now", place.path)
        replacement.settle()


def locate_input(path: StrPath, options: StorageOptions | None = None) -> Location:
    """Return what is at ``path``, or the only tag in an archive there; see `own_place`."""
    named = settled_input(path, options)
    return own_location(join(named.directory, named.name), named.options)


def own_location(path: StrPath, options: StorageOptions | None) -> Location:
    """Return what the path itself names; see `own_place`."""
    return Location(*own_place(path, lambda directory: Location(directory, "", options).open()), options)


def settled_input(path: StrPath, options: StorageOptions | None) -> Location:
    """Return the location of an input, after finishing an interrupted replacement there."""
    place = location_of(path, "input", options)
    with suppress(OSError):  # reading needs no renames; opening the input reports what is missing
        settle(place, place.open())
    return place


def locate_output(path: StrPath, source: Location, overwrite: bool, options: StorageOptions | None = None) -> Location:
    """Return the location of a new tag, which is free or may be replaced, and does not overlap ``source``.

    Raises:
        InvalidArgument: it overlaps the input, is inside another tag, or exists and is no checkpoint or ``overwrite``
            is False. Nothing was touched.
    """
    target = location_of(path, "output", options)
    validate_tag(target.name)
    refuse_overlap(source, target)
    storage = target.open()
    refuse_inside_tag(target, storage)
    if storage.is_file(target.name):
        raise InvalidArgument(f"output {target.path} is a file; choose another path")
    entries = {entry.name for entry in storage.list(target.name)}
    if not entries:
        return target
    if holds_tags(replace(target, directory=join(target.directory, target.name)).open()):
        raise InvalidArgument(f"output {target.path} is a directory of tags: {_name_one(target, source)}")
    # On a store, an interrupted conversion leaves its files in the tag's place; they need not be kept.
    is_interrupted = not storage.renames and DONE not in entries
    if not overwrite and not is_interrupted:
        raise InvalidArgument(
            f"output {target.path} exists; pass overwrite=True to replace it after the conversion, or choose another "
            "path"
        )
    key = clash(storage, target.name)
    if key is None and all(entry.is_guest for entry in entries_of(storage, target.name)):
        key = target.name  # somebody's directory: only a save writes beside its files
    if key is not None:
        raise InvalidArgument(
            f"output {join(without_password(target.directory), key)} exists and is not a checkpoint's, so it is not "
            "replaced; choose another path"
        )
    return target


def locate_copy(path: StrPath, source: Location, overwrite: bool, options: StorageOptions | None = None) -> Location:
    """Return the location of a copy of a tag; see `locate_output`.

    Raises InvalidArgument also for an archive's name, and for a path that may mean the directory of the copy instead:
    an empty directory, or a name with a slash at its end, which is not the tag's.
    """
    target = locate_output(path, source, overwrite, options)
    if target.name != source.name and target.name.endswith(ARCHIVES):
        raise InvalidArgument(
            f"output {target.path} is named as an archive, and a copy of a tag is a directory: convert writes archives"
        )
    storage = target.open()
    means_directory = os.fspath(path).endswith("/") or (storage.renames and storage.is_dir(target.name))
    if target.name != source.name and means_directory and not storage.list(target.name):
        raise InvalidArgument(f"output {target.path} is a directory, or is named as one: {_name_one(target, source)}")
    return target


def _name_one(target: Location, source: Location) -> str:
    return f"name the tag that is made in it, such as {join(target.path, source.name)}"


def locate_apart(path: StrPath, source: Location, options: StorageOptions | None) -> Location:
    """Return the location of an output that is no tag; it may exist.

    Raises:
        InvalidArgument: it overlaps the input, or is inside another tag.
    """
    target = location_of(path, "output", options)
    refuse_overlap(source, target)
    refuse_inside_tag(target, target.open())
    return target


def refuse_inside_tag(target: Location, storage: Storage) -> None:
    """Raise InvalidArgument for an output inside a tag, which would be copied and removed with the tag.

    So it does for one in a directory that nxd_ckpt keeps for itself beside tags.
    """
    above, hidden, _ = f"{target.path}/".partition(f"/{HIDDEN}/")
    if hidden:
        raise InvalidArgument(
            f"output {target.path} is in {above}/{HIDDEN}, which is nxd_ckpt's own and may be removed; choose a path "
            "outside of it"
        )
    around = tag_around(storage)
    if around is not None:
        raise InvalidArgument(f"output {target.path} is inside the checkpoint {around}; choose a path outside of it")


def refuse_overlap(source: Location, target: Location) -> None:
    """Raise InvalidArgument if the output is or contains the input, or is inside it."""
    refuse_inside(source, target)
    if lies_in(source.path, target.path):
        raise _overlap(source, target)


def refuse_inside(source: Location, target: Location) -> None:
    """Raise InvalidArgument if the output is the input, or is inside it."""
    if lies_in(target.path, source.path):
        raise _overlap(source, target)


def _overlap(source: Location, target: Location) -> InvalidArgument:
    return InvalidArgument(
        f"output {target.path} and input {source.path} are the same, or one is inside the other; a conversion never "
        "touches its input, so choose another output directory"
    )


def location_of(path: StrPath, what: str, options: StorageOptions | None) -> Location:
    """Return the location of a path or URL; ``what`` names it in errors. Raises InvalidArgument if it names no tag."""
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
    """Resolve links, unless they lead to no path: those of /dev/fd to a pipe name something else."""
    resolved = os.path.realpath(path)
    return os.path.abspath(path) if os.path.exists(path) and not os.path.lexists(resolved) else resolved


def directories_to_make(place: Location) -> list[str]:
    """Return the local directories above ``place`` that do not exist yet, the innermost first."""
    return [] if is_url(place.directory) else missing_directories(place.directory)


def remove_unused(directories: Sequence[str]) -> None:
    """Remove directories, the innermost first, unless they hold more than what a job without a tag leaves.

    A job that uses one of them by now keeps it: it has a lease, or another file, there. Links were made by somebody
    else, and are not followed.
    """
    for directory in directories:
        hidden = os.path.join(directory, HIDDEN)
        if os.path.lexists(os.path.join(directory, LEASE)) or os.path.islink(directory) or os.path.islink(hidden):
            continue
        with suppress(OSError):
            os.unlink(os.path.join(directory, PLACE))
        remove_empty(hidden)
        with suppress(OSError):
            os.rmdir(directory)


@contextmanager
def leaving_none(place: Location) -> Iterator[None]:
    """Remove the directories above ``place`` that are made within the block, if it raises."""
    made = directories_to_make(place)
    try:
        yield
    except BaseException:
        remove_unused(made)
        raise
