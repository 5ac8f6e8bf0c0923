"""Bounds that an optimizer's state obeys from one tag to the next, with any data. Pure.

For Adam and its kin, with gradients g and second moments v = b2 v + (1 - b2) g^2:

- v falls by no more than the factor b2 per step;
- m = b1 m + (1 - b1) g is bounded by the root of v, by Cauchy and Schwarz: m^2 <= v (1 - b1)^2 / ((1 - b2) (1 - b1^2 /
  b2)), if b1^2 < b2.

Both hold for each element. State of another parameter, or of another shard, breaks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

FIRST = ("exp_avg", "momentum_buffer")
SECOND = ("exp_avg_sq", "square_avg")
_GROWING = ("max_exp_avg_sq", "sum")
_SLACK = 2.0
"""Tolerance, because some schedulers change b1 during training."""


def decay(entry: str, options: Mapping[str, Any]) -> float | None:
    """Return the least factor of the entry from one step to the next; None if none is known."""
    if entry in ("exp_avg_sq", "exp_inf"):
        return _betas(options)[1]
    if entry == "square_avg":
        return _share(options.get("alpha", options.get("rho")))
    if entry in _GROWING and ("betas" in options) == (entry != "sum"):
        return 1.0
    return None


def least_ratio(factor: float, steps: int, precision: float) -> float:
    """Return ``factor`` to the power ``steps``, lowered for rounding with a dtype's relative ``precision``."""
    return float((factor * max(0.0, 1 - 2 * precision)) ** steps * (1 - 1e-3))


def momentum_bound(options: Mapping[str, Any]) -> float | None:
    """Return the largest ratio of ``|m|`` to the root of v; None if no bound is known."""
    first, second = _betas(options)
    if first is None or second is None or first**2 >= second:
        return None
    return _SLACK * (1 - first) / sqrt((1 - second) * (1 - first**2 / second))


def least_update(options: Mapping[str, Any], first: float, second: float | None) -> float | None:
    """Return the least change of the weight with the largest first moment, in one step.

    ``first`` and ``second`` are the largest first and second moments. None if the options do not determine it.
    """
    rate, small = _number(options.get("lr")), _number(options.get("eps", 0.0))
    if rate is None or small is None:
        return None
    if second is None or _may_not_divide(options):
        return rate * first
    return rate * first / (sqrt(second) + small) if second or small else None


def _may_not_divide(options: Mapping[str, Any]) -> bool:
    """Return True for RAdam, by its options: in its first steps it does not divide by the second moment."""
    return "decoupled_weight_decay" in options and not {"amsgrad", "momentum_decay"} & options.keys()


def _betas(options: Mapping[str, Any]) -> tuple[float | None, float | None]:
    betas = options.get("betas")
    if not isinstance(betas, (list, tuple)) or len(betas) != 2:
        return None, None
    return _share(betas[0]), _share(betas[1])


def _share(value: Any) -> float | None:
    """Return a number from 0 to 1, 1 excluded, or None."""
    number = _number(value)
    return number if number is not None and 0 <= number < 1 else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
