"""One host's directory, for its own processes and, through its server, for those of other hosts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from nxd_ckpt import effects
from nxd_ckpt.core.limits import NOTE
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.storage.local import LocalStorage
from nxd_ckpt.storage.system import lock


class Names(NamedTuple):
    """Meaning of keys on the disks of hosts.

    ``hidden`` is the folder of the job's own files, of which those below ``mirrored`` are on every host. ``marker`` and
    ``done`` are the files of a directory that name its save, and order it.
    """

    hidden: str
    mirrored: tuple[str, ...]
    marker: str
    done: str

    def is_hidden(self, key: str) -> bool:
        """Return whether it is one of the job's own files."""
        return top_of(key) == self.hidden

    def is_mirrored(self, key: str) -> bool:
        """Return whether every host has the file ``key``, if it is a small one that is written whole."""
        if self.is_hidden(key):
            return any(key == folder or key.startswith(f"{folder}/") for folder in self.mirrored)
        return key.count("/") <= 1

    def is_at_home(self, key: str) -> bool:
        """Return whether it is on the host of rank 0 alone."""
        return self.is_hidden(key) and not self.is_mirrored(key)


def top_of(key: str) -> str:
    """Return the directory below the root that the key is, or lies in."""
    return key.partition("/")[0]


_LOCK = ".lock"
"""Name of the lock beside a small file that is held while the file is exchanged."""
_LOCKED_WITHIN = 5.0
"""Seconds after which a holder of that lock counts as standing still: an exchange takes milliseconds."""
_PAUSE = 0.02


class OwnDirectory(LocalStorage):
    """The directory of the host that this process runs on.

    Small files, and renames, are durable afterwards with their names and those of the directories above them.
    """

    _mark: tuple[str, bytes] | None = None

    def expect(self, key: str, mark: bytes | None) -> None:
        """Let every change raise OSError (ESTALE) unless the file ``key`` has this mark; None ends that."""
        self._mark = None if mark is None else (key, mark)

    def peek(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return small files, all at once: None for an absent one, and ``b""`` for anything that is no small file."""
        return [self._peeked(key) for key in keys]

    def write(self, key: str, data: bytes) -> None:
        self._make_room(key)
        super().write(key, data)
        self.sync_dir(_folder(key))

    def write_reserved(self, reserve: str, key: str, data: bytes) -> None:
        super().write_reserved(reserve, key, data)
        self.sync_dir(_folder(key))

    def link_new(self, key: str, data: bytes) -> bool:
        self._make_room(key)
        created = super().link_new(key, data)
        self.sync_dir(_folder(key))
        return created

    def exchange(self, key: str, expected: bytes, data: bytes) -> bool:
        """Replace a small file only if it has the ``expected`` content; False otherwise.

        A lock separates those who exchange, so that nobody finds the key absent meanwhile. Raises TimeoutError if a
        process that stands still holds it: its caller would give up, and not learn of an exchange that happens later.
        """
        if not self.is_file(key):
            return False
        unlock = self._lock(f"{_folder(key)}/{_LOCK}".lstrip("/"))
        try:
            if self._peeked(key) != expected:
                return False
            self.write(key, data)
            return True
        finally:
            unlock()

    def _lock(self, key: str) -> Callable[[], None]:
        deadline = effects.monotonic() + _LOCKED_WITHIN
        while True:
            try:
                return lock(self.path(key), wait=False)
            except BlockingIOError:
                if effects.monotonic() > deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT, f"another process has locked {self.url}/{key} for {_LOCKED_WITHIN:.0f} s"
                    ) from None
                effects.sleep(_PAUSE)

    def rename(self, source: str, target: str) -> None:
        self._make_room(target)
        super().rename(source, target)
        self.sync_dir(_folder(target))

    def remove(self, key: str) -> None:
        try:
            super().remove(key)
        except FileNotFoundError:  # of two that remove a directory, each may find some of it gone
            super().remove(key)
        with suppress(FileNotFoundError):
            self.sync_dir(_folder(key))

    def sync_dir(self, key: str) -> None:
        """Make the names in this directory durable; do nothing if this host has no such directory."""
        with suppress(FileNotFoundError):
            super().sync_dir(key)

    def _own(self, key: str) -> str:
        if self._mark is not None and self._peeked(self._mark[0]) != self._mark[1]:
            raise OSError(
                errno.ESTALE,
                f"{self.url} is not the directory that this job began with: its mark {self._mark[0]} is not there. It "
                "was unmounted, or something else is mounted or linked in its place, or the mark was removed. Nothing "
                "is written there until it is back; to use the present directory, restart the job",
            )
        return super()._own(key)

    def _make_room(self, key: str) -> None:
        self.make_dir(_folder(key))

    def _peeked(self, key: str) -> bytes | None:
        try:
            return self.read(key, NOTE)
        except FileNotFoundError:
            return None
        except MalformedFile:
            return b""


def _folder(key: str) -> str:
    return key.rpartition("/")[0]
