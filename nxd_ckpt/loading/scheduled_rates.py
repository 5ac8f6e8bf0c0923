"""Learning rates that a scheduler had set when NxD saved ZeRO-1 with expert parallelism.

NxD saves the param groups of the two inner optimizers, which get the scheduler's rates only at the next step. The rates
that it set are only in the scheduler's own state. Conversions write what they read, so their results lack them too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from nxd_ckpt.tag.opened import OpenTag

logger = logging.getLogger("nxd_ckpt")


def lacks_scheduled_rates(opened: OpenTag) -> bool:
    """Return whether the optimizer's learning rates in this tag may be those of the step before the scheduler's."""
    from_nxd = opened.manifest is None or opened.manifest.is_converted
    experts = opened.topology.ep > 1 and opened.parts.optimizer not in (None, "plain")
    return from_nxd and experts and opened.parts.scheduler


def with_scheduled_rates(tree: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Return an optimizer's ``tree`` with the learning rates in the ``scheduler``'s state dict, if it has them."""
    groups, rates = tree["param_groups"], _rates(scheduler)
    if len(groups) == 2 * len(rates):  # experts have groups of their own
        rates = [*rates, *rates]
    if len(groups) != len(rates):
        logger.warning("learning rates are those of the last step, as NxD saves them: the scheduler's state has none")
        return tree
    if scheduler.get("cycle_momentum"):
        logger.warning("the momentum that the scheduler cycles is that of the last step, as NxD saves it")
    return {**tree, "param_groups": list(map(_with_rate, groups, rates))}


def _rates(scheduler: Any) -> list[float]:
    """Return the scheduler's rate of each param group; none if its state has no rates."""
    last = scheduler.get("_last_lr") if isinstance(scheduler, Mapping) else None
    numbers = [rate.item() if isinstance(rate, torch.Tensor) and rate.numel() == 1 else rate for rate in last or ()]
    return numbers if all(isinstance(number, (int, float)) for number in numbers) else []


def _with_rate(group: dict[str, Any], rate: float) -> dict[str, Any]:
    return {**group, "lr": rate} if "lr" in group else group
