"""Facts that tags of neuronx-distributed do not record: which are needed, and templates of them to be filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import closest, first_of
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, TopologyMismatch
from nxd_ckpt.options.execution import BLANK, SavedNames
from nxd_ckpt.reshard.resharded_state import partitions_of_tag, recorded_parameters
from nxd_ckpt.reshard.saved_optimizer import SavedSlot, group_names, names_by_shape, recorded_names
from nxd_ckpt.tag.opened import OpenTag


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
    model, names = opened.model_names(), {*listed}
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

    If these do not fit the number of parameters and their shapes, it has the names of parameters whose shape no other
    has, and for each other a blank with its shape and the parameters of this shape, in the model's order.
    """
    try:
        return group_names(opened)
    except OptimizerMismatch:
        stages = (names_by_shape(opened, stage) for stage in range(opened.topology.pp))
        return [[[_name_or_blank(*entry) for entry in group] for group in groups] for groups in stages]


def _name_or_blank(slot: SavedSlot, candidates: Sequence[str]) -> str:
    if len(candidates) == 1:
        return candidates[0]
    return f"{BLANK} {list(slot.likely_shape)}" + (f" one of: {', '.join(candidates)}" if candidates else "")
