"""An optimizer's state dict as files hold it: the keys of torch's, of NxD's ZeRO-1 and of ours.

ZeRO-1's has ``base_state`` in place of ``state``. With expert parallelism two optimizers are in one: indices of the
experts' parameters begin at the offsets under `EXPERT_KEYS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MASTERS = "sharded_master_weights"

EXPERT_KEYS = ("ep_param_id_offset", "ep_param_group_offset", "ep_base_state_offset", "ep_shape_info_offset")

KEYS = ("base_state", "shape_info", MASTERS, *EXPERT_KEYS)

MASTER_WEIGHTS = "master_weights"
"""Last part of the global name of a ZeRO-1 shard's full-precision values."""

STEP = "step"

MOMENTS = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
}
"""Keys of optimizers, torch's and others, for state that is a tensor for each parameter (or None)."""

OPTIMIZER_NAME = "nxd_ckpt_optimizer"
"""Key of a saved param group: the name of its optimizer, where several were saved by name."""

OWN_FORM = "own_form"
"""Key, in ``state`` and in param groups, for an optimizer whose state dict has a form of its own: see own_form."""

VALUE = "nxd_ckpt_value"
"""Entry in the state of a parameter that is not the model's, such as a full-precision clone: its own value."""

ROWS = "@ranks|"
"""Mark in the name of an entry that has a row for each rank."""

_OF_PARAMETERS = ("params", "param_names")
"""Keys of a param group about its parameters; the rest are options."""


def is_rows(entry: Any) -> bool:
    return isinstance(entry, str) and ROWS in entry


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group: everything except its parameters."""
    return {option: value for option, value in group.items() if option not in _OF_PARAMETERS}


def numbered(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with numbers, in order of the param groups, in place of the parameters' names."""
    names = (name for group in tree["param_groups"] for name in group["params"])
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in tree["param_groups"]]
    states = {numbers.get(name, name): state for name, state in tree.get("state", {}).items()}
    return {**tree, "state": states, "param_groups": groups}


def split(saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of the ordinary and of the expert optimizer, each with indices from 0."""
    groups = saved["param_groups"]
    first = saved["ep_param_group_offset"]
    ordinary = {"param_groups": groups[:first]}
    experts = {"param_groups": groups[first:]}
    for section in ("base_state", "shape_info", MASTERS):
        if section in saved:
            entries = saved[section].items()
            offset = saved["ep_base_state_offset" if section == "base_state" else "ep_shape_info_offset"]
            ordinary[section] = {index: value for index, value in entries if index < offset}
            experts[section] = {index - offset: value for index, value in entries if index >= offset}
    return ordinary, experts


def restore_types(optimizer_tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with ``betas`` as tuples and ``shape_info`` as ``torch.Size``: NxD writes both as lists."""
    tree = dict(optimizer_tree)
    if isinstance(groups := tree.get("param_groups"), list):
        tree["param_groups"] = [_with_betas(group) for group in groups]
    if isinstance(shapes := tree.get("shape_info"), dict):
        import torch

        tree["shape_info"] = {index: torch.Size(shape) for index, shape in shapes.items()}
    return tree


def _with_betas(group: Any) -> Any:
    if isinstance(group, dict) and isinstance(group.get("betas"), list):
        return {**group, "betas": tuple(group["betas"])}
    return group
