"""The parts of a tag, and those that are loaded beside model and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.adapters.random_state import is_random_state
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import IncompatibleState, PartNotFound
from nxd_ckpt.runtime.ignoring import RANDOM_STATE
from nxd_ckpt.runtime.load.filters import Filter
from nxd_ckpt.runtime.tag.opening import OpenTag

logger = logging.getLogger("nxd_ckpt")


def demand(opened: OpenTag, model: Any, optim: Any, scheduler: Any) -> None:
    """Raise PartNotFound for what is asked for, but was never saved."""
    parts = opened.parts
    for wanted, held, name in (
        (model is not None, parts.model, "model"),
        (optim is not None, parts.optimizer is not None, "optimizer"),
        (scheduler is not None, parts.scheduler, "scheduler"),
    ):
        if wanted and not held:
            raise PartNotFound(
                f"{opened.where} was saved without {name}; it holds {_held(parts)}. "
                f"Load it with {name}=None, or choose another tag"
            )


def _held(parts: Any) -> str:
    """What a tag holds, in words."""
    held = [name for name in ("model", "optimizer", "scheduler", "user_content") if getattr(parts, name)]
    return ", ".join(held) or "nothing"


def part_names(
    opened: OpenTag, topology: Topology, filtered: Filter, *, scheduler: bool, rank_content: bool
) -> Iterator[str]:
    """What the tag holds beside model and optimizer, and what is to be loaded."""
    parts, covers = opened.parts, filtered.covers
    if parts.scheduler or scheduler:
        yield "scheduler"
    if parts.user_content:
        yield "user_content"
        content = None if covers("user_content") else opened.user_content()
        yield from (f"user_content/{key}" for key in (content if isinstance(content, dict) else ()))
    if parts.rank_content:
        yield "rank_content"
        known = rank_content and not covers("rank_content")
        own = own_content(opened, topology) if known else {}
        yield from (f"rank_content/{key}" for key in own)
        if not own or any(map(is_random_state, own.values())):
            yield RANDOM_STATE  # that of a rank whose content is not read may be there


def own_content(opened: OpenTag, topology: Topology) -> dict[Any, Any]:
    """What this rank saved for itself; nothing on other sizes. Raises IncompatibleState for what is no dict."""
    saved, rank = opened.topology, topology.rank
    if saved.sizes != topology.sizes and opened.parts.rank_content:
        logger.warning(
            "%s was saved on %s: rank_content= stays empty on %s, where no rank is one of those. "
            "open_checkpoint(...).rank_content(rank) gives what each saved",
            opened.where,
            saved.describe(),
            topology.describe(),
        )
        return {}
    content = opened.rank_content(rank)
    if not isinstance(content, dict):
        raise IncompatibleState(
            f"{opened.where}: rank_content= fills a dict, but rank {rank} saved a {type(content).__name__}; "
            f"read it with open_checkpoint(...).rank_content({rank})"
        )
    return content
