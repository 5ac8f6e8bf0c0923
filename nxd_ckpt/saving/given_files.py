"""Files of others that a save is given: they go into its tag, and their digests into its manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from nxd_ckpt.core.manifest import FileEntry
from nxd_ckpt.core.names import folders_of
from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.transfer import StoredFile, copy, digest, link


def take(
    storage: Storage, folder: str, files: Mapping[str, str], threads: Executor, progress: Callable[[int], None]
) -> dict[str, FileEntry]:
    """Link or copy ``files``, paths by name, into ``folder``, durably; return the size and CRC-32 of each by its name.

    A link costs no space, and the file need not be written again; where none can be made, as between file systems, the
    file is copied. ``threads`` read ahead; ``progress`` is called with the bytes of each piece.

    Raises SaveFailed for a file that is gone.
    """
    taken = dict[str, FileEntry]()
    for name, path in sorted(files.items()):
        place, key = os.path.split(os.path.abspath(path))
        source, target = StoredFile(LocalStorage(place), key), StoredFile(storage, f"{folder}/{name}")
        if not source.storage.is_file(key):
            raise SaveFailed(
                f"{path} was given to this save, and vanished: another program changes the files there. Find it, or "
                "keep the files until the save is decided"
            )
        if not storage.renames:
            storage.remove(target.key)  # one of that name that was in the tag before
        if link(source, target):
            taken[name] = digest(target, progress, threads)
        else:
            taken[name], _ = copy(source, target, {}, progress, threads)
    for inner in folders_of(taken) if taken else ():
        storage.sync_dir(f"{folder}/{inner}".rstrip("/"))
    return taken
