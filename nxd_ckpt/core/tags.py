"""Tags: names of checkpoints in a directory, and their order.

The order of tags is one number, ``order_time`` (seconds since the epoch), never the name: it lies above that of
every tag that existed when the checkpoint was made, so a clock that jumps back cannot reorder them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nxd_ckpt.errors import InvalidTag


def validate_tag(tag: object) -> str:
    """``str(tag)``, proved to be a plain, visible directory name.

    Raises:
        InvalidTag: empty, absolute, with ``/`` or ``\\``, ``..``, a leading dot, a NUL, or longer than 255 bytes.
    """
    name = str(tag) if isinstance(tag, (str, int)) and not isinstance(tag, bool) else ""
    if not name:
        raise InvalidTag(f"tag must be a non-empty string such as 'step_300', found {tag!r}")
    if "/" in name or "\\" in name or "\0" in name:
        raise InvalidTag(f"tag {name!r} must be one directory name, without '/', '\\' or NUL; it is not a path")
    if name.startswith("."):
        raise InvalidTag(f"tag {name!r} must not begin with '.': such names are hidden and never listed")
    if len(name.encode()) > 255:
        raise InvalidTag(f"tag {name[:40]!r}... has {len(name.encode())} bytes, at most 255 are allowed")
    return name


@dataclass(frozen=True)
class TagInfo:
    """One tag as a listing shows it. ``order_time`` is in seconds; ``ours`` says that it has a manifest."""

    tag: str
    order_time: float
    complete: bool
    ours: bool


def in_order(tags: Iterable[TagInfo]) -> list[TagInfo]:
    """Oldest first; names only break ties, so that the order is total."""
    return sorted(tags, key=lambda info: (info.order_time, info.tag))


def latest(tags: Iterable[TagInfo]) -> TagInfo | None:
    """The newest complete tag."""
    complete = in_order(info for info in tags if info.complete)
    return complete[-1] if complete else None


def next_order_time(now: float, tags: Iterable[TagInfo]) -> float:
    """``max(now, every existing tag's) + 1``: later than every tag, whatever the clock says."""
    return max([now, *(info.order_time for info in tags)]) + 1.0
