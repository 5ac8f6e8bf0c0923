"""A tag as global tensors by name, assembled from the ranks' parts. Reads trees only, no tensor.

A tensor that cannot be assembled still has a name, and reading it raises the reason: NxD's own tags do not record how
tensors are cut, or which parameters the entries of their optimizer belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import closest
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import (
    IncompatibleState,
    KeyMismatch,
    OptimizerMismatch,
    PartLost,
    PartNotFound,
    TopologyMismatch,
    UnsafePickle,
)
from nxd_ckpt.formats.optimizer_trees import STEP
from nxd_ckpt.formats.tensors import (
    Assembly,
    Path,
    TensorStub,
    by_digest,
    children_of,
    form_of,
    is_tensor,
    iter_leaves,
    iter_tensors,
    map_tensors,
    nbytes_of,
)
from nxd_ckpt.layouts.files import MissingTensor
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.reshard.resharded_state import ReshardedState, partitions_of_tag, recorded_state
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.verification import refuse_missing

_LEAVES = (TensorStub, Assembly, MissingTensor)

_Place = tuple[Path, Any]
"""A path of keys, and a saving rank's value there."""

_GENERAL = ("optim", "state")
"""Path of optimizer state that belongs to no parameter, as in the filters of a load."""

UNKNOWN_DTYPE = "?"
"""The dtype of a tensor that is in no file, and whose dtype no file records."""


@dataclass(frozen=True)
class GlobalTensor:
    """The description of one whole tensor of a tag.

    Attributes:
        name: "model/embed.weight", "optim/embed.weight/exp_avg" or, without a parameter name, "optim/#3/exp_avg".
        dtype: torch's name, such as "bfloat16".
        shape: shape of the whole tensor; None if its cut is not known.
        local_shape: shape in a saving rank's file (of its shard, under ZeRO-1); None if no file holds it.
        partition: how saving ranks cut it over tensor- and expert-parallel ranks; None if it is not shaped like a
            parameter.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    local_shape: tuple[int, ...] | None
    partition: Partition | None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the whole tensor; None if its shape or dtype is not known."""
        if self.shape is None or self.dtype == UNKNOWN_DTYPE:
            return None
        return nbytes_of(self.dtype, self.shape)


