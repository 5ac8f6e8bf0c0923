"""Files that a library wrote: what they were, and whether they still are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.seal import file_digest

_CAUSE = "another program changes the files there. The checkpoint was not made visible; find that program"


def raise_unless_absent(error: OSError) -> None:
    """Raise errors of ``os.walk``, which otherwise takes an unreadable directory for an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error


class _Seen(NamedTuple):
    """The state of a file: another file of its name, or other bytes, make it differ."""

    inode: int
    nbytes: int
    mtime_ns: int


class WrittenFiles:
    """Files below ``root`` that a library wrote, by relative path; one that changes later is noticed, and named."""

    def __init__(self, root: str) -> None:
        self._root, self._storage = root, LocalStorage(root)
        self._seen: dict[str, _Seen | None] = {}
        """State of each file by name; None: it must be there, in any state."""
        self._digests: dict[str, list[int]] = {}
        """Size and CRC-32 of files that other ranks wrote, by their own reading."""
        self._sealed: dict[str, tuple[_Seen, list[int]]] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing was recorded so far."""
        return not self._seen

    def record(self, other_ranks: str = "", required: Iterable[str] = ()) -> None:
        """Record the present files that were not recorded before, and the ``required`` names.

        Files of the pattern ``other_ranks`` are left out: they may be incomplete. Required files must exist; the
        library wrote them.
        """
        for name, seen in self._now().items():
            if not fnmatchcase(name, other_ranks):
                self._seen.setdefault(name, seen)
        for name in required:
            self._seen.setdefault(name, None)

    def forget_content(self) -> None:
        """Require only that the recorded files exist: several ranks may write the same file."""
        self._seen = dict.fromkeys(self._seen)

    def digest_of(self, name: str) -> list[int]:
        """Return size and CRC-32 of one file; an empty list for an absent one."""
        try:
            return file_digest(self._storage, name, memoryview(bytearray(CRC_BLOCK)))
        except FileNotFoundError:
            return []

    def require(self, digests: Mapping[str, list[int]]) -> None:
        """Require files that other ranks wrote, by size and CRC-32."""
        self._digests.update(digests)
        self._seen.update(dict.fromkeys(digests))

    def seal(self) -> dict[str, list[int]]:
        """Return size and CRC-32 of each file, read once.

        Raises:
            SaveFailed: a file vanished, appeared or changed since it was recorded.
        """
        memory = memoryview(bytearray(CRC_BLOCK))
        for name, seen in self._compared().items():
            if (self._seen[name] or seen) != seen:
                raise self._refusal(name, "changed")
            try:
                digest = file_digest(self._storage, name, memory)
            except FileNotFoundError:
                raise self._refusal(name, "vanished") from None
            if self._digests.get(name, digest) != digest:
                raise self._refusal(name, "changed")
            self._sealed[name] = seen, digest
        self.require_unchanged()
        return {name: digest for name, (_, digest) in self._sealed.items()}

    def require_unchanged(self) -> None:
        """Raise SaveFailed if a file vanished, appeared or changed since `seal`."""
        for name, seen in self._compared().items():
            before, digest = self._sealed[name]
            # Some network file systems change times late: then the bytes tell.
            if before != seen and self.digest_of(name) != digest:
                raise self._refusal(name, "changed")

    def added(self, root: str) -> list[str]:
        """Return the names of files that appeared or changed since `record`; the directory is called ``root`` now."""
        now = WrittenFiles(root)._now()
        return sorted(name for name, seen in now.items() if self._seen.get(name) != seen)

    def _compared(self) -> dict[str, _Seen]:
        """Return the present files. Raises SaveFailed if their names differ from the recorded ones."""
        now = self._now()
        for name in sorted(now.keys() ^ self._seen.keys()):
            raise self._refusal(name, "appeared" if name in now else "vanished")
        return now

    def _now(self) -> dict[str, _Seen]:
        seen = {}
        for folder, _, names in os.walk(self._root, onerror=raise_unless_absent):
            for name in sorted(names):
                path = os.path.join(folder, name)
                try:
                    stat = os.stat(path)
                except FileNotFoundError:
                    if os.path.islink(path):
                        raise
                    continue
                key = os.path.relpath(path, self._root)
                seen[key] = _Seen(stat.st_ino, stat.st_size, stat.st_mtime_ns)
        return seen

    def _refusal(self, name: str, what: str) -> SaveFailed:
        path = os.path.join(self._root, name)
        return SaveFailed(f"{path} {what} after the files of this save were written: {_CAUSE}")
