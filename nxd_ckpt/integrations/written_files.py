"""The files that a library wrote for a checkpoint, as they were right after it had written them.

What is sealed is what was written: a file that vanished since, appeared, or changed is noticed, and named.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from nxd_ckpt.core.manifest import CRC_BLOCK
from nxd_ckpt.errors import SaveFailed
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.tag.seal import file_digest

_CAUSE = (
    "another program changes what is saved there. The checkpoint was not made visible; find that program"
)


def raise_unless_absent(error: OSError) -> None:
    """For ``os.walk``, which takes a directory that it cannot read for an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error


class _Seen(NamedTuple):
    """One file as it was seen: another one of its name, or other bytes, make this differ."""

    inode: int
    nbytes: int
    mtime_ns: int


class WrittenFiles:
    """Files below ``root``, by their paths relative to it."""

    def __init__(self, root: str) -> None:
        self._root, self._storage = root, LocalStorage(root)
        self._seen: dict[str, _Seen | None] = {}
        """None: it must be there, whatever was seen of it."""
        self._digests: dict[str, list[int]] = {}
        """Size and CRC-32 of files that other ranks wrote, as they found them."""
        self._sealed: dict[str, tuple[_Seen, list[int]]] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing was recorded so far."""
        return not self._seen

    def record(self, other_ranks: str = "", required: Iterable[str] = ()) -> None:
        """Record what is there and was not recorded before, but for files of the pattern ``other_ranks``, which may
        be incomplete; and the names that are ``required``, as the library has written them."""
        for name, seen in self._now().items():
            if not fnmatchcase(name, other_ranks):
                self._seen.setdefault(name, seen)
        for name in required:
            self._seen.setdefault(name, None)

    def forget_content(self) -> None:
        """Require of what was recorded that it is there: several ranks may write the same file."""
        self._seen = dict.fromkeys(self._seen)

    def digest_of(self, name: str) -> dict[str, list[int]]:
        """Size and CRC-32 of one file, by its name; of one that is not there, none."""
        try:
            return {name: file_digest(self._storage, name, memoryview(bytearray(CRC_BLOCK)))}
        except FileNotFoundError:
            return {name: []}

    def require(self, digests: Mapping[str, list[int]]) -> None:
        """Require files that other ranks wrote, by size and CRC-32."""
        self._digests.update(digests)
        self._seen.update(dict.fromkeys(digests))

    def seal(self) -> dict[str, list[int]]:
        """Size and CRC-32 of each file, read once.

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
        """Raise SaveFailed where a file vanished, appeared or changed since `seal`."""
        for name, seen in self._compared().items():
            before, digest = self._sealed[name]
            # Some network file systems change times late: then the bytes tell.
            if before != seen and self.digest_of(name).get(name) != digest:
                raise self._refusal(name, "changed")

    def added(self, root: str) -> list[str]:
        """Files that appeared or changed since `record`, by their names; the directory is called ``root`` now."""
        now = WrittenFiles(root)._now()
        return sorted(name for name, seen in now.items() if self._seen.get(name) != seen)

    def _compared(self) -> dict[str, _Seen]:
        """The files that are there now. Raises SaveFailed where that has other names than what was recorded."""
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
