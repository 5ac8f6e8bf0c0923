"""Parameter names for an optimizer whose tag has none, from the param groups that its writer usually makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nxd_ckpt.core.param_groups import NOT_DECAYED, grouped
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.live.parameters import form_of, is_tensor
from nxd_ckpt.reshard.optimizer_names import is_number
from nxd_ckpt.reshard.saved_optimizer import SavedSlot, saved_optimizer
from nxd_ckpt.tag.opened import OpenTag

COMPUTED = "rotary_emb.inv_freq"
"""The end of names of buffers that are no parameters."""

Names = list[list[list[str]]]
"""Parameter names by pipeline stage and param group."""


def group_names(opened: OpenTag, stages: Sequence[Sequence[str]] | None = None) -> Names | None:
    """Return the names of the optimizer's parameters; None if the tag has them, or has no optimizer.

    ``stages`` are the model's parameters of each stage, in order, by default those of the tag.

    Raises OptimizerMismatch if no usual groups fit the sizes and shapes of the saved ones.
    """
    if opened.parts.optimizer is None:
        return None
    recorded = opened.optimizer_names(Coordinates())
    if recorded is not None and not any(map(is_number, recorded)):
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


class _Stage:
    """One pipeline stage: its parameters in the model's order, and the saved slots of its optimizer."""

    def __init__(self, opened: OpenTag, pp_rank: int, stages: Sequence[Sequence[str]] | None) -> None:
        at = Coordinates(pp_rank)
        self._shapes = {
            name: form_of(leaf)[1]
            for name, leaf in (opened.model_tree(at) if opened.parts.model else {}).items()
            if is_tensor(leaf) and not name.endswith(COMPUTED)
        }
        self._parameters = list(self._shapes) if stages is None else list(stages[pp_rank])
        saved = saved_optimizer(opened.optimizer_tree(at), None, "#", lambda name: None, opened.where)
        self.groups: list[list[SavedSlot]] = [[] for _ in saved.groups]
        for slot in saved.slots.values():
            self.groups[slot.group].append(slot)

    def names(self, patterns: Iterable[str]) -> list[list[str]] | None:
        """Return the names by group, those with one of ``patterns`` in the second group; None if they do not fit."""
        shapes = [[slot.likely_shape for slot in slots] for slots in self.groups]
        return grouped({name: self._shapes.get(name) for name in self._parameters}, shapes, patterns)
