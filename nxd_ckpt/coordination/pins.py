"""Pins: tags that users keep regardless of a job's rules. Each pin is a file with the tag's name."""

from __future__ import annotations

from nxd_ckpt.coordination.paths import PINS
from nxd_ckpt.storage.base import Storage


def pin(storage: Storage, tag: str) -> None:
    """Keep ``tag`` regardless of rules. A pin is for the name: a later save of the same name is pinned too."""
    storage.make_dir(PINS)
    storage.write(f"{PINS}/{tag}", b"1")
    storage.sync_dir(PINS)


def unpin(storage: Storage, tag: str) -> bool:
    """Leave ``tag`` to the rules. True if it was pinned."""
    was_pinned = tag in pinned(storage)
    if was_pinned:
        storage.remove(f"{PINS}/{tag}")
        storage.sync_dir(PINS)
    return was_pinned


def pinned(storage: Storage) -> set[str]:
    """Return the names of pinned tags."""
    return {entry.name for entry in storage.list(PINS) if not entry.is_dir}
