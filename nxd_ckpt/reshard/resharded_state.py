"""Model and optimizer of a tag as one rank of another job holds them.

A weight that is in no file comes from its master weights. Tags of neuronx-distributed do not record some of the facts
that are needed: of these there are templates to be filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.parameter_names import is_adapter
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import closest, first_of
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, PartLost, PartNotFound, TopologyMismatch
from nxd_ckpt.formats import crc32
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS
from nxd_ckpt.formats.tensors import Assembly, digest_of, form_of, is_tensor
from nxd_ckpt.layouts.files import MissingTensor
from nxd_ckpt.options.execution import BLANK, SavedNames
from nxd_ckpt.reshard.reshard_context import ReshardContext
from nxd_ckpt.reshard.resharded_model import ReshardedModel
from nxd_ckpt.reshard.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.reshard.resharding import checked_partitions, refuse_unknown
from nxd_ckpt.reshard.saved_optimizer import (
    OptimizerNames,
    group_names,
    is_number,
    recorded_names,
    saved_groups,
)
from nxd_ckpt.tag.opened import OpenTag


def partitions_of_tag(opened: OpenTag, partitions: Mapping[str, Partition] | None) -> Mapping[str, Partition]:
    """Return a caller's partitions of a tag.

    Raises InvalidArgument for those of what it does not have, and for more partitions than ranks, which hold one each.
    """
    tp = opened.topology.tp
    checked = checked_partitions(partitions, tp)
    for name, partition in checked.items():
        most = max(section.num_partitions for section in partition.fused or (partition,))
        if most > tp:
            raise InvalidArgument(
                f"partitions= says that {name} is cut into {most} partitions, but of {tp} tensor-parallel ranks each "
                f"holds one; expected num_partitions={tp}, or fewer. To cut it for a tag of more ranks, convert it "
                "with their number as num_partitions, and as tp="
            )
    if checked and opened.parts.model:
        refuse_unknown(checked, opened.model_names(), opened.where)
    return checked


def recorded_parameters(opened: OpenTag, partitions: Mapping[str, Partition]) -> dict[str, ParameterSpec]:
    """Return the specification of every parameter of the tag, from manifest, files and ``partitions``.

    In a tag without a manifest, tensors with equal digests on two tensor-parallel (and expert-parallel) ranks count as
    replicated. All other cuts are unknown, also of tensors that are all zero, and of LoRA adapters whose cut no layer
    told: equal digests prove nothing there.
    """
    recorded = (opened.manifest.parameters if opened.manifest is not None else {}) or _synthesised(opened)
    return {
        name: _repartitioned(name, spec, partitions[name], opened.topology.ep)
        if name in partitions
        else _without_belief(name, spec, opened.topology.tp)
        for name, spec in recorded.items()
    }


def _without_belief(name: str, spec: ParameterSpec, tp: int) -> ParameterSpec:
    """Return the specification, with an unknown cut if only equal values say that each rank holds the whole adapter.

    An A is equal on all ranks until it is trained, and NxD may have gathered parts into the file of each rank.
    """
    if tp == 1 or spec.explicit or not is_adapter(name) or not spec.partition.replicated_over_tp:
        return spec
    return replace(spec, partition=replace(spec.partition, known=False))


def _repartitioned(name: str, spec: ParameterSpec, partition: Partition, ep: int) -> ParameterSpec:
    """Return the parameter with the caller's cut.

    Raises TopologyMismatch if the save recorded another whole shape, and InvalidArgument for a dimension that is not
    there.
    """
    partition.check_shape(f"partitions= of {name}", spec.shape)
    recorded, expected = (cut.global_shape(spec.shape, ep) for cut in (spec.partition, partition))
    if spec.explicit and partition.known and recorded != expected:
        raise TopologyMismatch(
            f"model/{name}: the save recorded the whole shape {recorded}, but partitions= makes it {expected} "
            f"({partition}); leave {name} out of partitions=, or pass the cut of {recorded} on these sizes"
        )
    return replace(spec, partition=partition, explicit=True)


def _synthesised(opened: OpenTag) -> dict[str, ParameterSpec]:
    sizes = opened.topology
    parameters: dict[str, ParameterSpec] = {}
    for pp_rank in range(sizes.pp if opened.parts.model else 0):
        first, *others = [
            opened.model_tree(Coordinates(pp_rank, ep_rank, tp_rank))
            for ep_rank in range(min(sizes.ep, 2))
            for tp_rank in range(min(sizes.tp, 2))
        ]
        for name, leaf in first.items():
            if is_tensor(leaf):
                replicated = all(_same_bytes(leaf, tree.get(name)) for tree in others)
                parameters[name] = ParameterSpec(*form_of(leaf), Partition(known=replicated))
    return parameters


def _same_bytes(a: Any, b: Any) -> bool:
    digest = digest_of(a)
    return digest is not None and digest == digest_of(b) and digest[-1] != crc32.zeros(a.storage.nbytes)


class ReshardedState:
    """Model and optimizer of the tag of ``context``, for its rank; each empty if the tag lacks it.

    Reads trees only, each once, when a part is first used.
    """

    def __init__(self, context: ReshardContext, names: OptimizerNames) -> None:
        self.context: ReshardContext = context
        self._names = names
        self.model: ReshardedModel = ReshardedModel(context)
        self.optimizer: ReshardedOptimizer = self.optimizer_by(names)

    def seen_from(self, live: Topology) -> ReshardedState:
        """Return this state for another rank."""
        return ReshardedState(self.context.seen_from(live), self._names)

    def cut_as(self, partitions: Mapping[str, Partition]) -> ReshardedState:
        """Return this state if the parameters with these names were cut so, whatever was recorded."""
        recorded = dict(self.context.recorded)
        for name, partition in partitions.items():
            dtype, shape = self.model.form(name) or ("", ())
            spec = recorded.get(name, ParameterSpec(dtype, shape, partition))
            recorded[name] = replace(spec, partition=partition, explicit=True)
        return ReshardedState(replace(self.context, recorded=recorded, _plans={}), self._names)

    def has_master(self, name: str) -> bool:
        """Return whether the tag has master weights of the parameter."""
        slots = self.optimizer.slots if self.context.opened.parts.master_weights else {}
        return any(alias in slots and slots[alias].master is not None for alias in self.context.names(name))

    def optimizer_by(self, names: OptimizerNames) -> ReshardedOptimizer:
        """Return the optimizer, with parameter names from ``names``."""
        return ReshardedOptimizer(self.context, names, self.model)

    def weight(self, name: str, leaf: Any, live: ParameterSpec | None = None) -> Any:
        """Return ``leaf``, this rank's leaf of the model; if no file holds it, its master weights, cast.

        ``live`` is how the rank holds it, by default as recorded. Without master weights it stays a MissingTensor.
        """
        if not isinstance(leaf, MissingTensor) or leaf.dtype is None:
            return leaf
        if live is None and leaf.shape is not None:
            live = self.context.as_recorded(name, leaf.dtype, leaf.shape)
        return leaf if live is None else self.master_weight(name, replace(live, dtype=leaf.dtype)) or leaf

    def required_weight(self, name: str, leaf: Any) -> Any:
        """Return ``leaf`` or its master weights, for a rank without a live model.

        Raises PartNotFound if there is neither, and PartLost if the tag has no master weights at all.
        """
        weight = self.weight(name, leaf)
        if isinstance(weight, MissingTensor):
            unnamed = any(map(is_number, self.optimizer.slots))
            hint = " under that name; pass saved_param_names=" if unnamed else ""
            kind = PartNotFound if self.context.opened.parts.master_weights else PartLost
            raise kind(
                f"{self.context.opened.where}: no file holds model/{name} ({weight.file} is missing), nor its master "
                f"weights{hint}"
            )
        return weight

    def master_weight(self, name: str, live: ParameterSpec) -> Assembly | None:
        """Return the parameter's master weights, cast to its dtype; None if the tag has none."""
        has_any = self.context.opened.parts.master_weights
        return self.optimizer.entry(name, MASTER_WEIGHTS, live) if has_any else None


