"""Other tiers in the report: which tags they have, and how far they lag behind the directory."""

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
"""A tier is late if nothing new arrived for this many times its longest gap between tags."""

Saves = Mapping[str, tuple[float, int]]
"""Order time and bytes of each complete tag of the directory, by name, oldest first."""


def tiers_of(tiers: Sequence[str], saves: Saves, options: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return a description of each tier.

    Only listings are read: a copy of a save keeps its name and its order time. ``tags`` are tags of the directory that
    the tier has; ``others`` counts tags that only the tier has. ``behind`` are tags of the directory newer than the
    tier's
    newest, with the seconds between that and the newest one, and their bytes. ``problem`` says why a tier could not be
    listed.
    """
    return [_tier(tier, saves, options if is_url(tier) else None) for tier in tiers]


def _tier(tier: str, saves: Saves, options: Mapping[str, Any] | None) -> dict[str, Any]:
    tier_info: dict[str, Any] = {"tier": tier, "tags": [], "others": 0, "newest": None, "copying": [], "behind": []}
    tier_info |= {"behind_seconds": None, "behind_nbytes": None, "longest_pause": None, "problem": None}
    try:
        storage = open_storage(tier, storage_options=options)
        tier_info["tier"] = storage.url
        require_directory(storage, what="tier")
        order_times = {info.tag: info.order_time for info in list_tags(storage) if info.complete}
        copying = [entry.name for entry in storage.list(COPIES) if entry.name not in order_times]
    except (CheckpointError, OSError) as error:
        return tier_info | {"problem": str(error)}
    tags = [tag for tag, (at, _) in saves.items() if order_times.get(tag) == at]
    times, reached = sorted(order_times.values()), max(order_times.values(), default=float("-inf"))
    behind = [tag for tag, (at, _) in saves.items() if at > reached]
    newest = max((at for at, _ in saves.values()), default=reached)
    return tier_info | {
        "tags": tags,
        "others": len(order_times) - len(tags),
        "newest": max(order_times, key=lambda tag: order_times[tag], default=None),
        "copying": copying,
        "behind": behind,
        "behind_seconds": None if not order_times else max(0.0, newest - reached),
        "behind_nbytes": sum(saves[tag][1] for tag in behind),
        "longest_pause": max((after - before for before, after in pairwise(times)), default=None),
    }


def late_tiers(tiers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield place and text for tiers that could not be listed, or that stopped getting tags."""
    for tier in tiers:
        where, behind = f"tier {tier['tier']}", units.count(len(tier["behind"]), "newer tag")
        waits = f"the directory has {behind}, {size(tier['behind_nbytes'] or 0)}"
        if tier["problem"] is not None:
            yield where, f"could not be asked: {tier['problem']}"
        elif tier["newest"] is None and len(tier["behind"]) >= _LATE:
            yield where, f"has no complete tag; {waits}"
        elif tier["longest_pause"] is not None and tier["behind_seconds"] > _LATE * tier["longest_pause"]:
            yield (
                where,
                f"gets no new tags: {tier['newest']} is its newest; {waits}, the last of them saved "
                f"{tier['behind_seconds']:.0f} s later. Between two tags that it has there were at most "
                f"{tier['longest_pause']:.0f} s",
            )