class WholeTag:
    """The tag ``opened``, as a single rank would hold it.

    Args:
        opened: the tag.
        partitions: cuts of parameters of the tag, by name, where it does not record them.
        saved_param_names: the optimizer's parameter names as saved, by stage and group, where the tag has none.
    """

    def __init__(
        self,
        opened: OpenTag,
        *,
        partitions: Mapping[str, Partition] | None = None,
        saved_param_names: SavedNames | None = None,
    ) -> None:
        self.opened = opened
        cuts = partitions_of_tag(opened, partitions)
        self._state = recorded_state(opened, Topology(), partitions=cuts, saved_names=saved_param_names)
        self._model = self._state.model
        self._optimizer = self._state.optimizer

    @cached_property
    def tensors(self) -> dict[str, GlobalTensor]:
        """All tensors by name: the model's in its order, then the optimizer's.

        Raises:
            OptimizerMismatch: ``saved_param_names`` do not fit the optimizer.
        """
        places = {**self._model_places, **self._optimizer_places}
        return {name: self._describe(name, *place) for name, place in places.items()}

    @property
    def values(self) -> dict[str, Any]:
        """Values that are no tensors (Python numbers, extra state), by names of the same kind."""
        return {name: value for name, (_, value) in self._value_places.items()}

    def path(self, name: str) -> Path:
        """Return the keys that lead to a name: "model" or "optim", the parameter's name, and so on."""
        return (self._place(name) or self._value_places[name])[0]

    def is_general(self, name: str) -> bool:
        """Return whether the name is optimizer state that belongs to no parameter."""
        return self._is_general(self.path(name))

    def _is_general(self, path: Path) -> bool:
        return path[:2] == _GENERAL and path[1] not in self._optimizer.slots

    @cached_property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of each param group, with the names of its parameters under "params".

        A stage may lack groups, and experts have their own. So a parameter is in the group of its number if the options
        agree, otherwise in the first group whose options agree.
        """
        groups = [(options, list[str]()) for options in self._optimizer.groups]
        for name, slot in self._optimizer.slots.items():
            likely = groups[slot.group : slot.group + 1]
            fits = (names for options, names in likely + groups if by_digest(options) == by_digest(slot.options))
            members = next(fits, None)
            if members is None:
                members = []
                groups.append((dict(slot.options), members))
            members.append(name)
        return [{**options, "params": names} for options, names in groups]

    def leaf(self, name: str) -> TensorStub | Assembly:
        """Return the stub or assembly of a tensor, to be read by ``opened.reader()``.

        Raises:
            KeyMismatch: no such tensor.
            PartNotFound: no file holds it.
            TopologyMismatch: its cut is not known.
            OptimizerMismatch, IncompatibleState: it cannot be assembled; the message says why.
        """
        return self._leaf(self._state, name)

    def _leaf(self, state: ReshardedState, name: str) -> TensorStub | Assembly:
        """Return the tensor as the rank of ``state`` would hold it."""
        place = self._place(name)
        if place is None:
            names = [*self._model_places, *self._optimizer_places]
            close = closest(name, names)
            others = f"it has {len(names)}{', such as ' if names else ''}{', '.join(names[:3])}"
            hint = others if close is None else f"did you mean {close!r}?"
            raise KeyMismatch(f"{self.opened.where} has no tensor {name!r}; {hint}")
        (part, parameter, *keys), leaf = place
        if self._is_general(place[0]):
            refuse_missing(self.opened.where, {name: leaf})
        elif part == "model":
            leaf = _at(self._model_value(state, parameter), keys)
        else:
            leaf = _at(self._entry_value(state, parameter, keys[0]), keys[1:])
        assert isinstance(leaf, (TensorStub, Assembly))
        return leaf

    def parts_or_problem(self, name: str, problems: dict[str, str]) -> list[TensorStub | Assembly] | None:
        """Return the tensor alone; if it cannot be assembled, what each rank holds of it (see `leaves_by_rank`).

        None if that cannot be read, and ``problems`` says why, by name. Raises PartLost for a file that is gone.
        """
        for leaves in (self._leaves, self.leaves_by_rank):
            try:
                return leaves(name)
            except PartLost:
                raise
            except (IncompatibleState, PartNotFound) as error:
                problem = str(error)
        problems[name] = problem
        return None

    def _leaves(self, name: str) -> list[TensorStub | Assembly]:
        return [self.leaf(name)]

    def leaves_by_rank(self, name: str) -> list[TensorStub | Assembly]:
        """Return what each expert- and tensor-parallel rank holds of the tensor; its cut need not be known.

        For state that has not its parameter's shape, such as Adafactor's, these are the saving ranks' own parts.

        Raises KeyMismatch, PartNotFound, OptimizerMismatch or IncompatibleState like `leaf`.
        """
        path, leaf = self._place(name) or ((), None)
        if len(path) != 3 or self._is_one(path, _form(leaf)[1]) or self._is_cut(path, leaf):
            return [self._leaf(state, name) for state in self._by_rank]
        try:
            return list(self._stubs_by_rank(self._state, path))
        except TopologyMismatch:
            return [leaf for state in self._by_rank for leaf in self._stubs_by_rank(state, path)]

    def _stubs_by_rank(self, state: ReshardedState, path: Path) -> Sequence[TensorStub]:
        _, parameter, key = path
        return state.optimizer.stubs_by_rank(parameter, key, self._spec_of(state, parameter))

    @cached_property
    def _by_rank(self) -> list[ReshardedState]:
        sizes = self.opened.topology
        ranks = range(sizes.ep * sizes.tp)
        return [self._state.seen_from(Topology(dp=sizes.ep, tp=sizes.tp, ep=sizes.ep, rank=rank)) for rank in ranks]

    def model_state(self) -> dict[str, Any]:
        """Return the model's state dict: a stub or assembly for each tensor, other values as saved.

        Raises PartNotFound, TopologyMismatch or IncompatibleState if a tensor cannot be assembled.
        """
        return {name: self._model_value(self._state, name) for name in self._model.values}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the entries of each parameter that has any, with its master weights, by parameter name.

        Raises PartNotFound, TopologyMismatch, OptimizerMismatch or IncompatibleState if one cannot be assembled.
        """
        return {
            name: {key: self._entry_value(self._state, name, key) for key in entries}
            for name, slot in self._optimizer.slots.items()
            if (entries := slot.state)
        }

    @property
    def general_state(self) -> Mapping[str, Any]:
        """Optimizer state that belongs to no parameter, equal on all ranks, by the optimizer's keys."""
        return self._optimizer.general

    def _model_value(self, state: ReshardedState, name: str) -> Any:
        value = self._model.values[name]
        dtype, shape = _form(value) if is_tensor(value) else ("", None)
        spec = None if shape is None else state.context.as_recorded(name, dtype, shape)
        return map_tensors(state.model.leaf(name, spec), partial(state.required_weight, name), _LEAVES)

    def _entry_value(self, state: ReshardedState, parameter: str, key: str) -> Any:
        try:
            spec = self._spec_of(state, parameter)
            state.optimizer.slot(parameter, spec)
            return state.optimizer.value(parameter, key, spec)
        except TopologyMismatch as error:
            if not parameter.startswith("#"):
                raise
            raise OptimizerMismatch(
                f"{self.opened.where} does not name the parameter of optim/{parameter}/{key}, so its cut is not known; "
                "pass saved_param_names=: for each pipeline stage, for each param group, the names in order"
            ) from error

    def _spec_of(self, state: ReshardedState, parameter: str) -> ParameterSpec:
        slot = state.optimizer.slots[parameter]
        return state.context.as_recorded(parameter, "float32", slot.likely_shape, expert=slot.expert)

    @cached_property
    def _model_places(self) -> dict[str, _Place]:
        return dict(_places(("model",), self._model.values))

    @cached_property
    def _optimizer_places(self) -> dict[str, _Place]:
        places: dict[str, _Place] = {}
        for parameter, slot in self._optimizer.slots.items():
            places.update(_places(("optim", parameter), slot.state))
        return {**places, **dict(_places(_GENERAL, self.general_state))}

    def _place(self, name: str) -> _Place | None:
        return (self._model_places if name in self._model_places else self._optimizer_places).get(name)

    @cached_property
    def _value_places(self) -> dict[str, _Place]:
        """Values that are no tensors, with their paths, by name; containers with tensors in them are split."""
        trees: list[tuple[Path, Mapping[str, Any]]] = [(("model",), self._model.values)]
        trees += [(("optim", name), slot.entries) for name, slot in self._optimizer.slots.items()]
        trees += [(_GENERAL, self.general_state)]
        places: dict[str, _Place] = {}
        for above, tree in trees:
            for key, value in tree.items():
                places.update({_name(*path): (path, leaf) for path, leaf in _without_tensors((*above, key), value)})
        return places

    def _describe(self, name: str, path: Path, leaf: Any) -> GlobalTensor:
        dtype, shape = _form(leaf)
        local = None if isinstance(leaf, MissingTensor) else shape
        parameter = path[1]
        if self._is_one(path, shape):
            return GlobalTensor(name, dtype, shape, local, None)
        slot = self._optimizer.slots[parameter] if path[0] == "optim" else None
        if slot is not None and not self._is_cut(path, leaf):
            return GlobalTensor(name, dtype, shape if self._optimizer.holds_whole(slot) else None, local, None)
        of_parameter = shape if slot is None else slot.likely_shape
        whole = of_parameter
        try:
            if whole is not None:
                expert = slot is not None and slot.expert
                whole = self._state.context.as_recorded(parameter, dtype, whole, expert=expert).shape
        except TopologyMismatch:
            whole = None
        return GlobalTensor(name, dtype, whole, local, self._partition(parameter))

    def _is_one(self, path: Path, shape: tuple[int, ...] | None) -> bool:
        """Return whether a tensor is one for all ranks: a scalar, general state, or in the model's extra state."""
        return len(path) > 2 and (path[0] == "model" or path[2] == STEP or not shape or self._is_general(path))

    def _is_cut(self, path: Path, leaf: Any) -> bool:
        """Return whether an optimizer's entry is shaped like its parameter."""
        return len(path) == 3 and self._optimizer.is_shaped_like(self._optimizer.slots[path[1]], form_of(leaf)[1])

    def _partition(self, parameter: str) -> Partition:
        recorded = self._state.context.recorded.get(parameter)
        if recorded is not None:
            return recorded.partition
        sizes = self.opened.topology
        return Partition(known=sizes.tp == sizes.ep == 1)


