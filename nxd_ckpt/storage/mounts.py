"""The paths under which a directory is seen: a bind mount shows it in another place, which no link tells."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")
"""Linux has it. Elsewhere a directory is taken to be seen under its own path."""


class _Mount(NamedTuple):
    """The directory ``root`` of a file system, shown at ``point``."""

    device: str
    root: str
    point: str


def aliases(path: str | os.PathLike[str]) -> list[str]:
    """All paths under which ``path`` is seen, or would be if it were made: its own without links comes first."""
    own = os.path.realpath(path)
    mounts = _mounts()
    covering = [mount for mount in mounts if is_below(own, mount.point)]
    if not covering:
        return [own]
    mount = max(reversed(covering), key=lambda one: len(one.point))  # of those on one point the last is seen
    inside = _joined(mount.root, os.path.relpath(own, mount.point))
    others = [
        _joined(other.point, os.path.relpath(inside, other.root))
        for other in mounts
        if other.device == mount.device and is_below(inside, other.root)
    ]
    return list(dict.fromkeys([own, *(other for other in others if _is_same(own, other))]))


def is_below(inner: str, outer: str) -> bool:
    """True for paths without links of which one is the other, or lies in it."""
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def _is_same(own: str, other: str) -> bool:
    """False where another file system is mounted over ``other``; what is not there yet is told by what is above it."""
    while not os.path.lexists(own) and os.path.basename(own) == os.path.basename(other) != "":
        own, other = os.path.dirname(own), os.path.dirname(other)
    try:
        return os.path.samefile(own, other)
    except OSError:
        return False


def _mounts() -> list[_Mount]:
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    fields = [line.split(" ") for line in lines]
    return [_Mount(one[2], _unescaped(one[3]), _unescaped(one[4])) for one in fields if len(one) > 4]


def _unescaped(path: str) -> str:
    """Spaces and such stand there as octal numbers, bytes by byte."""
    raw = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), os.fsencode(path))
    return os.fsdecode(raw)


def _joined(above: str, below: str) -> str:
    return os.path.normpath(os.path.join(above, below))
