"""Whether a trainer that resumes is as the one that saved, and what its parameters are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_ckpt.adapters.dtensor import canonical
from nxd_ckpt.errors import IncompatibleState


def require_same(where: str, saved: Mapping[str, Any], now: Mapping[str, Any], kind: type[IncompatibleState]) -> None:
    """Raise ``kind`` where this run is not as the one that saved."""
    for what, value in now.items():
        if saved[what] != value:
            raise kind(
                f"{where} was saved with {what} {saved[what]}, and this run has {value}: it would not be the same run. "
                "Use the same, or begin a new run from its model"
            )


def parameter_names(model: Any, optimizer: Any) -> list[list[str]] | None:
    """The names of the optimizer's parameters, by param group; None where one is not the model's."""
    live = dict(model.named_parameters())
    names = {id(live[wrapped]): name for name, wrapped in canonical(live, "the model").items()}
    found = [[names.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    return found if all(map(all, found)) else None
