"""The parts of a tag, and those that are loaded beside model and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from nxd_ckpt.core.data_position import Position, check_position, is_complete, is_data_position, merge_positions
from nxd_ckpt.core.limits import shown
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import CorruptCheckpoint, IncompatibleState, PartLost, PartNotFound, UnsafePickle
from nxd_ckpt.live.ignoring import RANDOM_STATE
from nxd_ckpt.live.random_state import is_random_state
from nxd_ckpt.load.filters import Filter
from nxd_ckpt.tag.opened import OpenTag

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


def check_scheduler(live: Any, saved: Any, where: str) -> None:
    """Raise IncompatibleState where a list of schedulers is live and another number of them, or one, was saved."""
    counts = [len(one) if isinstance(one, (list, tuple)) else None for one in (live, saved)]
    if live is not None and counts[0] != counts[1]:
        known = ["one scheduler" if count is None else f"a list of {count}" for count in counts]
        raise IncompatibleState(f"scheduler: {where} holds {known[1]}, the live one is {known[0]}; pass what was saved")


def load_scheduler(live: Any, saved: Any) -> None:
    """Load a scheduler, a list of them, or a dict that is filled with its state."""
    if isinstance(live, dict):
        live.clear()
        live.update(saved or {})
    elif isinstance(live, (list, tuple)):
        for one, state in zip(live, saved, strict=True):
            load_scheduler(one, state)
    else:
        live.load_state_dict(saved)


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
        own = _own_or_positions(opened, topology) if known else {}
        yield from (f"rank_content/{key}" for key in own)
        if not own or any(map(is_random_state, own.values())):
            yield RANDOM_STATE  # that of a rank whose content is not read may be there


def own_content(opened: OpenTag, topology: Topology, filtered: Filter) -> dict[Any, Any]:
    """What this rank saved for itself; on other sizes the data positions of all ranks, put together.

    Raises IncompatibleState for what is no dict, and for positions that cannot be re-split and are not left out.
    """
    if _same_ranks(opened, topology):
        return _own(opened, topology.rank)
    logger.warning(
        "%s was saved on %s: on %s, where no rank is one of those, only data positions are loaded into rank_content=. "
        "open_checkpoint(...).rank_content(rank) gives what each saved",
        opened.where,
        opened.topology.describe(),
        topology.describe(),
    )
    wanted = {key: of for key, of in _positions(opened).items() if not filtered.covers(f"rank_content/{key}")}
    return {key: merge_positions(of, f"{opened.where}: rank_content[{key!r}]") for key, of in wanted.items()}


def positions_together(opened: OpenTag) -> tuple[dict[Any, Position], list[str]]:
    """The data positions of all ranks, put together, by key; and why others cannot be.

    There are none where a rank's file is damaged or lost, or holds more than plain data: it may have held some of each.
    """
    together, alone = dict[Any, Position](), list[str]()
    try:
        found = _positions(opened) if opened.parts.rank_content else {}
    except (CorruptCheckpoint, PartLost, UnsafePickle) as error:
        return {}, [f"the data positions of all ranks, if there are any: {error}"]
    for key, of in found.items():
        try:
            together[key] = merge_positions(of, f"{opened.where}: rank_content[{key!r}]")
        except IncompatibleState as error:
            alone.append(str(error))
    return together, alone


def _own_or_positions(opened: OpenTag, topology: Topology) -> dict[Any, Any]:
    """What :func:`own_content` gives, but for the positions, which are not yet put together."""
    return _own(opened, topology.rank) if _same_ranks(opened, topology) else _positions(opened)


def _same_ranks(opened: OpenTag, topology: Topology) -> bool:
    return opened.topology.sizes == topology.sizes or not opened.parts.rank_content


def _own(opened: OpenTag, rank: int) -> dict[Any, Any]:
    content = opened.rank_content(rank)
    if not isinstance(content, dict):
        raise IncompatibleState(
            f"{opened.where}: rank_content= fills a dict, but rank {rank} saved a {type(content).__name__}; "
            f"read it with open_checkpoint(...).rank_content({rank})"
        )
    return content


def _positions(opened: OpenTag) -> dict[Any, dict[int | None, Position]]:
    """The data positions that ranks saved, by their key and data-parallel rank.

    The first data-parallel rank of each stage and tensor-parallel rank tells under which keys there are any; of the
    others no more are read than needed.
    """
    found: dict[Any, dict[int | None, Position]] = {}
    sizes = opened.topology
    tell = [sizes.rank_of(Coordinates(pp, 0, tp)) for pp in range(sizes.pp) for tp in range(sizes.tp)]
    own = (sizes.rank_of(Coordinates(dp_rank=dp_rank)) for dp_rank in range(sizes.dp))
    for number, rank in enumerate(dict.fromkeys([*tell, *own, *range(sizes.world_size)]), start=1):
        try:
            content = opened.rank_content(rank)
        except PartLost:
            raise
        except PartNotFound:
            continue  # this rank saved nothing
        for key, value in content.items() if isinstance(content, dict) else ():
            if is_data_position(value):
                check_position(value, f"{opened.where}: rank_content[{shown(key)}] of rank {rank}")
                found.setdefault(key, {}).setdefault(value["dp_rank"], value)
        if number >= len(tell) and all(map(is_complete, found.values())):
            break
    return found
