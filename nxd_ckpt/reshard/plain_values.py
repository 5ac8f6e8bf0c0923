"""What a tag holds besides tensors, as values by name: steps that are numbers, options, scheduler, user content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nxd_ckpt.errors import PartLost, PartNotFound, UnsafePickle
from nxd_ckpt.formats.tensors import iter_leaves, map_tensors
from nxd_ckpt.reshard.tally import Tally
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.tag.opened import OpenTag


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""Stands for a value that is not there."""


def plain_values(tag: WholeTag, problems: dict[str, str]) -> dict[str, Any]:
    """Single values by such names as "optim/param_groups/0/lr", "scheduler/last_epoch" and "user_content/steps".

    What cannot be read without running code is left out, and ``problems`` say why, by name.
    """
    opened = tag.opened
    found = {name: value for key, inner in tag.values.items() for name, value in _leaves(key, inner)}
    for number, group in enumerate(tag.param_groups):
        options: Any = map_tensors(group, opened.read)
        found |= {f"optim/param_groups/{number}/params": options.pop("params")}
        found |= dict(_leaves(f"optim/param_groups/{number}", options))
    for name, read in _others(opened).items():
        try:
            found |= dict(_leaves(name, read()))
        except UnsafePickle as error:
            problems[f"{name}/"] = f"{name} is not compared: {error}"
    return found


def rank_values(opened: OpenTag, problems: dict[str, str]) -> dict[int, dict[str, Any]]:
    """What each rank saved for itself, as :func:`plain_values`, by rank: "rank_content/random/torch" and the like."""
    found: dict[int, dict[str, Any]] = {}
    for rank in range(opened.topology.world_size) if opened.parts.rank_content else ():
        try:
            found[rank] = dict(_leaves("rank_content", opened.rank_content(rank)))
        except PartLost:
            raise
        except PartNotFound:
            continue  # this rank saved nothing
        except UnsafePickle as error:
            problems["rank_content/"] = f"rank_content is not compared: {error}"
    return found


def equal_values(a: Any, b: Any) -> bool:
    """Whether two leaves are equal; NaN equals NaN, and a number the same number of another type."""
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


def _others(opened: OpenTag) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    if opened.parts.scheduler:
        found["scheduler"] = opened.scheduler
    if opened.parts.user_content:
        found["user_content"] = opened.user_content
    return found


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, all the way down, by path."""
    return (("/".join((name, *map(str, path))), leaf) for path, leaf in iter_leaves(value))
