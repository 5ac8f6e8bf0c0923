"""The hosts of a job on which a key belongs."""

from __future__ import annotations

from typing import NamedTuple


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
