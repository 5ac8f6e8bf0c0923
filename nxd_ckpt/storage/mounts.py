"""Paths under which a directory is visible: a bind mount shows it in another place, which no link tells."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")
"""Linux's list of mounts. Elsewhere a directory counts as visible only under its own path."""


class _Mount(NamedTuple):
    """A mount: the directory ``root`` of a file system, shown at ``point``."""

    device: str
    root: str
    point: str


def aliases(path: str | os.PathLike[str]) -> list[str]:
    """Return all paths of ``path``, also if it does not exist yet; its own path without links comes first."""
    own = os.path.realpath(path)
    mounts = _mounts()
    covering = [mount for mount in mounts if is_below(own, mount.point)]
    if not covering:
        return [own]
    # Of several mounts on one point the last is visible.
    mount = max(reversed(covering), key=lambda candidate: len(candidate.point))
    inside = _joined(mount.root, os.path.relpath(own, mount.point))
    others = [
        _joined(mounted.point, os.path.relpath(inside, mounted.root))
        for mounted in mounts
        if mounted.device == mount.device and is_below(inside, mounted.root)
    ]
    return list(dict.fromkeys([own, *(alias for alias in others if _is_same(own, alias))]))


def is_below(inner: str, outer: str) -> bool:
    """Return whether the path ``inner`` is ``outer`` or lies in it; both without links."""
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def _is_same(own: str, other: str) -> bool:
    """Return whether both paths show one directory, not another file system mounted over ``other``.

    A directory that does not exist yet is judged by those above it.
    """
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
    return [_Mount(parts[2], _unescaped(parts[3]), _unescaped(parts[4])) for parts in fields if len(parts) > 4]


def _unescaped(path: str) -> str:
    """Return the path with its octal escapes (of spaces, for example) decoded."""
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), os.fsencode(path))
    return os.fsdecode(raw)


def _joined(above: str, below: str) -> str:
    return os.path.normpath(os.path.join(above, below))
