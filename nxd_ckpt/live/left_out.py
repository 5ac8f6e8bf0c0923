"""Parameters without elements on this rank, which its optimizer leaves out and other ranks' optimizers hold.

FSDP cuts a parameter of two rows over four ranks; ranks without a row may leave it out of their optimizer. To the other
ranks it is one of the optimizer's parameters, so here it counts as one too, with empty state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nxd_ckpt.live.dtensor import is_dtensor, like, local_of
from nxd_ckpt.live.model import ModelAdapter


def with_left_out(groups: Sequence[Mapping[str, Any]], model: ModelAdapter) -> list[list[torch.Tensor]]:
    """Return the parameters of each group, and those that were left out, in the order of the model.

    Nothing is added if trained parameters with elements are left out, too: then the reason is another one.
    """
    params = [list(group["params"]) for group in groups]
    group_of = {id(one): number for number, own in enumerate(params) for one in own}
    trained = [one for one in model.live.values() if isinstance(one, torch.nn.Parameter) and one.requires_grad]
    if any(id(one) not in group_of and not (is_dtensor(one) and local_of(one).numel() == 0) for one in trained):
        return params
    for place, one in enumerate(trained):
        if id(one) not in group_of:
            # Groups with and without weight decay differ in the number of dimensions.
            near = [each for each in (*reversed(trained[:place]), *trained[place:]) if id(each) in group_of]
            like_it = [each for each in near if each.dim() == one.dim()] or near
            number = group_of[id(like_it[0])] if like_it else 0
            params[number].insert(sum(group_of.get(id(each)) == number for each in trained[:place]), one)
            group_of[id(one)] = number
    return params


def with_empty_state(
    state: Mapping[str, Any], params: Sequence[Sequence[torch.Tensor]], held: set[int]
) -> dict[str, Any]:
    """Return an optimizer's state dict as if it held all of ``params``, of which it holds those with ids ``held``.

    What it leaves out has the entries of another parameter, without elements.
    """
    indices = iter([index for group in state["param_groups"] for index in group["params"]])
    every = [one for own in params for one in own]
    of_held = {number: next(indices) for number, one in enumerate(every) if id(one) in held}
    own = {number: state["state"][index] for number, index in of_held.items() if index in state["state"]}
    model, entries = next(((every[number], entries) for number, entries in own.items()), (None, {}))
    filled = {
        number: own.get(number) or {entry: _empty(value, model, every[number]) for entry, value in entries.items()}
        for number in range(len(every))
        if number in own or number not in of_held
    }
    whole = {key: value for key, value in state["state"].items() if isinstance(key, str)}
    numbers = iter(range(len(every)))
    groups = [
        {**group, "params": [next(numbers) for _ in its]}
        for group, its in zip(state["param_groups"], params, strict=True)
    ]
    return {**state, "state": {number: its for number, its in filled.items() if its} | whole, "param_groups": groups}


def _empty(value: Any, model: torch.Tensor | None, parameter: torch.Tensor) -> Any:
    """Return the entry ``value`` of the parameter ``model`` for a ``parameter`` without elements."""
    if is_dtensor(value) and model is not None and value.shape == model.shape:
        return like(torch.empty_like(local_of(parameter).detach(), dtype=value.dtype), parameter)
    return value.clone() if isinstance(value, torch.Tensor) else value
