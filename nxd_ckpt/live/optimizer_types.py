"""Types in an optimizer's state dict that NxD's files change; its live class compared; names of its parameters.

torch loads another class's state, and fails or drifts later. Each class's entries are those of torch.optim 2.5 to 2.14.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch
from nxd_ckpt.formats.optimizer_trees import OPTIMIZER_NAME, VALUE
from nxd_ckpt.live.model import ModelAdapter

_OPTIONS = {
    *("betas", "eps", "amsgrad", "momentum", "dampening", "nesterov", "alpha", "centered", "rho", "lr_decay"),
    *("initial_accumulator_value", "lambd", "t0", "momentum_decay", "etas", "step_sizes", "beta2_decay", "d"),
    *("ns_coefficients", "ns_steps", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn"),
}
"""Options that tell the class of torch.optim of a param group; others come and go with releases and schedulers."""

_ENTRIES = {
    "Adadelta": {"square_avg", "acc_delta"},
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "ASGD": {"eta", "mu", "ax"},
    "NAdam": {"mu_product", "exp_avg", "exp_avg_sq"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg"},
    "Rprop": {"prev", "step_size"},
    "SparseAdam": {"exp_avg", "exp_avg_sq"},
}
"""Entries that classes of torch.optim keep for each parameter after its first step, with any options."""


def check_class(optimizer: Any, groups: Iterable[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
    """Raise OptimizerMismatch for param groups or state of several optimizers, or of one of another class."""
    kind, groups = type(optimizer), list(groups)
    several = {group[OPTIMIZER_NAME] for group in groups if OPTIMIZER_NAME in group}
    if len(several) > 1:
        raise OptimizerMismatch(
            f"optimizer: the checkpoint holds several by name ({first_of(sorted(map(repr, several)))}), not one; pass "
            "them as a dict, optimizer={name: optimizer}, or one of them with its model's prefix="
        )
    for number, (live, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        unknown = sorted((saved.keys() & _OPTIONS) - live.keys())
        if unknown:
            raise OptimizerMismatch(
                f"optimizer: param group {number} was saved with {first_of(unknown)}, which the live {kind.__name__} "
                "does not know: another class of optimizer saved it; build that one, or load with optimizer=None"
            )
    if not kind.__module__.startswith("torch.optim"):
        return
    needed = _ENTRIES.get(kind.__name__, set())
    for index, entries in state.items():
        if isinstance(index, str) or not isinstance(entries, Mapping):
            continue
        lost = needed - entries.keys()
        if lost and entries.keys() - {VALUE}:
            raise OptimizerMismatch(
                f"optimizer: the state of parameter {index} has {first_of(map(str, entries))}, and not "
                f"{first_of(sorted(lost))}, without which {kind.__name__} cannot step: another class of optimizer "
                "saved it; build that one, or load with optimizer=None"
            )


def parameter_names(
    groups: Sequence[dict[str, Any]], model: ModelAdapter | None, param_names: Sequence[Sequence[str]] | None
) -> list[str]:
    """Return a name for each parameter, in the order of their indices; "#3" where it is unknown.

    ``groups`` may be live ones, or a state dict's, which have indices in place of parameters.
    """
    if param_names is not None:
        return _checked(param_names, [len(group["params"]) for group in groups])
    name_by_id = {} if model is None else model.parameter_names()
    names: list[str] = []
    for group in groups:
        own_names = group.get("param_names") or [None] * len(group["params"])  # torch: built from named parameters
        for parameter, own in zip(group["params"], own_names, strict=True):
            names.append(name_by_id.get(id(parameter)) or own or f"#{len(names)}")
    return names


def if_known(names: Sequence[str]) -> list[str] | None:
    """Return ``names``, or None if all are unknown."""
    return None if all(name.startswith("#") for name in names) else list(names)


def _checked(param_names: Sequence[Sequence[str]], sizes: list[int]) -> list[str]:
    if [len(names) for names in param_names] != sizes:
        raise InvalidArgument(
            f"param_names must list the names of each param group's parameters: expected lists of {sizes} names, "
            f"found {[len(names) for names in param_names]}"
        )
    flat = [name for names in param_names for name in names]
    twice = sorted(name for name, times in Counter(flat).items() if times > 1)
    if twice:
        raise InvalidArgument(f"param_names must be unique, found more than once: {twice[:8]}")
    return flat
