"""On which of a job's hosts a key belongs. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    """What the keys mean: ``hidden`` is the folder of the job's own files, of which those below ``mirrored`` are on
    every host. ``marker`` and ``done`` are the files of a directory that name its save, and order it."""

    hidden: str
    mirrored: tuple[str, ...]
    marker: str
    done: str

    def is_hidden(self, key: str) -> bool:
        """Whether it is one of the job's own files."""
        return top_of(key) == self.hidden

    def is_mirrored(self, key: str) -> bool:
        """Whether each host has the file ``key``, if it is a small one that is written whole."""
        if self.is_hidden(key):
            return any(key == folder or key.startswith(f"{folder}/") for folder in self.mirrored)
        return key.count("/") <= 1

    def is_at_home(self, key: str) -> bool:
        """Whether it is on the host of rank 0 alone."""
        return self.is_hidden(key) and not self.is_mirrored(key)


def top_of(key: str) -> str:
    """The directory below the root that a key is, or lies in."""
    return key.partition("/")[0]
