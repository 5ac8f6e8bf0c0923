"""Whose the entries of an optimizer are, where its tag does not say it but its writer's param groups are known."""

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
"""What the names of tensors end in that are no parameters."""

Names = list[list[list[str]]]
"""By stage and param group."""


def group_names(opened: OpenTag, stages: Sequence[Sequence[str]] | None = None) -> Names | None:
    """The names of the optimizer's parameters, by stage and param group; None where the tag says them, or has no
    optimizer. ``stages`` are the model's parameters of each stage, in order, by default those of the tag.

    Raises OptimizerMismatch where no such groups fit what was saved.
    """
    if opened.parts.optimizer is None:
        return None
    known = opened.optimizer_names(Coordinates())
    if known is not None and not any(map(is_number, known)):
        return None
    every = [_Stage(opened, pp_rank, stages) for pp_rank in range(opened.topology.pp)]
    for patterns in NOT_DECAYED:
        found = [stage.names(patterns) for stage in every]
        if all(names is not None for names in found):
            return [names for names in found if names is not None]
    counts = [[len(group) for group in stage.groups] for stage in every]
    raise OptimizerMismatch(
        f"{opened.where} does not say which parameters the entries of its optimizer belong to, and param groups of "
        f"{counts} parameters are not those that its writer makes of this model; pass saved_param_names=: for each "
        "pipeline stage, for each param group, the names in order"
    )


class _Stage:
    """One pipeline stage: its parameters in the model's order, and what the optimizer saved for each."""

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
        """The groups' names, if those whose names have one of ``patterns`` in them are the second group."""
        shapes = [[slot.likely_shape for slot in slots] for slots in self.groups]
        return grouped({name: self._shapes.get(name) for name in self._parameters}, shapes, patterns)
