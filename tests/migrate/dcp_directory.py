"""What a torch DCP directory holds, as torch reads it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def from_dcp(directory: Path) -> dict[str, Any]:
    """All of a torch DCP directory, as torch reads it, flat."""
    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return dict(flat(state))


def flat(tree: dict[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