def recorded_state(
    opened: OpenTag,
    live: Topology,
    *,
    partitions: Mapping[str, Partition] | None = None,
    saved_names: SavedNames | None = None,
    gathered: Mapping[str, tuple[int, int]] | None = None,
) -> ReshardedState:
    """Return the state that rank ``live.rank`` of a job of these sizes would hold; for tools, without a live model.

    Args:
        opened: the tag.
        live: sizes of the job, and the rank.
        partitions: cuts of parameters of the tag, by name, where it does not record them.
        saved_names: the optimizer's parameter names as saved, by stage and group, where the tag has none; parameters
            without names are called by number.
        gathered: dimension and whole length of what NxD may have gathered into each file; see `ReshardContext`.
    """
    recorded = recorded_parameters(opened, partitions or {})
    context = ReshardContext(opened, live, recorded=recorded, every_stage=True, gathered=gathered or {})
    return ReshardedState(context, OptimizerNames(saved_names, numbered=True))


def unknown_cuts(opened: OpenTag, partitions: Mapping[str, Partition] | None = None) -> dict[str, ParameterSpec]:
    """Return the parameters whose cut neither the tag nor ``partitions`` tells."""
    recorded = recorded_parameters(opened, partitions or {})
    return {name: spec for name, spec in recorded.items() if not spec.partition.known}


