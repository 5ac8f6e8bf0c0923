"""A storage whose files are read from copies on a local disk, once they were fetched.

Processes of a host share the copies: the first process downloads a file, under a lock that the system frees if that
process dies, and the others wait for it or fetch another meanwhile. A file gets its name only when it is complete.

The copies of one tag, in one saved version, lie in a folder of their own: ``work_dir/STORE/TAG-VERSION/``. Opening one
removes all other folders of the same store that no process has open: of each store, one tag is kept.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from nxd_ckpt.core.closing import Closing
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import flags, locked, write_at
from nxd_ckpt.storage.work_dir import default_work_dir, opened
from nxd_ckpt.storage.wrapper import RoutedStorage

Progress = Callable[[int], None]

_DOWNLOADS = 8
"""Number of pieces that are downloaded at once, each with memory of its own."""
_PIECE = 8 * 2**20


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
        self.folder = self._open.__enter__()
        self._copies = LocalStorage(self.folder / "files", durable=False)
        self._fetched: set[str] = set()

    def fetch(self, keys: Iterable[str], progress: Progress) -> int:
        """Download these files, unless another process has; return the bytes that this process downloaded.

        ``progress`` is called from several threads with the bytes of each piece.

        Raises:
            OSError: reading them failed, or the disk is full.
        """
        missing = sorted(set(keys) - self._fetched)
        with (
            ThreadPoolExecutor(_DOWNLOADS, "nxd_ckpt-piece") as pieces,
            ThreadPoolExecutor(_DOWNLOADS, "nxd_ckpt-fetch") as files,
        ):
            download = _Download(self.inner, self.folder, pieces, progress)
            # First those that no other process is fetching; then the rest, most of which are there by then.
            attempts = zip(missing, files.map(download.attempt, missing), strict=True)
            busy = deque(key for key, done in attempts if not done)
            deque(files.map(download.fetch, busy), 0)
        self._fetched.update(missing)
        return sum(download.sizes)

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


class _Download:
    """A download of files of ``inner`` to ``folder``, each under its own lock, large ones in several pieces at once."""

    def __init__(self, inner: Storage, folder: Path, pieces: ThreadPoolExecutor, progress: Progress) -> None:
        self._inner, self._pieces, self._progress = inner, pieces, progress
        self._files, self._locks, self._parts = (folder / name for name in ("files", "locks", "parts"))
        for directory in (self._locks, self._parts):
            directory.mkdir(parents=True, exist_ok=True)
        self.sizes: deque[int] = deque()  # of what was downloaded; appended to by several threads

    def attempt(self, key: str) -> bool:
        """Fetch the file unless another process is doing so. True if it is there."""
        try:
            self.fetch(key, wait=False)
        except BlockingIOError:
            return False
        return True

    def fetch(self, key: str, *, wait: bool = True) -> None:
        """Fetch the file, or wait for the process that does; if that one dies, this process takes over.

        Raises BlockingIOError if it would have to ``wait`` and must not.
        """
        path = self._files / key
        if path.exists():
            return
        flat = quote(key, safe="")
        name = flat if len(flat) < 200 else sha256(key.encode()).hexdigest()
        with locked(self._locks / name, wait=wait):
            if path.exists():
                return
            part = self._parts / name  # a dead process's part is overwritten
            self._fill(key, part)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, path)

    def _fill(self, key: str, part: Path) -> None:
        nbytes = self._inner.size(key)
        fd = os.open(part, flags("O_WRONLY", "O_CREAT", "O_TRUNC", "O_CLOEXEC"), 0o600)
        try:
            offsets = range(0, nbytes, _PIECE)
            running = [self._pieces.submit(self._piece, key, fd, at, min(_PIECE, nbytes - at)) for at in offsets]
            try:
                for piece in running:
                    piece.result()
            finally:
                for piece in running:
                    piece.cancel()
                for piece in running:
                    with suppress(BaseException):
                        piece.exception()  # nobody writes to a descriptor that is closed
        finally:
            os.close(fd)
        self.sizes.append(nbytes)

    def _piece(self, key: str, fd: int, offset: int, nbytes: int) -> None:
        memory = memoryview(bytearray(nbytes))
        self._inner.read_into(key, offset, memory)
        done = 0
        while done < nbytes:
            done += write_at(fd, memory[done:], offset + done)
        self._progress(nbytes)
