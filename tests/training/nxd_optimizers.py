"""Doubles of NxD's optimizers on torch-xla's own ZeRO-1: to be imported on ranks only."""

from collections.abc import Callable
from typing import Any

import torch
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

Group = dict[str, Any]
Groups = list[list[int]]


class Zero1(ZeroRedundancyOptimizer):  # type: ignore[misc]
    """NeuronZero1Optimizer: ``lazy_init`` waits for the pipeline model's partition, then ``init_zero``."""


class ExpertZero1(Zero1):
    """NeuronEPZero1Optimizer: outer param groups of all parameters, which schedulers know, and two inner optimizers.

    Steps copy the outer groups' options onto the inner ones first; the state dict has the inner ones as they are.
    """

    def __init__(self, params: Any, optimizer_class: Any, expert_groups: Groups, **settings: Any) -> None:
        groups: list[Group] = list(params) if isinstance(params[0], dict) else [{"params": list(params)}]
        ordinary, experts = (_only(groups, wanted) for wanted in (False, True))
        self.non_ep_zero_optimizer = Zero1(ordinary, optimizer_class, **settings)
        self.ep_zero_optimizer = Zero1(experts, optimizer_class, **{**settings, "sharding_groups": expert_groups})
        super().__init__(groups, optimizer_class, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        self.hand_down()
        for inner in self._inner:
            inner.step(**options)

    def hand_down(self) -> None:
        """What every step begins with."""
        for inner in self._inner:
            self._sync_param_groups(self.param_groups, inner.param_groups)

    def zero_grad(self, set_to_none: bool = False) -> None:
        for inner in self._inner:
            inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        first, second = (inner.state_dict() for inner in self._inner)
        offsets = {key: max(first[key], default=0) + 1 for key in ("state", "base_state", "shape_info")}

        def both(key: str) -> dict[int, Any]:
            return {**first[key], **{offsets[key] + index: value for index, value in second[key].items()}}

        return {
            "ep_param_id_offset": offsets["state"],
            "ep_param_group_offset": len(first["param_groups"]),
            "ep_base_state_offset": offsets["base_state"],
            "ep_shape_info_offset": offsets["shape_info"],
            "param_groups": first["param_groups"] + second["param_groups"],
            "state": both("state"),
            "base_state": both("base_state"),
            "shape_info": both("shape_info"),
        }

    @property
    def _inner(self) -> tuple[Zero1, Zero1]:
        return self.non_ep_zero_optimizer, self.ep_zero_optimizer


def _only(groups: list[Group], experts: bool) -> list[Group]:
    def wanted(parameter: Any) -> bool:
        return bool(getattr(parameter, "expert_model_parallel", False)) is experts

    return [{**group, "params": list(filter(wanted, group["params"]))} for group in groups]
