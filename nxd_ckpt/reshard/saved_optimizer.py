"""A saved optimizer's state by parameter name, for every form of its tree; names where its files number them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nxd_ckpt.core.parameter_names import NOT_DECAYED, grouped
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import MalformedFile, OptimizerMismatch
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS, MASTER_WEIGHTS, MASTERS, STEP, options_of, split
from nxd_ckpt.formats.tensors import form_of, is_tensor
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.reshard.reshard_context import ReshardContext
from nxd_ckpt.tag.opened import OpenTag

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
    def filled(self) -> set[str]:
        """The keys of its entries that have a value."""
        return {str(key) for key, value in self.entries.items() if value is not None}

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
    groups = tree["param_groups"]
    section = tree["base_state"] if "base_state" in tree else tree["state"]
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
        state = tree["base_state"]
        masters = tree.get(MASTERS, {})
        shapes = tree["shape_info"]
    else:
        state = tree["state"]
        masters = {}
        shapes = {}
    slots = []
    for number, group in enumerate(tree["param_groups"]):
        options = options_of(group)
        for index in group["params"]:
            shape = tuple(shapes[index]) if index in shapes else None
            slots.append(SavedSlot(number, options, state.get(index, {}), masters.get(index), shape, expert))
    return slots


def is_number(name: str) -> bool:
    """Return True for "#3" and the like: the number of a parameter whose name is not known."""
    return name.startswith("#")


def recorded_names(opened: OpenTag, at: Coordinates | None = None) -> list[str] | None:
    """Return the names that the tag records for a rank's optimizer, by default rank 0's; None if it has numbers."""
    names = opened.optimizer_names(at or Coordinates())
    return None if names is None or any(map(is_number, names)) else names


@dataclass(frozen=True)
class OptimizerNames:
    """Sources of parameter names; the first one that applies wins.

    Attributes:
        saved: names as they were saved, by pipeline stage and param group, from the caller.
        live: names of the live optimizer's parameters, by number. They name the entries of a tag without names, by
            position, if pipeline stages and experts are the same.
        by_position: live parameters have no names but "#0", "#1", ...; entries match by position.
        numbered: there is no live optimizer; entries without names are "#0", "#1", ..., or with several stages "#0.0",
            "#1.0".
    """

    saved: SavedNames | None = None
    live: Sequence[str] | None = None
    by_position: bool = False
    numbered: bool = False

    def of_rank(self, context: ReshardContext, at: Coordinates) -> list[str] | None:
        """Return the names of the parameters that this saving rank saved, by number; None if numbers name them.

        Raises OptimizerMismatch if no source has them, or ``saved`` lists another number of stages than the tag has.
        """
        opened = context.opened
        saved = context.saved
        live = context.live
        if self.saved is not None:
            if len(self.saved) != saved.pp:
                raise OptimizerMismatch(
                    f"saved_param_names= must list the param groups of each of the {saved.pp} pipeline stages that "
                    f"{opened.where} was saved on, found {len(self.saved)} stages"
                )
            return [name for group in self.saved[at.pp_rank] for name in group]
        same_stages = (saved.pp, saved.ep) == (live.pp, live.ep)
        names = None if self.by_position and same_stages else recorded_names(opened, at)
        if names is not None:
            return names
        if self.numbered or (same_stages and self.live is None and not self.by_position):
            return None
        if saved.pp == live.pp and not same_stages and context.experts is not None and self.live:
            # A ZeRO-1 optimizer of experts keeps them apart, behind the others.
            return sorted(self.live, key=context.is_expert) if context.is_sharded else list(self.live)
        # Of several stages each has an entry at every position.
        if same_stages and len(context.stages) == 1:
            return None if self.live is None else list(self.live)
        raise OptimizerMismatch(
            f"{opened.where}, saved on {saved.describe()}, does not name the parameters of its optimizer, and on "
            f"{live.describe()} their order does not identify them. Pass saved_param_names=: for each pipeline stage "
            "that it was saved on, for each param group (experts' last), the names in order"
        )

    def prefix(self, context: ReshardContext, at: Coordinates) -> str:
        """Return the text before the number, where a number stands for a name."""
        return f"#{at.pp_rank}." if self.numbered and context.saved.pp > 1 else "#"


COMPUTED = "rotary_emb.inv_freq"
"""The end of names of buffers that are no parameters."""


def group_names(opened: OpenTag, stages: Sequence[Sequence[str]] | None = None) -> SavedNames | None:
    """Return the names of the optimizer's parameters; None if the tag has them, or has no optimizer.

    ``stages`` are the model's parameters of each stage, in order, by default those of the tag.

    Raises OptimizerMismatch if no usual groups fit the sizes and shapes of the saved ones.
    """
    if opened.parts.optimizer is None:
        return None
    if recorded_names(opened) is not None:
        return None
    all_stages = [_Stage(opened, pp_rank, stages) for pp_rank in range(opened.topology.pp)]
    for patterns in NOT_DECAYED:
        names_by_stage = [stage.names(patterns) for stage in all_stages]
        if all(names is not None for names in names_by_stage):
            return [names for names in names_by_stage if names is not None]
    counts = [[len(group) for group in stage.groups] for stage in all_stages]
    raise OptimizerMismatch(
        f"{opened.where} does not name the parameters of its optimizer, and its writer does not usually make groups of "
        f"{counts} parameters of this model, so names cannot be derived; pass saved_param_names=: for each pipeline "
        "stage, for each param group, the names in order"
    )


def saved_groups(opened: OpenTag, pp_rank: int) -> list[list[SavedSlot]]:
    """Return the slots of each param group of a pipeline stage, by number."""
    saved = saved_optimizer(opened.optimizer_tree(Coordinates(pp_rank)), None, "#", lambda name: None, opened.where)
    groups: list[list[SavedSlot]] = [[] for _ in saved.groups]
    for slot in saved.slots.values():
        groups[slot.group].append(slot)
    return groups


class _Stage:
    """One pipeline stage: its parameters in the model's order, and the saved slots of its optimizer."""

    def __init__(self, opened: OpenTag, pp_rank: int, stages: Sequence[Sequence[str]] | None) -> None:
        at = Coordinates(pp_rank)
        self.shapes = {
            name: form_of(leaf)[1]
            for name, leaf in (opened.model_tree(at) if opened.parts.model else {}).items()
            if is_tensor(leaf) and not name.endswith(COMPUTED)
        }
        self._parameters = list(self.shapes) if stages is None else list(stages[pp_rank])
        self.groups = saved_groups(opened, pp_rank)

    def names(self, patterns: Iterable[str]) -> list[list[str]] | None:
        """Return the names by group, those with one of ``patterns`` in the second group; None if they do not fit."""
        shapes = [[slot.likely_shape for slot in slots] for slots in self.groups]
        return grouped({name: self.shapes.get(name) for name in self._parameters}, shapes, patterns)