def checked_facts(
    opened: OpenTag,
    partitions: Mapping[str, Partition] | None,
    saved_names: SavedNames | None,
    *,
    cuts_change: bool = True,
) -> Mapping[str, Partition]:
    """Return the caller's partitions, after checks of all that was said of a tag.

    Raises:
        InvalidArgument: partitions or names of what is not there, or that are blank.
        TopologyMismatch: cuts change, and that of a parameter is not known. If the optimizer's names are not known
            either, the error asks for them too.
    """
    cuts = partitions_of_tag(opened, partitions)
    _check_names(opened, saved_names)
    unknown = unknown_cuts(opened, cuts) if cuts_change else {}
    if not unknown:
        return cuts
    lacks_names = saved_names is None and opened.parts.optimizer is not None and recorded_names(opened) is None
    raise TopologyMismatch(
        f"{opened.where}: the cut of {first_of(unknown)} over {opened.topology.tp} tensor-parallel ranks is not known; "
        f"pass partitions= with the cut of each, by name{_AND_NAMES if lacks_names else ''}"
    )


_AND_NAMES = "; it does not name the parameters of its optimizer either: pass saved_param_names= too"


def _check_names(opened: OpenTag, saved_names: SavedNames | None) -> None:
    """Raise InvalidArgument for names of the optimizer's parameters that are blank, or misspelt ones of the model's."""
    listed = [name for stage in saved_names or () for group in stage for name in group]
    blanks = [name for name in listed if name.startswith(BLANK)]
    if blanks:
        raise InvalidArgument(f"saved_param_names= has names that are still to be filled in: {first_of(blanks)}")
    if not listed or not opened.parts.model:
        return
    model = opened.model_names()
    names = {*listed}
    misspelt = {name: close for name in names - model if (close := closest(name, model - names)) is not None}
    if misspelt:
        shown = first_of(misspelt, lambda name: f"{name!r} (did you mean {misspelt[name]!r}?)")
        raise InvalidArgument(f"saved_param_names= names {shown}, which the model of {opened.where} does not have")


def partitions_template(opened: OpenTag) -> dict[str, dict[str, Any]]:
    """Return what ``partitions`` has to say of each parameter whose cut is not known, with its shape on a rank."""
    tp = opened.topology.tp
    return {
        name: {"local_shape": list(spec.shape), "partition_dim": BLANK, "num_partitions": tp}
        for name, spec in unknown_cuts(opened).items()
    }


def names_template(opened: OpenTag) -> SavedNames | None:
    """Return ``saved_param_names`` as scripts usually group them; None if the tag records the names.

    If these do not fit the number of parameters and their shapes, it has blanks, each with the shape.
    """
    try:
        return group_names(opened)
    except OptimizerMismatch:
        stages = (saved_groups(opened, stage) for stage in range(opened.topology.pp))
        return [
            [[f"{BLANK} {list(slot.likely_shape)}" for slot in group] for group in groups] for groups in stages
        ]
