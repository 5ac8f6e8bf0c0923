"""What a rank of other sizes holds when no live model says it: from what was saved and NxD's conventions.

For tools, and for loading into empty dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from nxd_ckpt.adapters.optimizer_state import STEP
from nxd_ckpt.adapters.parameters import form_of, is_tensor
from nxd_ckpt.adapters.state import MASTER_WEIGHTS, ModelState, OptimizerForm, OptimizerSlot, State, StateTensor
from nxd_ckpt.adapters.zero1 import MASTERS
from nxd_ckpt.core.manifest import CRC_BLOCK, ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.resharding import respecified
from nxd_ckpt.core.stages import restaged
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import OptimizerMismatch, PartNotFound, TopologyMismatch
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.tensors import Assembly, Path, TensorStub, iter_tensors
from nxd_ckpt.layout.files import MissingTensor
from nxd_ckpt.runtime.save.plan import SaveState
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.views.reshard_context import ReshardContext
from nxd_ckpt.runtime.views.resharded_model import ReshardedModel
from nxd_ckpt.runtime.views.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.runtime.views.saved_optimizer import SavedSlot

_LEAVES = (TensorStub, Assembly)


def _nothing(name: str) -> bool:
    """No name. A function with a name of its own, since targets are sent to worker processes."""
    return False


@dataclass(frozen=True)
class Target:
    """What to make of a tag for the rank that ``topology`` is seen from.

    Attributes:
        optimizer: "zero1", "zero1_full" or "plain"; None keeps the kind.
        use_xser: None keeps it.
        model: whether the model is wanted; the optimizer is where there is one.
        partitions: how parameters of the tag were cut, by name, where it does not say.
        stages: the names of each of the target's pipeline stages; by default as core.stages has it.
        saved_names: the optimizer's parameter names as saved, by stage and group, where the tag does not say.
        ignores: names of the model that are not wanted.
    """

    topology: Topology
    optimizer: str | None = None
    use_xser: bool | None = None
    model: bool = True
    partitions: Mapping[str, Partition] | None = None
    stages: Sequence[Sequence[str]] | None = None
    saved_names: Sequence[Sequence[Sequence[str]]] | None = None
    ignores: Callable[[str], bool] = field(default=_nothing, repr=False)


def target_state(opened: OpenTag, target: Target) -> SaveState:
    """What the target's rank would save: model and optimizer, with leaves that stand for saved tensors.

    Raises:
        TopologyMismatch: sizes that do not divide a parameter, or a cut that is not known.
        OptimizerMismatch: which parameters the optimizer's entries belong to is not known.
    """
    parts = opened.parts
    model = TargetModel(opened, target) if parts.model else None
    optimizer = None if parts.optimizer is None else TargetOptimizer(opened, target, model)
    return SaveState(
        model=model.state(optimizer) if model is not None and target.model else None,
        optimizer=None if optimizer is None else optimizer.state(),
        optimizer_kind=None if optimizer is None else optimizer.form.kind,
        optimizer_names=None if optimizer is None else _known(slot.name for slot in optimizer.form.slots),
        use_xser=parts.use_xser if target.use_xser is None else target.use_xser,
    )


class TargetModel:
    """The model of one rank of the target."""

    def __init__(self, opened: OpenTag, target: Target) -> None:
        recorded = recorded_parameters(opened, target.partitions or {})
        self._target = target
        self._context = ReshardContext(opened, target.topology, recorded=recorded, every_stage=True)
        _check_experts(self._context)
        self._source = ReshardedModel(self._context)

    @cached_property
    def stages(self) -> Sequence[Sequence[str]]:
        """The names of each stage of the target."""
        given, topology = self._target.stages, self._target.topology
        if given is not None and len(given) != topology.pp:
            raise TopologyMismatch(f"stages= lists {len(given)} pipeline stages, but pp is {topology.pp}")
        return given or restaged(list(self._source.stages().values()), topology.pp)

    @cached_property
    def specs(self) -> dict[str, ParameterSpec]:
        """The tensors of this rank, as it holds them."""
        mine = self._wanted
        forms: dict[str, tuple[str, tuple[int, ...]]] = {}
        for pp_rank in self._context.stages:
            tree = self._source.reference(pp_rank)
            forms |= {name: form_of(tree[name]) for name in mine if is_tensor(tree.get(name)) and name not in forms}
        return {name: respecified_here(self._context, name, *forms[name]) for name in mine if name in forms}

    def tree(self, optimizer: TargetOptimizer | None) -> dict[str, Any]:
        """The state dict; weights that were left out come from the master weights of ``optimizer``."""
        mine = self._wanted
        tree = self._source.tree(self.specs, mine, self._target.ignores)
        absent = [name for name in mine if name not in tree]
        if absent:
            raise PartNotFound(f"{self._context.opened.where}: no stage holds {absent[:5]}, which stages= names")
        return {name: self._present(name, tree[name], optimizer) for name in mine}

    def state(self, optimizer: TargetOptimizer | None) -> ModelState:
        """The same, to be saved."""
        tree = self.tree(optimizer)
        ties = _ties(tree)
        tensors: dict[Path, StateTensor] = {}
        for path, _ in iter_tensors(tree, _LEAVES):
            name = "/".join(map(str, path))
            spec = self.specs.get(name)
            expert = spec is not None and spec.partition.expert
            tensors[path] = StateTensor(f"model/{name}", spec, tie=ties.get(name), expert=expert)
        return ModelState(tree, lambda: tensors, specify=lambda: dict(self.specs))

    @property
    def _wanted(self) -> list[str]:
        """The names of this rank's stage that are wanted."""
        return [name for name in self.stages[self._target.topology.pp_rank] if not self._target.ignores(name)]

    def _present(self, name: str, leaf: Any, optimizer: TargetOptimizer | None) -> Any:
        if not isinstance(leaf, MissingTensor):
            return leaf
        found = None if optimizer is None else optimizer.master_weight(name, self.specs[name])
        if found is None:
            raise PartNotFound(
                f"{self._context.opened.where}: no file holds model/{name} ({leaf.file} is missing), and no master "
                "weights stand for it"
            )
        return found


