"""What a tag's optimizer holds, as one rank sees it."""

from __future__ import annotations

from typing import Any

from nxd_ckpt.cli.values import plain
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.tag.opened import OpenTag


def optimizer(opened: OpenTag, at: Coordinates) -> dict[str, Any] | None:
    """Kind, groups, and which state there is for how many parameters. None where no optimizer was saved."""
    kind = opened.parts.optimizer
    if kind is None:
        return None
    tree = opened.optimizer_tree(at)
    state = _dict(tree.get("base_state")) or _dict(tree.get("state"))
    groups = [group for group in _list(tree.get("param_groups")) if isinstance(group, dict)]
    return {
        "kind": kind,
        "rank": opened.topology.rank_of(at),
        "parameters": sum(len(_list(group.get("params"))) for group in groups),
        "parameters_with_state": len(state),
        "entries": list(dict.fromkeys(str(name) for held in state.values() for name in _dict(held))),
        "master_weights": opened.parts.master_weights,
        "names_known": opened.optimizer_names(at) is not None,
        "param_groups": [
            {
                "parameters": len(_list(group.get("params"))),
                "options": {str(key): plain(value) for key, value in group.items() if key != "params"},
            }
            for group in groups
        ],
    }


def _dict(value: Any) -> dict[Any, Any]:
    """``value`` if it is what a state dict has there, so that a strange file is shown and not stumbled over."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
