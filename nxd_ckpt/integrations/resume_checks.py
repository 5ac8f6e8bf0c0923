"""Checks that a resumed trainer has the saved one's settings, and names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_ckpt.core.parameter_names import canonical
from nxd_ckpt.errors import IncompatibleState

WORLD_SIZE = "world size"


def require_same(where: str, saved: Mapping[str, Any], now: Mapping[str, Any], kind: type[IncompatibleState]) -> None:
    """Raise ``kind`` if a setting of this run differs from the run that saved."""
    for what, value in now.items():
        if saved[what] != value:
            raise kind(
                f"{where} was saved with {what} {saved[what]}, and this run has {value}: it would not be the same run. "
                "Use the same, or begin a new run from its model"
            )


def require_same_setting(where: str, saved: Mapping[str, Any], now: Mapping[str, Any], any_world_size: bool) -> None:
    """Raise IncompatibleState for another precision, or another world size unless ``any_world_size``."""
    if not any_world_size and saved[WORLD_SIZE] != now[WORLD_SIZE]:
        raise IncompatibleState(
            f"{where} was saved with world size {saved[WORLD_SIZE]}, and this run has {now[WORLD_SIZE]}: it would not "
            "be the same run, as each rank has random numbers and data of its own. Use the same, or set any_world_size "
            "to True in a subclass to resume anyway"
        )
    require_same(where, saved, {what: value for what, value in now.items() if what != WORLD_SIZE}, IncompatibleState)


def parameter_names(model: Any, optimizer: Any) -> list[list[str]] | None:
    """Return the names of the optimizer's parameters, by param group; None if one is not the model's."""
    live = dict(model.named_parameters())
    names = {id(live[wrapped]): name for name, wrapped in canonical(live, "the model").items()}
    own_groups = getattr(optimizer, "param_groups", [])  # none of an object that is no optimizer of torch
    groups = [[names.get(id(parameter), "") for parameter in group["params"]] for group in own_groups]
    return groups if groups and all(map(all, groups)) else None
