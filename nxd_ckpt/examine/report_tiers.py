"""What the report says of other tiers: which tags of the directory they have, and how far they are behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from nxd_ckpt.coordination.paths import COPIES
from nxd_ckpt.core import units
from nxd_ckpt.core.units import size
from nxd_ckpt.errors import CheckpointError
from nxd_ckpt.storage.urls import is_url, open_storage
from nxd_ckpt.tag.directory import list_tags, require_directory

_LATE = 2
"""A tier is late without a new tag for so many times as long as there ever was between two of its tags."""

Saves = Mapping[str, tuple[float, int]]
"""Order time and bytes of each complete tag of the directory, by name, oldest first."""


def tiers_of(tiers: Sequence[str], saves: Saves, options: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What each tier has. A copy of a save has its name and its order time, so listings tell, and nothing else is read.

    ``tags`` are those of the directory that it has too; ``others`` counts those that the directory does not have.
    ``behind`` are tags of the directory that are newer than its newest tag, with the seconds between that and the
    newest one, and their bytes. ``problem`` says why it could not be asked.
    """
    return [_tier(tier, saves, options if is_url(tier) else None) for tier in tiers]


def _tier(tier: str, saves: Saves, options: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"tier": tier, "tags": [], "others": 0, "newest": None, "copying": [], "behind": []}
    found |= {"behind_seconds": None, "behind_nbytes": None, "longest_pause": None, "problem": None}
    try:
        storage = open_storage(tier, storage_options=options)
        found["tier"] = storage.url
        require_directory(storage, what="tier")
        there = {info.tag: info.order_time for info in list_tags(storage) if info.complete}
        copying = [entry.name for entry in storage.list(COPIES) if entry.name not in there]
    except (CheckpointError, OSError) as error:
        return found | {"problem": str(error)}
    tags = [tag for tag, (at, _) in saves.items() if there.get(tag) == at]
    times, reached = sorted(there.values()), max(there.values(), default=float("-inf"))
    behind = [tag for tag, (at, _) in saves.items() if at > reached]
    newest = max((at for at, _ in saves.values()), default=reached)
    return found | {
        "tags": tags,
        "others": len(there) - len(tags),
        "newest": max(there, key=lambda tag: there[tag], default=None),
        "copying": copying,
        "behind": behind,
        "behind_seconds": None if not there else max(0.0, newest - reached),
        "behind_nbytes": sum(saves[tag][1] for tag in behind),
        "longest_pause": max((after - before for before, after in pairwise(times)), default=None),
    }


def late_tiers(tiers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Where, and what: tiers that could not be asked, or that get no new tags though they got some before."""
    for one in tiers:
        where, behind = f"tier {one['tier']}", units.count(len(one["behind"]), "newer tag")
        waits = f"the directory has {behind}, {size(one['behind_nbytes'] or 0)}"
        if one["problem"] is not None:
            yield where, f"could not be asked: {one['problem']}"
        elif one["newest"] is None and len(one["behind"]) >= _LATE:
            yield where, f"has no complete tag; {waits}"
        elif one["longest_pause"] is not None and one["behind_seconds"] > _LATE * one["longest_pause"]:
            yield (
                where,
                f"gets no new tags: {one['newest']} is its newest; {waits}, the last of them saved "
                f"{one['behind_seconds']:.0f} s later. Between two tags that it has there were at most "
                f"{one['longest_pause']:.0f} s",
            )
