"""Names of an optimizer's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.live.model import ModelAdapter


def parameter_names(
    groups: Sequence[dict[str, Any]], model: ModelAdapter | None, param_names: Sequence[Sequence[str]] | None
) -> list[str]:
    """Return a name for each parameter, in the order of their indices; "#3" where it is unknown.

    ``groups`` may be live ones, or a state dict's, which have indices in place of parameters.
    """
    if param_names is not None:
        return _checked(param_names, [len(group["params"]) for group in groups])
    name_by_id = {} if model is None else model.parameter_names()
    names: list[str] = []
    for group in groups:
        own_names = group.get("param_names") or [None] * len(group["params"])  # torch: built from named parameters
        for parameter, own in zip(group["params"], own_names, strict=True):
            names.append(name_by_id.get(id(parameter)) or own or f"#{len(names)}")
    return names


def if_known(names: Sequence[str]) -> list[str] | None:
    """Return ``names``, or None if all are unknown."""
    return None if all(name.startswith("#") for name in names) else list(names)


def _checked(param_names: Sequence[Sequence[str]], sizes: list[int]) -> list[str]:
    if [len(names) for names in param_names] != sizes:
        raise InvalidArgument(
            f"param_names must list the names of each param group's parameters: expected lists of {sizes} names, "
            f"found {[len(names) for names in param_names]}"
        )
    flat = [name for names in param_names for name in names]
    twice = sorted(name for name, times in Counter(flat).items() if times > 1)
    if twice:
        raise InvalidArgument(f"param_names must be unique, found more than once: {twice[:8]}")
    return flat
