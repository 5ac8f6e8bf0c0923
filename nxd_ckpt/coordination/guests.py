"""Guests: files of others in a tag's directory, such as a tokenizer or a trainer's metadata.

People and trainers put them there before, during and after a save. Their names decide: whatever no save writes is a
guest, also in the tag's own folders. A save neither reads nor writes over guests, and they stay: they move from the
directory that it replaces to the one that takes its name. On stores, where nothing moves, what is not a guest goes.

A save may be given such files. They are listed in its manifest, with digests, and belong to it: they go when it is
replaced, and nothing takes their place.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from nxd_ckpt.core import names
from nxd_ckpt.core.manifest import load_manifest
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.base import Storage


class Entry(NamedTuple):
    """A file of a tag, or a directory that no save makes, by its path in the tag."""

    path: str
    is_dir: bool

    @property
    def is_guest(self) -> bool:
        return self.is_dir or not names.is_own(self.path)

    @property
    def clashes(self) -> bool:
        """True for a directory where a save writes a file, and the reverse."""
        return names.is_own(self.path) if self.is_dir else names.is_own_folder(self.path)


def entries_of(storage: Storage, key: str, folder: str = "") -> Iterator[Entry]:
    """Yield the files in the directory ``key`` and in its own folders, and its other directories."""
    for name, is_dir in storage.list(posixpath.join(key, folder) if folder else key):
        path = f"{folder}/{name}" if folder else name
        if is_dir and names.is_own_folder(path):
            yield from entries_of(storage, key, path)
        else:
            yield Entry(path, is_dir)


def given_to(storage: Storage, key: str) -> Collection[str]:
    """Return the files of others in the directory ``key`` that its save was given."""
    try:
        where = f"{key}/{names.MANIFEST}"
        return load_manifest(storage.read(where), f"{storage.url}/{where}").guests.keys()
    except (FileNotFoundError, MalformedFile):
        return ()


def given_entries(storage: Storage, key: str) -> set[str]:
    """Return the names in the directory ``key``, of files and directories, that files were given to its save under."""
    return {file.partition("/")[0] for file in given_to(storage, key)}


def guests_of(storage: Storage, key: str) -> list[Entry]:
    """Return the guests in the directory ``key`` that no save was given; of a directory of such, not what is in it."""
    waiting = [entry for entry in entries_of(storage, key) if entry.is_guest]
    guests: list[Entry] = []
    given = given_to(storage, key) if waiting else ()
    for entry in waiting:  # grows
        if any(name.startswith(f"{entry.path}/") for name in given):
            waiting += [Entry(f"{entry.path}/{name}", inner) for name, inner in storage.list(f"{key}/{entry.path}")]
        elif entry.path not in given:
            guests.append(entry)
    return guests


def share(storage: Storage, source: str, target: str) -> None:
    """Give guests of the directory ``source`` a second name in ``target``, durably, where the storage can.

    So none misses from the tag while names are exchanged, and who has one open goes on writing to it. `bring` moves
    those that cannot be shared.
    """
    files = _files(storage, source)
    shared = [file for file in files if storage.share(f"{source}/{file}", f"{target}/{file}")]
    for folder in names.folders_of(shared) if shared else ():
        storage.sync_dir(posixpath.join(target, folder) if folder else target)


def _files(storage: Storage, key: str) -> Iterator[str]:
    waiting = guests_of(storage, key)
    for path, is_dir in waiting:
        if is_dir:
            waiting += [Entry(f"{path}/{name}", inner) for name, inner in storage.list(f"{key}/{path}")]
        else:
            yield path


def bring(storage: Storage, source: str, target: str) -> None:
    """Move the guests of the directory ``source`` to ``target``, durably. Safe to repeat, and by several processes.

    Of two with one name the one that was changed last stays, but a file that the save in ``target`` was given always
    does. Those behind a link stay where they are.
    """
    moving = guests_of(storage, source)
    folders: set[str] = set()
    given = {f"{target}/{name}" for name in given_to(storage, target)} if moving else set[str]()
    for path, is_dir in moving:
        try:
            _move(storage, f"{source}/{path}", f"{target}/{path}", is_dir, folders, given)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
    for folder in folders:
        storage.sync_dir(folder)


def _move(storage: Storage, old: str, new: str, is_dir: bool, folders: set[str], given: Collection[str]) -> None:
    if is_dir and storage.is_dir(new):
        for name, inner in storage.list(old):
            _move(storage, f"{old}/{name}", f"{new}/{name}", inner, folders, given)
        return
    if storage.is_dir(new) or storage.is_file(new):
        if is_dir or new in given or not _is_newer(storage, old, new):
            return
        storage.remove(new)
    folder = posixpath.dirname(new)
    storage.make_dir(folder)
    with suppress(FileNotFoundError, FileExistsError):  # another process was faster
        storage.rename(old, new)
        folders.add(folder)


def _is_newer(storage: Storage, one: str, other: str) -> bool:
    try:
        return storage.time(one) > storage.time(other)
    except (FileNotFoundError, MalformedFile):  # gone, or neither file nor directory
        return False


def remove_all_but_guests(storage: Storage, tag: str, confirm: Callable[[], bool]) -> bool:
    """Remove a tag's own files if ``confirm`` returns True; return its answer. See Storage.remove_if."""
    if not guests_of(storage, tag):
        return storage.remove_if(tag, confirm)
    own = [*given_to(storage, tag), *(entry.path for entry in entries_of(storage, tag) if not entry.is_guest)]
    return all(storage.remove_if(f"{tag}/{path}", confirm) for path in own)
