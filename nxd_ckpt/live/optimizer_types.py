"""Types in an optimizer's state dict that neuronx-distributed's files change."""

from __future__ import annotations

from typing import Any

import torch


def restore_types(optimizer_tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with ``betas`` as tuples and ``shape_info`` as ``torch.Size``: NxD writes both as lists."""
    tree = dict(optimizer_tree)
    if isinstance(groups := tree.get("param_groups"), list):
        tree["param_groups"] = [_with_betas(group) for group in groups]
    if isinstance(shapes := tree.get("shape_info"), dict):
        tree["shape_info"] = {index: torch.Size(shape) for index, shape in shapes.items()}
    return tree


def _with_betas(group: Any) -> Any:
    if isinstance(group, dict) and isinstance(group.get("betas"), list):
        return {**group, "betas": tuple(group["betas"])}
    return group
