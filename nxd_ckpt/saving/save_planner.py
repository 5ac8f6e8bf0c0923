"""Plans of one job's saves: made once, and reused for every save of a state that differs only in values.

A training loop saves the same structure each time. From its second save on nothing of it is described, laid out or
pickled again: the plan gets the tensors of the new state, and if numbers beside them have changed (a learning rate),
the pickle that holds them is made later, by the thread that writes it.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core.mesh import MeshGroup
from nxd_ckpt.core.name_patterns import OPTIMIZER
from nxd_ckpt.core.names import SCHEDULER
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.formats.crc32 import crc32, digest_of_value
from nxd_ckpt.formats.image import Image
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS
from nxd_ckpt.formats.state import SaveState, State
from nxd_ckpt.formats.strides import stride_of
from nxd_ckpt.formats.tensors import Assembly, form_of, iter_tensors, map_tensors
from nxd_ckpt.formats.torch_zip_writer import ZipImage, image_of
from nxd_ckpt.layouts.payload import checked_optimizer
from nxd_ckpt.live.state_names import is_in, key_text, leaf_name
from nxd_ckpt.saving.mesh_plan import Form
from nxd_ckpt.saving.plan import SavePlan, plan_objects, plan_save
from nxd_ckpt.saving.planned_file import PlannedFile
from nxd_ckpt.saving.replicas import LARGE, Replica, Replicas, Values

_VALUES = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
"""Types whose values cannot change."""

_KEYS = frozenset({int, bool, str, bytes, type(None)})
"""Types of keys for which equal means identical, unlike 0.0 and -0.0."""


@dataclass(frozen=True)
class Structure:
    """A tree, decomposed.

    ``nodes`` are its containers with their keys and the types of its leaves, depth first; ``forms`` dtype, shape,
    device and kind of each tensor; ``repeats`` for each the number of the first tensor that is the same object. The
    rest are the ``tensors`` themselves, and ``values``, all others.
    """

    nodes: list[Any]
    forms: list[Any]
    repeats: list[int]
    tensors: list[torch.Tensor]
    values: bytes

    @property
    def likeness(self) -> Any:
        """Equal for trees that differ only in the values of tensors and other leaves. Holds no tensor."""
        return self.nodes, self.forms, self.repeats


def structure_of(tree: Any) -> Structure | None:
    """Return the structure; None if the tree holds objects that could change unnoticed, or one container twice."""
    walk = _Walk()
    try:
        walk.visit(tree)
    except _CannotTell:
        return None
    first: dict[int, int] = {}
    return Structure(
        walk.nodes,
        [(tensor.dtype, tensor.shape, tensor.device, tensor.layout, type(tensor)) for tensor in walk.tensors],
        [first.setdefault(id(tensor), number) for number, tensor in enumerate(walk.tensors)],
        walk.tensors,
        pickle.dumps(walk.values),
    )


class _CannotTell(Exception):
    pass


class _Walk:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.values: list[Any] = []
        self._seen: set[int] = set()

    def visit(self, node: Any) -> None:
        kind = type(node)
        if isinstance(node, torch.Tensor):
            self.nodes.append(torch.Tensor)
            self.tensors.append(node)
        elif kind in _VALUES:
            self.nodes.append(kind)
            self.values.append(node)
        elif kind is dict or kind is OrderedDict:
            self._enter(node)
            if not _KEYS.issuperset(map(type, node)):
                raise _CannotTell
            self.nodes.append((kind, tuple(node), tuple(map(type, node))))
            for child in node.values():
                self.visit(child)
        elif kind is list or kind is tuple:
            if kind is list:
                self._enter(node)
            self.nodes.append((kind, len(node)))
            for child in node:
                self.visit(child)
        else:
            raise _CannotTell

    def _enter(self, container: Any) -> None:
        if id(container) in self._seen:
            raise _CannotTell
        self._seen.add(id(container))


class Planner:
    """Planner of the saves of the rank that ``topology`` is seen from."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._cached: _CachedPlan | None = None
        self.groups: Sequence[MeshGroup] | None = None
        """Groups of a mesh job, once its ranks have agreed on them."""
        self.known: set[str] = set()
        """Names of what each rank saves for itself. All ranks have the same."""
        self._shared: str | None = None
        """Digest of the forms of the optimizer that several ranks write."""
        self._agreed: set[Form] | None = None
        """The tensors of a mesh job on which its ranks agreed."""
        self._last: _Compared | None = None
        self._staged: tuple[Any, ZipImage] | None = None

    def plan(self, state: SaveState, *, agreed: bool = False) -> SavePlan:
        """Plan a save of ``state``; see `plan_save`.

        Only tensors of an optimizer on which all ranks have ``agreed`` are written by several: later, some of the ranks
        may have others.
        """
        if agreed:
            self._cached = self._agreed = None
            self._shared = None if state.optimizer is None else state.optimizer.forms
        trees = {part: own.tree for part, own in state.trees().items()}
        structures = {part: structure_of(tree) for part, tree in trees.items()}
        plan = self._plan(state, structures)
        if agreed and plan.mesh is not None:
            self._agreed = {(each.name, each.dtype, each.shape) for each in plan.mesh.tensors}
        if self._topology.world_size == 1 and not state.own:
            return plan
        if state.scheduler is not None:
            trees["scheduler"] = state.scheduler
            structures["scheduler"] = structure_of(state.scheduler)
        if state.is_of_rank:
            self.known |= {each.name for each in plan.copies}
        return self._with_replicas(plan, trees, structures, state)

    def _plan(self, state: SaveState, structures: Mapping[str, Structure | None]) -> SavePlan:
        complete = {part: structure for part, structure in structures.items() if structure is not None}
        if complete != structures:
            self._cached = None
            return self._planned(state)
        likeness = len(self.known), _likeness(state, complete)
        if self._cached is None or self._cached.likeness != likeness:
            plan = self._planned(state)
            self._cached = _cache(plan, likeness, complete)
            return plan
        return self._cached.holding(state, complete, self._topology)

    def _written_alone(self, state: SaveState) -> Iterator[str]:
        """Yield the parts that one rank writes alone, as its replicas hold other tensors, or may do so."""
        if any(is_in("model", name) for name in self.known):
            yield "model"
        if state.optimizer is None:
            return
        indices = (f"#{index}" for group in state.optimizer.tree["param_groups"] for index in group["params"])
        whole = {OPTIMIZER, *(f"optim/{name}" for name in state.optimizer_names or indices)}
        beside = (name.startswith("optim/state/") or name.endswith(f"/{MASTER_WEIGHTS}") for name in self.known)
        if any(beside) or whole & self.known or state.optimizer.forms != self._shared:
            yield "optimizer"

    def _planned(self, state: SaveState) -> SavePlan:
        """Plan a save of another structure than the last one's. Raises UnsupportedState for what no load would take."""
        if state.optimizer is not None:
            if not state.optimizer.tree:
                raise UnsupportedState(
                    "optimizer: an empty dict on this rank. A state dict that was gathered on one rank "
                    "(rank0_only=True) is not there on the others: gather it on all, or save it as user_content="
                )
            try:
                checked_optimizer(state.optimizer.tree, "optimizer")
            except MalformedFile as error:
                raise UnsupportedState(
                    f"{error}: no load would take it. Pass the optimizer itself, or its own state_dict(): torch's "
                    "flattened one (flatten_optimizer_state_dict=True) is saved by nxd_ckpt.dcp, and one of another "
                    "form by user_content="
                ) from None
        if self._topology.world_size > 1:
            for part in state.trees().values():
                _refuse_one_name(part)
        return plan_save(state, self._topology, self.groups, {*self._written_alone(state)}, self._agreed)

    def _with_replicas(
        self,
        plan: SavePlan,
        trees: Mapping[str, Any],
        structures: Mapping[str, Structure | None],
        state: SaveState,
    ) -> SavePlan:
        """Return the plan with what this rank and others hold alike."""
        rank = self._topology.rank
        tensors = {
            part: structure.tensors if structure is not None else [leaf for _, leaf in iter_tensors(trees[part], _LIVE)]
            for part, structure in structures.items()
        }
        of_scheduler = tuple(_copies_of_scheduler(trees.get("scheduler"), plan))
        copies = (*plan.copies, *of_scheduler) if of_scheduler else plan.copies
        last = self._last
        # Of a cached plan they are the same object, which saves a walk through all of them.
        is_known = last is not None and last.copies is copies and last.known == len(self.known)
        if last is None or last.known != len(self.known) or not (is_known or last.copies == copies):
            compared = [each for each in copies if each.writes != rank and not each.is_kept(self.known)]
            samples = any(each.nbytes > LARGE for each in compared)
            forms = {part: crc32(repr([each.form for each in copies if each.what == part]).encode()) for part in _PARTS}
            last = _Compared(copies, compared, len(self.known), samples, forms)
        self._last = last._replace(copies=copies, times=last.times + 1)
        values = []
        for part, tree in trees.items():
            if part in plan.writers:
                parameters = state.optimizer_names
                part_values = Values(
                    part, plan.writers[part], tree, parameters, self.known, tensors[part], copies,
                    on_mesh=plan.mesh is not None,
                )  # fmt: skip
                values.append(_unchanging(part_values, structures[part], last.forms[part]))
        if state.user_content is not None:  # compared as it is now, without the values of its tensors
            digest = digest_of_value(map_tensors(state.user_content, form_of, _LIVE))
            values.append(Values("user_content", 0, digest, None, self.known))
        whole = last.times < _WHOLE_SAVES or not last.samples
        replicas = Replicas(rank, copies, last.compared, tensors, values, self.known, whole, state.own)
        own = replicas.own
        staged = replicas.to_stage
        objects = (*plan.objects, *([own.file(rank, 0)] if own else []))
        if not staged:
            return replace(plan, objects=objects, replicas=replicas)
        form = None if is_known and whole else [(tensor.dtype, tensor.shape) for tensor in staged]
        if self._staged is None or (form is not None and self._staged[0] != form):
            self._staged = form, image_of([Assembly(*form_of(tensor), ()) for tensor in staged]).holding(())
        image = self._staged[1].holding(staged)
        return replace(plan, objects=objects, replicas=replicas, staged=PlannedFile("", image))