class TargetOptimizer:
    """The optimizer of one rank of the target: the saved param groups, each with what is on this rank's stage."""

    def __init__(self, opened: OpenTag, target: Target, model: TargetModel | None) -> None:
        recorded = recorded_parameters(opened, target.partitions or {})
        self._opened, self._target, self._model = opened, target, model
        self._context = ReshardContext(opened, target.topology, recorded=recorded, every_stage=True)
        self._source = ReshardedOptimizer(self._context, saved_names=self._names_as_saved())

    @cached_property
    def form(self) -> OptimizerForm:
        """With ZeRO-1 and expert parallelism, each group is there twice: without its experts, and with them alone."""
        kind = self._target.optimizer or self._opened.parts.optimizer or "plain"
        kind = "zero1" if kind == "zero1_dcp" else kind
        slots = self._slots_here()
        numbers = range(len(self._source.groups()))
        apart = kind != "plain" and self._target.topology.ep > 1
        groups = [
            [name for name, slot in slots.items() if slot.group == number and self._is_expert(name, slot) in kinds]
            for kinds in (((False,), (True,)) if apart else ((False, True),))
            for number in numbers
        ]
        own = [len(names) for names in groups[: len(numbers)]]
        return OptimizerForm(
            kind,
            tuple(self._slot(name, slots[name], kind) for names in groups for name in names),
            tuple(map(len, groups)),
            (sum(own), len(own)) if apart else None,
        )

    def tree(self) -> dict[str, Any]:
        """The state dict."""
        return self._source.tree(self.form)

    def state(self) -> State:
        """The same, to be saved."""
        tree = self.tree()
        return State(tree, lambda: {path: self._describe(path, leaf) for path, leaf in iter_tensors(tree, _LEAVES)})

    def master_weight(self, name: str, spec: ParameterSpec) -> Assembly | None:
        """A parameter as its master weights have it, cast to its dtype; None where there are none."""
        return self._source.entry(name, MASTER_WEIGHTS, spec)

    def _slots_here(self) -> dict[str, SavedSlot]:
        """The saved slots of this rank's parameters: in saved order; in the model's where experts come back to it."""
        found: dict[str, SavedSlot] = {}
        for slots in self._source.stages().values():
            found |= {name: slot for name, slot in slots.items() if name in self._mine and name not in found}
        rejoined = self._opened.topology.ep > 1 and self._target.topology.ep == 1 and self._model is not None
        if not rejoined or self._model is None:
            return found
        order = [name for name in self._model.stages[self._target.topology.pp_rank] if name in found]
        return {name: found[name] for name in [*order, *found]}

    @cached_property
    def _mine(self) -> set[str]:
        """The parameters on this rank's stage."""
        stages, topology = list(self._source.stages().values()), self._target.topology
        if self._target.stages is None and len(stages) == topology.pp:
            return set(stages[topology.pp_rank])
        if self._model is not None:
            return set(self._model.stages[topology.pp_rank])
        return set(restaged([list(slots) for slots in stages], topology.pp)[topology.pp_rank])

    def _slot(self, name: str, saved: SavedSlot, kind: str) -> OptimizerSlot:
        shape = saved.shape or self._context.recorded_shape(name) or shape_of_entries(saved)
        spec = respecified_here(self._context, name, "float32", shape, expert=saved.expert)
        topology = self._target.topology
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
        name, expert = f"optim/{slot.name}/{key}", slot.spec.partition.expert
        if key == STEP or len(form_of(leaf)[1]) != len(slot.spec.shape):
            return StateTensor(name, expert=expert)
        return StateTensor(name, slot.spec, slot.shards, slot.shard, expert=expert)

    def _names_as_saved(self) -> Sequence[Sequence[Sequence[str]]] | None:
        """Names for every saved entry; "#0.1" and so on where nobody knows them, and stages keep them anyway."""
        saved, live = self._opened.topology, self._target.topology
        names = self._opened.optimizer_names(Coordinates())
        known = names is not None and not any(name.startswith("#") for name in names)
        # Without names there are only places: on the same sizes (but for dp) these do.
        if self._target.saved_names is not None or known:
            return self._target.saved_names
        if (saved.tp, saved.pp, saved.ep) != (live.tp, live.pp, live.ep):
            raise OptimizerMismatch(
                f"{self._opened.where} does not say which parameters the entries of its optimizer belong to; from "
                f"{saved.describe()} to {live.describe()} they are needed. Pass "
                "saved_param_names=: for each pipeline stage that it was saved on, for each param group, the names in "
                "order"
            )
        stages = []
        for pp_rank in range(saved.pp):
            groups = self._opened.optimizer_tree(Coordinates(pp_rank))["param_groups"]
            stages.append([[f"#{pp_rank}.{index}" for index in range(sum(len(group["params"]) for group in groups))]])
        return stages