def _places(above: Path, tree: Mapping[str, Any]) -> Iterator[tuple[str, _Place]]:
    """Yield the names of the tensors of a tree ``above`` which these keys are, with their paths."""
    for below, leaf in iter_tensors(tree, _LEAVES):
        path = (*above, *below)
        yield _name(*path), (path, leaf)


def _at(tree: Any, path: Sequence[Any]) -> Any:
    """Return the tensor at a path."""
    return dict(iter_tensors(tree, _LEAVES))[tuple(path)]


def _name(*path: Any) -> str:
    return "/".join(map(str, path))


def _form(leaf: Any) -> tuple[str, tuple[int, ...] | None]:
    """Return dtype and shape; if the tensor is in no file, as far as its info file records them."""
    if isinstance(leaf, MissingTensor):
        return leaf.dtype or UNKNOWN_DTYPE, leaf.shape
    return form_of(leaf)


def _without_tensors(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values in a tree, with their paths: each container in which no tensor lies is one."""
    if is_tensor(value):
        return
    if not any(True for _ in iter_tensors(value, _LEAVES)):
        yield path, value
        return
    for key, child in children_of(value):
        yield from _without_tensors((*path, key), child)


def plain_values(tag: WholeTag, problems: dict[str, str]) -> dict[str, Any]:
    """Return values by names such as "optim/param_groups/0/lr", "scheduler/last_epoch" and "user_content/steps".

    Values that cannot be read without running code are left out; ``problems`` gets the reason, by name.
    """
    opened = tag.opened
    values = {name: value for key, inner in tag.values.items() for name, value in _leaves_below(key, inner)}
    for number, group in enumerate(tag.param_groups):
        options: Any = map_tensors(group, opened.read)
        values |= {f"optim/param_groups/{number}/params": options.pop("params")}
        values |= dict(_leaves_below(f"optim/param_groups/{number}", options))
    for name, read in {"scheduler": opened.scheduler, "user_content": opened.user_content}.items():
        if not getattr(opened.parts, name):
            continue
        try:
            values |= dict(_leaves_below(name, read()))
        except UnsafePickle as error:
            problems[f"{name}/"] = f"{name} is not compared: {error}"
    return values


def _leaves_below(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested container, with their paths below ``name``."""
    return (("/".join((name, *map(str, path))), leaf) for path, leaf in iter_leaves(value))
