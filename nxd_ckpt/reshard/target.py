"""State of a rank of other sizes without a live model: derived from the saved state and NxD's conventions.

Tools use it, and loads into empty dicts. A live pipeline model knows the names of its stages; here they follow from all
names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import OptimizerMismatch, PartNotFound, TopologyMismatch
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS, MASTERS, STEP
from nxd_ckpt.formats.state import ModelState, OptimizerForm, OptimizerSlot, SaveState, State, StateTensor
from nxd_ckpt.formats.tensors import Assembly, Path, TensorStub, form_of, iter_tensors
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.reshard.reshard_context import ReshardContext
from nxd_ckpt.reshard.resharded_state import recorded_state
from nxd_ckpt.reshard.saved_optimizer import SavedSlot, is_number, recorded_names
from nxd_ckpt.tag.opened import OpenTag

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def redistribute_layers(saved: Sequence[Sequence[str]], pp: int) -> list[list[str]]:
    """Return the names of each of ``pp`` stages, in the model's order, from the names of each saved stage.

    A single stage holds all names. Otherwise the repeated layers (the most numerous ``prefix.N.``) are spread evenly;
    a remainder goes to the last stages, one layer each (as in NxD's pipeline.partition). Names before the layers go to
    the first stage, names after them to the last. A name that several stages held (a tied embedding) goes to both.

    Raises:
        TopologyMismatch: fewer layers than stages.
    """
    if len(saved) == pp:
        return [list(names) for names in saved]
    order = list(dict.fromkeys(name for names in saved for name in names))
    if pp == 1:
        return [order]
    layers = _layers(order)
    count = len(set(layers.values()))
    if count < pp:
        raise TopologyMismatch(
            f"{pp} pipeline stages for {count} repeated layers: each stage needs one; choose a smaller pp"
        )
    sizes = [count // pp + (stage >= pp - count % pp) for stage in range(pp)]
    stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    rank_of = dict(zip(sorted(set(layers.values())), stage_of, strict=True))
    last_layer = max(index for index, name in enumerate(order) if name in layers)
    stages: list[list[str]] = [[] for _ in range(pp)]
    for index, name in enumerate(order):
        if name in layers:
            stages[rank_of[layers[name]]].append(name)
        elif sum(name in names for names in saved) > 1:
            stages[0].append(name)
            stages[-1].append(name)
        else:
            stages[0 if index < last_layer else -1].append(name)
    return stages


def interleaved(chunks: Sequence[Sequence[str]], pp: int) -> list[list[str]]:
    """Return the names of each of ``pp`` ranks of an interleaved pipeline: chunks are dealt to the ranks in turn.

    This is NxD's pipeline.partition.stage_to_pipeline_parallel_rank. A rank saves its chunks as one model.
    """
    return [[name for chunk in chunks[rank::pp] for name in chunk] for rank in range(pp)]


def _layers(names: Sequence[str]) -> Mapping[str, int]:
    """Return the layer number of every name that has one, for the prefix with the most different numbers."""
    numbers: dict[str, set[int]] = {}
    numbers_by_name: dict[str, list[tuple[str, int]]] = {}
    for name in names:
        for match in _NUMBER.finditer(name):
            prefix = name[: match.start()]
            number = int(match[1])
            numbers.setdefault(prefix, set()).add(number)
            numbers_by_name.setdefault(name, []).append((prefix, number))
    if not numbers:
        return {}
    best = max(numbers, key=lambda prefix: (len(numbers[prefix]), -len(prefix)))
    return {name: number for name, places in numbers_by_name.items() for prefix, number in places if prefix == best}


_LEAVES = (TensorStub, Assembly)


def _nothing(name: str) -> bool:
    """Ignore no name. Not a lambda: targets are sent to worker processes, so it must pickle."""
    return False


@dataclass(frozen=True)
class Target:
    """The form that a tag is to take on the rank of ``topology``.

    Attributes:
        topology: sizes of the new job, and the rank in it.
        optimizer: "zero1", "zero1_full" or "plain"; None keeps the kind.
        use_xser: True or False; None keeps it.
        model: True to include the model; the optimizer is always included if the tag has one.
        partitions: cuts of parameters of the tag, by name, where it does not record them.
        stages: the names of each of the target's pipeline stages; by default from `redistribute_layers`.
        saved_names: the optimizer's parameter names as saved, by stage and group, where the tag has none.
        ignores: a predicate on names of the model; True leaves the tensor out.
    """

    topology: Topology
    optimizer: str | None = None
    use_xser: bool | None = None
    model: bool = True
    partitions: Mapping[str, Partition] | None = None
    stages: Sequence[Sequence[str]] | None = None
    saved_names: SavedNames | None = None
    ignores: Callable[[str], bool] = field(default=_nothing, repr=False)


def target_state(opened: OpenTag, target: Target) -> SaveState:
    """Return model and optimizer as the target's rank would save them; leaves stand for saved tensors.

    Raises:
        TopologyMismatch: the sizes do not divide a parameter, or its cut is not known.
        OptimizerMismatch: the parameters of the optimizer's entries are not known.
    """
    rank = TargetRank(opened, target)
    parts = opened.parts
    form = None if parts.optimizer is None else rank.form
    return SaveState(
        model=rank.model_state() if parts.model and target.model else None,
        optimizer=None if form is None else rank.optimizer_state(),
        optimizer_kind=None if form is None else form.kind,
        optimizer_names=None if form is None else _if_named(slot.name for slot in form.slots),
        use_xser=parts.use_xser if target.use_xser is None else target.use_xser,
    )


class TargetRank:
    """One rank of the target: the model of its stage, and the saved param groups, restricted to that stage."""

    def __init__(self, opened: OpenTag, target: Target) -> None:
        self._target = target
        self._topology = target.topology
        self._parts = opened.parts
        self._state = recorded_state(
            opened, target.topology, partitions=target.partitions, saved_names=target.saved_names
        )
        self._context = self._state.context
        self._optimizer = self._state.optimizer
        if opened.parts.model:
            _check_experts(self._context)

    @cached_property
    def stages(self) -> Sequence[Sequence[str]]:
        """Names of each pipeline stage of the target."""
        listed = self._target.stages
        pp = self._topology.pp
        if listed is not None and len(listed) != pp:
            raise TopologyMismatch(f"stages= lists {len(listed)} pipeline stages, but pp is {pp}")
        return listed or redistribute_layers(list(self._state.model.names.values()), pp)

    @cached_property
    def specs(self) -> dict[str, ParameterSpec]:
        """Tensors of this rank, with the shapes and cuts that it holds."""
        forms = ((name, self._state.model.form(name)) for name in self._names)
        return {name: self._context.as_recorded(name, *form) for name, form in forms if form is not None}

    def model_tree(self) -> dict[str, Any]:
        """Return the model's state dict; weights that were not saved come from the optimizer's master weights."""
        names = self._names
        tree = self._state.model.tree(self.specs, names)
        absent = [name for name in names if name not in tree]
        if absent:
            raise PartNotFound(f"{self._context.opened.where}: no stage holds {absent[:5]}, which stages= lists")
        return {name: self._state.required_weight(name, tree[name]) for name in names}

    def model_state(self) -> ModelState:
        """Return the model with the description of each tensor, ready to be saved."""
        tree = self.model_tree()
        ties = _ties(tree)
        tensors: dict[Path, StateTensor] = {}
        for path, _ in iter_tensors(tree, _LEAVES):
            name = "/".join(map(str, path))
            spec = self.specs.get(name)
            expert = spec is not None and spec.partition.expert
            tensors[path] = StateTensor(f"model/{name}", spec, tie=ties.get(name), expert=expert)
        return ModelState(tree, lambda: tensors, specify=lambda: dict(self.specs))

    @property
    def _names(self) -> list[str]:
        """Names of this rank's stage, without ignored ones."""
        return [name for name in self.stages[self._topology.pp_rank] if not self._target.ignores(name)]

    @cached_property
    def form(self) -> OptimizerForm:
        """The optimizer's form.

        With ZeRO-1 and expert parallelism each group is there twice, without and of experts.

        Raises OptimizerMismatch where only names could tell whose its entries are, and nobody knows them.
        """
        _check_names(self._context, self._target)
        kind = self._target.optimizer or self._parts.optimizer or "plain"
        kind = "zero1" if kind == "zero1_dcp" else kind
        slots = self._slots_here()
        numbers = range(len(self._optimizer.groups))
        apart = kind != "plain" and self._topology.ep > 1
        kinds = [{False}, {True}] if apart else [{False, True}]
        groups = [
            [name for name, slot in slots.items() if slot.group == number and self._is_expert(name, slot) in kind]
            for kind in kinds
            for number in numbers
        ]
        own = [len(names) for names in groups[: len(numbers)]]
        return OptimizerForm(
            kind,
            tuple(self._slot(name, slots[name], kind) for names in groups for name in names),
            tuple(map(len, groups)),
            (sum(own), len(own)) if apart else None,
        )

    def optimizer_tree(self) -> dict[str, Any]:
        """Return the optimizer's state dict."""
        return self._optimizer.tree(self.form)

    def optimizer_state(self) -> State:
        """Return the optimizer with the description of each tensor, ready to be saved."""
        tree = self.optimizer_tree()
        return State(tree, lambda: {path: self._describe(path, leaf) for path, leaf in iter_tensors(tree, _LEAVES)})

    def _slots_here(self) -> dict[str, SavedSlot]:
        """Return the saved slots of this rank, in saved order, or in the model's if experts come back to it."""
        slots = {name: slot for name, slot in self._optimizer.slots.items() if name in self._stage_names}
        rejoined = self._context.saved.ep > 1 and self._topology.ep == 1
        if not rejoined or not self._parts.model:
            return slots
        order = [name for name in self.stages[self._topology.pp_rank] if name in slots]
        return {name: slots[name] for name in [*order, *slots]}

    @cached_property
    def _stage_names(self) -> set[str]:
        """Parameters on this rank's stage."""
        stages = list(self._optimizer.stages.values())
        topology = self._topology
        if self._target.stages is None and len(stages) == topology.pp:
            return set(stages[topology.pp_rank])
        if self._parts.model:
            return set(self.stages[topology.pp_rank])
        return set(redistribute_layers([list(slots) for slots in stages], topology.pp)[topology.pp_rank])

    def _slot(self, name: str, saved: SavedSlot, kind: str) -> OptimizerSlot:
        spec = self._context.as_recorded(name, "float32", saved.likely_shape, expert=saved.expert)
        topology = self._topology
        if kind != "zero1":
            return OptimizerSlot(name, spec)
        if topology.ep > 1 and self._is_expert(name, saved):
            return OptimizerSlot(name, spec, topology.expert_dp, topology.expert_dp_rank)
        return OptimizerSlot(name, spec, topology.dp, topology.dp_rank)

    def _is_expert(self, name: str, slot: SavedSlot) -> bool:
        recorded = self._context.recorded.get(name)
        return slot.expert or (recorded is not None and recorded.partition.expert)

    def _describe(self, path: Path, leaf: Any) -> StateTensor:
        section, *rest = path
        if section not in ("state", "base_state", MASTERS) or not rest or not isinstance(rest[0], int):
            return StateTensor("/".join(map(str, ("optim", *path))))
        slot = self.form.slots[rest[0]]
        key = rest[1] if len(rest) > 1 else MASTER_WEIGHTS
        name = f"optim/{slot.name}/{key}"
        expert = slot.spec.partition.expert
        if key == STEP or len(form_of(leaf)[1]) != len(slot.spec.shape):
            return StateTensor(name, expert=expert)
        return StateTensor(name, slot.spec, slot.shards, slot.shard, expert=expert)


def _check_names(context: ReshardContext, target: Target) -> None:
    """Raise OptimizerMismatch without parameter names, unless positions suffice: all sizes but dp are equal."""
    opened = context.opened
    saved = context.saved
    live = context.live
    has_names = target.saved_names is not None or recorded_names(opened) is not None
    if not has_names and (saved.tp, saved.pp, saved.ep) != (live.tp, live.pp, live.ep):
        raise OptimizerMismatch(
            f"{opened.where} does not name the parameters of its optimizer, but to go from {saved.describe()} to "
            f"{live.describe()} the names are needed. Pass saved_param_names=: for each pipeline stage that it was "
            "saved on, for each param group, the names in order"
        )


def _check_experts(context: ReshardContext) -> None:
    """Raise TopologyMismatch if experts are to be cut, but the tag marks no parameters as experts'."""
    saved = context.saved
    live = context.live
    if live.ep == saved.ep or live.ep == 1 or any(spec.partition.expert for spec in context.recorded.values()):
        return
    raise TopologyMismatch(
        f"{context.opened.where}, saved on {saved.describe()}, marks no parameter as an expert's; for ep={live.ep} "
        "pass partitions= with expert=True for the experts' parameters"
    )


def _ties(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each name that shares its leaf (equal bytes of one file, in one form), the first that shares it."""
    names: dict[Any, list[str]] = {}
    for name, leaf in tree.items():
        if isinstance(leaf, _LEAVES):
            of_stub = isinstance(leaf, TensorStub) and (leaf.file, leaf.offset, leaf.stride, *form_of(leaf))
            names.setdefault(of_stub or leaf, []).append(name)
    return {name: group[0] for group in names.values() if len(group) > 1 for name in group}


def _if_named(names: Iterable[str]) -> tuple[str, ...] | None:
    listed = tuple(names)
    return None if any(map(is_number, listed)) else listed
