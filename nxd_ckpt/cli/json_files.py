"""What commands are told in JSON files: cuts of parameters, and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import CheckpointError, InvalidArgument


def partitions_in(path: str | None) -> dict[str, Partition] | None:
    """How parameters are cut, by name. Raises InvalidArgument where the file does not say it."""
    if path is None:
        return None
    document = _json(path)
    if not isinstance(document, dict) or not all(isinstance(cut, dict) for cut in document.values()):
        raise InvalidArgument(f'{path}: expected {{"name": {{"partition_dim": 0, "num_partitions": 2}}, ...}}')
    try:
        return {name: Partition.from_json(cut) for name, cut in document.items()}
    except CheckpointError as error:
        raise InvalidArgument(f"{path}: {error}") from error


def nested_lists(path: str | None, depth: int) -> Any:
    """Lists of names, nested ``depth`` deep."""

    def fits(value: Any, depth: int) -> bool:
        if depth == 0:
            return isinstance(value, str)
        return isinstance(value, list) and all(fits(item, depth - 1) for item in value)

    if path is None:
        return None
    document = _json(path)
    if not fits(document, depth):
        raise InvalidArgument(f"{path}: expected names in lists nested {depth} deep, as {'[' * depth}\"name\", ...")
    return document


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as JSON: {error}") from error
