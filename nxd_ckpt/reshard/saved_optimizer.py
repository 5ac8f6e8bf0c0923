"""A saved optimizer's state by parameter name, for every form of its tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_ckpt.errors import MalformedFile, OptimizerMismatch
from nxd_ckpt.live.optimizer_state import STEP, options_of
from nxd_ckpt.live.parameters import form_of, is_tensor
from nxd_ckpt.live.state import MASTER_WEIGHTS
from nxd_ckpt.live.zero1 import EXPERT_KEYS, MASTERS, split

_USUAL_KEYS = {"state", "param_groups", "base_state", "shape_info", MASTERS, *EXPERT_KEYS}
"""Keys in the state dicts of torch's and NxD's optimizers."""


@dataclass(frozen=True)
class SavedSlot:
    """One rank's saved optimizer state of one parameter.

    Attributes:
        group: number of its param group.
        options: options of that group.
        entries: state by key ("step", "exp_avg", ...), leaves and plain values; empty if it never had a gradient.
        master: the rank's shard of the master weights, or None.
        shape: the parameter's shape on that rank, before ZeRO-1; None if not recorded.
        expert: True if it is in the experts' own optimizer, whose groups are numbered from 0 too.
    """

    group: int
    options: Mapping[str, Any]
    entries: Mapping[str, Any] = field(default_factory=dict)
    master: Any = None
    shape: tuple[int, ...] | None = None
    expert: bool = False

    @property
    def state(self) -> Mapping[str, Any]:
        """The entries, with the master weights if there are any."""
        return self.entries if self.master is None else {**self.entries, MASTER_WEIGHTS: self.master}

    @property
    def likely_shape(self) -> tuple[int, ...]:
        """``shape``; if not recorded, the shape of the largest entry."""
        if self.shape is not None:
            return self.shape
        shapes = [form_of(leaf)[1] for key, leaf in self.entries.items() if key != STEP and is_tensor(leaf)]
        return max(shapes, key=len, default=())


@dataclass(frozen=True)
class SavedOptimizer:
    """One rank's saved state of an optimizer.

    Attributes:
        slots: the parameters by name, in the order of their numbers.
        groups: options of each param group, also of empty ones; without experts' own groups.
        general: state that belongs to no parameter.
        own: keys that the optimizer's class adds to torch's state dict.
    """

    slots: Mapping[str, SavedSlot]
    groups: Sequence[Mapping[str, Any]]
    general: Mapping[str, Any]
    own: Mapping[str, Any] = field(default_factory=dict)


def saved_optimizer(
    tree: Mapping[str, Any],
    names: Sequence[str] | None,
    prefix: str,
    shape: Callable[[str], tuple[int, ...] | None],
    where: str,
) -> SavedOptimizer:
    """Parse one rank's state dict ``tree``.

    Without ``names``, a parameter is called by ``prefix`` and its number. ``shape`` gives a parameter's shape by name,
    for optimizers that do not record it.

    Raises:
        OptimizerMismatch: the number of ``names`` is not that of the parameters, or a shape is not that of its name.
        MalformedFile: not an optimizer's state dict.
    """
    try:
        slots = _flat(tree)
    except (KeyError, TypeError, AttributeError) as error:
        raise MalformedFile(f"{where}: not the state dict of an optimizer ({type(error).__name__}: {error})") from error
    names = [f"{prefix}{index}" for index in range(len(slots))] if names is None else names
    if len(names) != len(slots):
        raise OptimizerMismatch(
            f"{where}: the optimizer was saved with {len(slots)} parameters, but {len(names)} names were passed; list "
            "the parameters that it was saved with, per param group in order"
        )
    for name, slot in zip(names, slots, strict=True):
        expected = shape(name)
        if slot.shape is not None and expected is not None and slot.shape != expected:
            raise OptimizerMismatch(
                f"{where}: the parameter that is called {name!r} has shape {list(slot.shape)} in the optimizer, "
                f"expected {list(expected)}, as in the model; pass the names in the order in which it was saved"
            )
    groups, section = tree["param_groups"], tree["base_state"] if "base_state" in tree else tree["state"]
    return SavedOptimizer(
        {name: replace(slot, shape=slot.shape or shape(name)) for name, slot in zip(names, slots, strict=True)},
        [options_of(group) for group in groups[: tree.get("ep_param_group_offset", len(groups))]],
        {key: value for key, value in section.items() if isinstance(key, str)},
        {key: value for key, value in tree.items() if key not in _USUAL_KEYS},
    )


def _flat(tree: Mapping[str, Any]) -> list[SavedSlot]:
    if "base_state" not in tree or not all(key in tree for key in EXPERT_KEYS):
        return _slots(tree)
    ordinary, experts = split(tree)
    return [*_slots(ordinary), *_slots(experts, expert=True)]


def _slots(tree: Mapping[str, Any], *, expert: bool = False) -> list[SavedSlot]:
    if "base_state" in tree:
        state, masters, shapes = tree["base_state"], tree.get(MASTERS, {}), tree["shape_info"]
    else:
        state, masters, shapes = tree["state"], {}, {}
    return [
        SavedSlot(
            number,
            options_of(group),
            state.get(index, {}),
            masters.get(index),
            tuple(shapes[index]) if index in shapes else None,
            expert,
        )
        for number, group in enumerate(tree["param_groups"])
        for index in group["params"]
    ]
