"""Plain values of a tag by name: steps that are numbers, options, scheduler, user content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nxd_ckpt.errors import PartLost, PartNotFound, UnsafePickle
from nxd_ckpt.formats.tensors import iter_leaves, map_tensors
from nxd_ckpt.reshard.summary import Tally
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.tag.opened import OpenTag


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""A stand-in for an absent value."""


def plain_values(tag: WholeTag, problems: dict[str, str]) -> dict[str, Any]:
    """Return values by names such as "optim/param_groups/0/lr", "scheduler/last_epoch" and "user_content/steps".

    Values that cannot be read without running code are left out; ``problems`` gets the reason, by name.
    """
    opened = tag.opened
    values = {name: value for key, inner in tag.values.items() for name, value in _leaves(key, inner)}
    for number, group in enumerate(tag.param_groups):
        options: Any = map_tensors(group, opened.read)
        values |= {f"optim/param_groups/{number}/params": options.pop("params")}
        values |= dict(_leaves(f"optim/param_groups/{number}", options))
    for name, read in {"scheduler": opened.scheduler, "user_content": opened.user_content}.items():
        if not getattr(opened.parts, name):
            continue
        try:
            values |= dict(_leaves(name, read()))
        except UnsafePickle as error:
            problems[f"{name}/"] = f"{name} is not compared: {error}"
    return values


def rank_values(opened: OpenTag, problems: dict[str, str]) -> dict[int, dict[str, Any]]:
    """Return the values that each rank saved for itself, by rank and name, such as "rank_content/random/torch".

    Values that cannot be read without running code are left out; ``problems`` gets the reason, by name.
    """
    values: dict[int, dict[str, Any]] = {}
    for rank in range(opened.topology.world_size) if opened.parts.rank_content else ():
        try:
            values[rank] = dict(_leaves("rank_content", opened.rank_content(rank)))
        except PartLost:
            raise
        except PartNotFound:
            continue  # this rank saved nothing
        except UnsafePickle as error:
            problems["rank_content/"] = f"rank_content is not compared: {error}"
    return values


def equal_values(a: Any, b: Any) -> bool:
    """Return whether two leaves are equal; NaN equals NaN, and numbers of different types are compared by value."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        tally = Tally()
        tally.add(a.flatten(), b.flatten())
        return not tally.differing
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    if hasattr(a, "__array__") or hasattr(b, "__array__"):  # a NumPy array has no single truth value
        return type(a) is type(b) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return bool(a == b) or (a != a and b != b)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested container, with their paths below ``name``."""
    return (("/".join((name, *map(str, path))), leaf) for path, leaf in iter_leaves(value))