def _check_experts(context: ReshardContext) -> None:
    """Raise TopologyMismatch where experts are to be cut, and the tag does not say which parameters those are."""
    saved, live = context.saved, context.live
    if live.ep == saved.ep or live.ep == 1 or any(spec.partition.expert for spec in context.recorded.values()):
        return
    raise TopologyMismatch(
        f"{context.opened.where}, saved on {saved.describe()}, marks no parameter as an expert's; for ep={live.ep} "
        "pass partitions= with expert=True for those that are"
    )


def respecified_here(
    context: ReshardContext, name: str, dtype: str, shape: tuple[int, ...], *, expert: bool = False
) -> ParameterSpec:
    """A saved parameter, of ``shape`` on each saving rank, as this rank of the target holds it."""
    recorded = context.recorded.get(name)
    if recorded is None:
        recorded = ParameterSpec(dtype, shape, Partition(expert=expert, known=False))
    return respecified(name, replace(recorded, shape=shape), context.saved_cut, context.live_cut)


def recorded_parameters(opened: OpenTag, partitions: Mapping[str, Partition]) -> dict[str, ParameterSpec]:
    """How every parameter of the tag was cut, as far as manifest, files and ``partitions`` tell.

    Of a tag without a manifest, tensors with equal digests on two tensor-parallel (and expert-parallel) ranks count as
    replicated, the others as cut in an unknown way; and those that are all zero, which tell nothing.
    """
    known = {} if opened.manifest is None else opened.manifest.parameters
    recorded = known or _synthesised(opened)
    return {
        name: replace(spec, partition=partitions[name]) if name in partitions else spec
        for name, spec in recorded.items()
    }


@lru_cache(maxsize=1)  # asked for each rank of a result, and the same for all
def _synthesised(opened: OpenTag) -> dict[str, ParameterSpec]:
    sizes = opened.topology
    found: dict[str, ParameterSpec] = {}
    for pp_rank in range(sizes.pp if opened.parts.model else 0):
        first, *others = [
            opened.model_tree(Coordinates(pp_rank, ep_rank, tp_rank))
            for ep_rank in range(min(sizes.ep, 2))
            for tp_rank in range(min(sizes.tp, 2))
        ]
        for name, leaf in first.items():
            if is_tensor(leaf):
                known = all(_same_bytes(leaf, tree.get(name)) for tree in others)
                found[name] = ParameterSpec(*form_of(leaf), Partition(known=known))
    return found


def _same_bytes(one: Any, other: Any) -> bool:
    if not isinstance(one, TensorStub) or not isinstance(other, TensorStub) or one.storage.crc32 is None:
        return False
    same = (one.shape, one.storage.crc32) == (other.shape, other.storage.crc32)
    return same and one.storage.crc32 != _crc32_of_zeros(one.storage.nbytes)


def _crc32_of_zeros(nbytes: int) -> int:
    whole, rest = divmod(nbytes, CRC_BLOCK)
    crcs = [crc32.crc32(bytes(CRC_BLOCK))] * whole + [crc32.crc32(bytes(rest))] * bool(rest)
    return crc32.combine_blocks(crcs, nbytes)


def _ties(tree: Mapping[str, Any]) -> dict[str, str]:
    """For every name whose leaf several have (the same bytes of the same file): the first of them."""
    names: dict[Any, list[str]] = {}
    for name, leaf in tree.items():
        if isinstance(leaf, _LEAVES):
            names.setdefault((leaf.file, leaf.offset) if isinstance(leaf, TensorStub) else leaf, []).append(name)
    return {name: same[0] for same in names.values() if len(same) > 1 for name in same}


def shape_of_entries(slot: SavedSlot) -> tuple[int, ...]:
    """The shape of the parameter whose saved state this is, as far as its entries tell."""
    shapes = [form_of(leaf)[1] for key, leaf in slot.entries.items() if key != STEP and is_tensor(leaf)]
    return max(shapes, key=len, default=())


def _known(names: Iterable[str]) -> tuple[str, ...] | None:
    listed = tuple(names)
    return None if any(name.startswith("#") for name in listed) else listed