def _refuse_one_name(part: State) -> None:
    """Raise UnsupportedState if two tensors have one name, by which copies are compared with those of other ranks."""
    names = [about.name for about in part.tensors.values()]
    if len({*names}) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise UnsupportedState(
            f"{twice} is the name of two tensors, as of 'a/b' and of 'b' in 'a', or of 1 and '1': give one of them "
            "another key, so that each can be compared with those of the other ranks"
        )


class _Compared(NamedTuple):
    """The copies of the last save, and those that this rank compares, with so many names known.

    ``samples``: there are so large ones that samples are compared. ``forms`` are digests of the forms in each part that
    replicas hold alike, other than those of DTensors. ``times`` are such saves in a row.
    """

    copies: Sequence[Replica]
    compared: Sequence[Replica]
    known: int
    samples: bool
    forms: Mapping[str, int]
    times: int = 0


_LIVE = torch.Tensor
_PARTS = ("model", "optimizer", "scheduler")
_WHOLE_SAVES = 2
"""Saves of a structure that compare all of each copy."""


def _copies_of_scheduler(tree: Any, plan: SavePlan) -> Iterator[Replica]:
    file = next((number for number, planned in enumerate(plan.files) if planned.key == SCHEDULER), None)
    stored = {} if file is None else {id(leaf): at for at, leaf in enumerate(plan.files[file].image.tensors)}
    for number, (path, leaf) in enumerate(() if tree is None else iter_tensors(tree, _LIVE)):
        place = (file, stored[id(leaf)]) if file is not None else None
        yield Replica.of("scheduler", number, leaf_name("scheduler", path, None, key_text), leaf, 0, "scheduler", place)


def _unchanging(values: Values, structure: Structure | None, forms: int) -> Values:
    """Return the values with a tree that does not change before the save ends.

    ``forms`` is a digest of the forms of its tensors.
    """
    if structure is None:  # some of them could change
        tree = copy.deepcopy(values.tree, {id(tensor): tensor for _, tensor in iter_tensors(values.tree, _LIVE)})
        return replace(values, tree=tree)
    # The containers of model and optimizer are copies already.
    is_copy = values.part != "scheduler"
    tree = values.tree if is_copy else map_tensors(values.tree, lambda tensor: tensor, _LIVE)
    return replace(values, tree=tree, pickled=structure.values, form=(structure.nodes, forms))


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
    now = map_tensors(tree, lambda tensor: leaves[id(tensor)], torch.Tensor)
    contents = planned.contents
    storages: dict[int, int] = {}
    if planned.image.storages:  # else a file of references, in which no tensor lies
        for (_, tensor), place in zip(iter_tensors(tree, torch.Tensor), planned.tensors, strict=True):
            storages[id(leaves[id(tensor)])] = place.storage
    assert contents is not None
    return lambda image: image.pickled_anew(contents(now), lambda leaf: storages[id(leaf)])
