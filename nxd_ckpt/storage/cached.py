"""A storage whose files are read from copies on a local disk, once they were fetched.

Processes of a host share the copies: the first process downloads a file, under a lock that the system frees if that
process dies, and the others wait for it. A file gets its name only when it is complete.

The copies of one tag, in one saved version, lie in a folder of their own: ``work_dir/STORE/TAG-VERSION/``. Opening one
removes all other folders of the same store that no process has open: of each store, one tag is kept.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from nxd_ckpt.storage.base import Closing, Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import default_work_dir, locked, opened
from nxd_ckpt.storage.transfer import Progress, StoredFile, copy
from nxd_ckpt.storage.wrapper import RoutedStorage

_DOWNLOADS = 8
"""Number of files that are downloaded at once, each with memory for two pieces."""


class CachedStorage(RoutedStorage, Closing):
    """A copy of ``inner``, in which fetched files are read from copies below ``work_dir``.

    Close it, or use it as a context manager; until then nobody removes the copies.

    Args:
        inner: storage of the tag.
        tag: the tag to read.
        version: bytes that differ between tags that were saved under this name.
        work_dir: a local directory that only this user can write to; by default one below the system's temporary one.

    Raises:
        InvalidArgument: the default ``work_dir`` belongs to another user.
    """

    def __init__(
        self, inner: Storage, tag: str, version: bytes, work_dir: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(inner)
        store = Path(work_dir or default_work_dir()).absolute() / sha256(inner.url.encode()).hexdigest()[:16]
        name = f"{quote(tag, safe='')[:180]}-{sha256(version).hexdigest()[:16]}"
        self._open = opened(store, name)
        self.folder: Path = self._open.__enter__()
        self._copies = LocalStorage(self.folder / "files", durable=False)
        self._parts = LocalStorage(self.folder / "parts", durable=False)
        self._fetched: set[str] = set()

    def fetch(self, keys: Iterable[str], progress: Progress) -> int:
        """Download these files, unless another process has; return the bytes that this process downloaded.

        ``progress`` is called from several threads with the bytes of each piece.

        Raises:
            PartNotFound: a file is missing.
            OSError: reading them failed, or the disk is full.
        """
        missing = set(keys) - self._fetched
        # In an order of this process's own: those of a host begin with different files, and seldom wait for each other.
        ordered = sorted(missing, key=lambda key: zlib.crc32(key.encode(), os.getpid()))
        with ThreadPoolExecutor(_DOWNLOADS, "nxd_ckpt-fetch") as threads:
            downloaded = sum(threads.map(partial(self._fetch, progress=progress), ordered))
        self._fetched |= missing
        return downloaded

    def _fetch(self, key: str, progress: Progress) -> int:
        """Download a file, unless it is there once this process has the lock; return the bytes."""
        path = self._copies.path(key)
        part = sha256(key.encode()).hexdigest()
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / f"{part}.lock"):
            if path.exists():
                return 0
            self._parts.path(part).unlink(missing_ok=True)  # of a process that died
            entry, _ = copy(StoredFile(self.inner, key), StoredFile(self._parts, part), {}, progress)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self._parts.path(part), path)
        return entry.nbytes

    def discard(self) -> None:
        """Remove the copies that this process reads, because they are damaged.

        The next process downloads them again.
        """
        for key in self._fetched:
            self._copies.remove(key)
        self._fetched.clear()

    def close(self) -> None:
        """Read from ``inner`` again, and let other processes remove the copies."""
        self._fetched.clear()
        self._open.__exit__(None, None, None)

    def _at(self, key: str) -> Storage:
        return self._copies if key in self._fetched else self.inner

    def is_file(self, key: str) -> bool:
        return key in self._fetched or super().is_file(key)
