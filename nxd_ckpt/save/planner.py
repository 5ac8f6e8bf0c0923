"""Plans of one job's saves: made once, and reused for every save of a state that differs only in values.

A training loop saves the same structure each time. From its second save on nothing of it is described, laid out or
pickled again: the plan gets the tensors of the new state, and if numbers beside them have changed (a learning rate),
the pickle that holds them is made later, by the thread that writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nxd_ckpt.core.mesh_groups import MeshGroup
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.image import Image
from nxd_ckpt.formats.strides import stride_of
from nxd_ckpt.formats.tensors import Assembly, iter_tensors, map_tensors
from nxd_ckpt.live.parameters import form_of
from nxd_ckpt.live.save_state import SaveState
from nxd_ckpt.save.plan import SavePlan, numbers_of, plan_objects, plan_save, states_of
from nxd_ckpt.save.planned_file import PlannedFile
from nxd_ckpt.save.structure import Structure, structure_of


class Planner:
    """Planner of the saves of the rank that ``topology`` is seen from."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._cached: _CachedPlan | None = None
        self.groups: Sequence[MeshGroup] | None = None
        """Groups of a mesh job, once its ranks have agreed on them."""

    def plan(self, state: SaveState) -> SavePlan:
        """Plan a save of ``state``; see `plan_save`."""
        structures = {part: structure_of(values.tree) for part, values in state.trees().items()}
        complete = {part: structure for part, structure in structures.items() if structure is not None}
        if complete != structures:
            self._cached = None
            return plan_save(state, self._topology, self.groups)
        likeness = _likeness(state, complete)
        if self._cached is None or self._cached.likeness != likeness:
            plan = plan_save(state, self._topology, self.groups)
            self._cached = _cache(plan, likeness, complete)
            return plan
        return self._cached.holding(state, complete, self._topology)


@dataclass(frozen=True)
class _CachedPlan:
    """A plan without its tensors. ``tensors`` gives for each of its shared files their numbers in their part."""

    plan: SavePlan
    likeness: Any
    tensors: Sequence[Sequence[int]]
    values: Mapping[str, bytes]

    def holding(self, state: SaveState, structures: Mapping[str, Structure], topology: Topology) -> SavePlan:
        """Return the plan for a state with the same structure."""
        files = []
        for planned, numbers in zip(self.plan.shared, self.tensors, strict=True):
            structure = structures[planned.part]
            image = planned.image.holding([structure.tensors[number] for number in numbers])
            stale = planned.contents is not None and structure.values != self.values[planned.part]
            pickling = _pickling(planned, state.trees()[planned.part].tree) if stale else None
            files.append(replace(planned, image=image, pickling=pickling))
        return replace(
            self.plan,
            shared=tuple(files),
            objects=plan_objects(state, topology),
            parts=state.parts(self.plan.parts.master_weights),
            numbers={} if self.plan.groups is None else numbers_of(state),
            states=states_of(state),
        )


def _cache(plan: SavePlan, likeness: Any, structures: Mapping[str, Structure]) -> _CachedPlan:
    numbers = {
        part: {id(tensor): number for number, tensor in enumerate(structure.tensors)}
        for part, structure in structures.items()
    }
    tensors = [[numbers[planned.part][id(tensor)] for tensor in planned.image.tensors] for planned in plan.shared]
    bare = tuple(replace(planned, image=planned.image.holding(())) for planned in plan.shared)
    values = {part: structure.values for part, structure in structures.items()}
    return _CachedPlan(replace(plan, shared=bare, objects=()), likeness, tensors, values)


def _likeness(state: SaveState, structures: Mapping[str, Structure]) -> Any:
    """Return a key that is equal for states with the same plan, apart from their tensors and values."""
    options = (
        state.optimizer_kind, state.optimizer_names, state.use_xser, state.lower_precision_weights, state.left_out
    )  # fmt: skip
    trees = {part: (state.trees()[part].cache_key, structure.likeness) for part, structure in structures.items()}
    return options, trees


def _pickling(planned: PlannedFile, tree: Any) -> Callable[[Any], Image]:
    """Return a function that pickles ``tree`` into the file later.

    The needed facts about its tensors are recorded now.
    """
    tensors = {id(tensor): tensor for _, tensor in iter_tensors(tree, torch.Tensor)}
    leaves = {number: Assembly(*form_of(tensor), (), stride_of(tensor)) for number, tensor in tensors.items()}
    now, contents = map_tensors(tree, lambda tensor: leaves[id(tensor)], torch.Tensor), planned.contents
    storages: dict[int, int] = {}
    if planned.image.storages:  # else a file of references, in which no tensor lies
        for (_, tensor), place in zip(iter_tensors(tree, torch.Tensor), planned.tensors, strict=True):
            storages[id(leaves[id(tensor)])] = place.storage
    assert contents is not None
    return lambda image: image.pickled_anew(contents(now), lambda leaf: storages[id(leaf)])
