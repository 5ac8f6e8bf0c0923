"""A tag as global tensors by name, assembled from the ranks' parts. Reads trees only, no tensor.

A tensor that cannot be assembled still has a name, and reading it raises the reason: NxD's own tags do not record how
tensors are cut, or which parameters the entries of their optimizer belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from nxd_ckpt.reshard.resharded_state import partitions_of_tag, recorded_state
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
        live: sizes of another job, and a rank in it, to see that rank's tensors instead of whole ones.
        partitions: cuts of parameters of the tag, by name, where it does not record them.
        saved_param_names: the optimizer's parameter names as saved, by stage and group, where the tag has none.
    """

    def __init__(
        self,
        opened: OpenTag,
        *,
        live: Topology | None = None,
        partitions: Mapping[str, Partition] | None = None,
        saved_param_names: SavedNames | None = None,
    ) -> None:
        partitions = partitions_of_tag(opened, partitions)
        self.opened = opened
        self._partitions = partitions
        self._saved_names = saved_param_names
        self._state = recorded_state(opened, live or Topology(), partitions=partitions, saved_names=saved_param_names)
        self._context = self._state.context
        self._model = self._state.model
        self._optimizer = self._state.optimizer

    def seen_from(self, live: Topology) -> WholeTag:
        """Return this tag as another rank would hold it."""
        return WholeTag(self.opened, live=live, partitions=self._partitions, saved_param_names=self._saved_names)

    @cached_property
    def tensors(self) -> dict[str, GlobalTensor]:
        """All tensors by name: the model's in its order, then the optimizer's.

        Raises:
            OptimizerMismatch: ``saved_param_names`` do not fit the optimizer.
        """
        by_name = {name: self._describe(name, *place) for name, place in self._model_places.items()}
        by_name |= {name: self._describe_entry(name, *place) for name, place in self._entry_places.items()}
        for name, (_, leaf) in self._general_places.items():
            by_name[name] = GlobalTensor(name, *form_of(leaf), form_of(leaf)[1], None)
        return by_name

    @cached_property
    def values(self) -> dict[str, Any]:
        """Values that are no tensors (Python numbers, extra state), by names of the same kind."""
        return {name: value for name, (_, value) in self._value_places.items()}

    def path(self, name: str) -> Path:
        """Return the keys that lead to a name: "model" or "optim", the parameter's name, and so on."""
        places = next(table for table in (self._model_places, self._entry_places, self._value_places) if name in table)
        return places[name][0]

    def is_general(self, name: str) -> bool:
        """Return whether the name is optimizer state that belongs to no parameter."""
        return name in self._general_places or (name in self._value_places and self.path(name)[:2] == _GENERAL)

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
        if name in self._model_places:
            return self._model_leaf(self._model_places[name][0][1:])
        tensor: TensorStub | Assembly
        if name in self._entry_places:
            (_, parameter, key, *inner), _ = self._entry_places[name]
            tensor = _at(self._entry_value(parameter, key), inner)
            return tensor
        if name in self._general_places:
            _, tensor = self._general_places[name]
            refuse_missing(self.opened.where, {name: tensor})
            return tensor
        names = [*self._model_places, *self._entry_places]
        close = closest(name, names)
        others = f"it has {len(names)}{', such as ' if names else ''}{', '.join(names[:3])}"
        hint = others if close is None else f"did you mean {close!r}?"
        raise KeyMismatch(f"{self.opened.where} has no tensor {name!r}; {hint}")

    def leaf_or_parts(self, name: str) -> list[TensorStub | Assembly]:
        """Return the tensor alone; if it cannot be assembled, what each rank holds of it (see `leaves_by_rank`).

        Raises PartLost for a file that is gone, and the errors of `leaves_by_rank`.
        """
        try:
            return [self.leaf(name)]
        except PartLost:
            raise
        except (IncompatibleState, PartNotFound):
            return self.leaves_by_rank(name)

    def parts_or_problem(self, name: str, problems: dict[str, str]) -> list[TensorStub | Assembly] | None:
        """Return `leaf_or_parts`; None if that cannot be read, and ``problems`` says why, by name. Raises PartLost."""
        try:
            return self.leaf_or_parts(name)
        except PartLost:
            raise
        except (IncompatibleState, PartNotFound) as error:
            problems[name] = str(error)
            return None

    def leaves_by_rank(self, name: str) -> list[TensorStub | Assembly]:
        """Return what each expert- and tensor-parallel rank holds of the tensor; its cut need not be known.

        For state that has not its parameter's shape, such as Adafactor's, these are the saving ranks' own parts.

        Raises KeyMismatch, PartNotFound, OptimizerMismatch or IncompatibleState like `leaf`.
        """
        if name not in self._entry_places or self._is_assembled(*self._entry_places[name]):
            return [seen.leaf(name) for seen in self._by_rank]
        try:
            return list(self._stubs_by_rank(name))
        except TopologyMismatch:
            return [leaf for seen in self._by_rank for leaf in seen._stubs_by_rank(name)]

    def _stubs_by_rank(self, name: str) -> Sequence[TensorStub]:
        (_, parameter, key), _ = self._entry_places[name]
        return self._optimizer.stubs_by_rank(parameter, key, self._spec_of(parameter))

    def _is_assembled(self, path: Path, leaf: Any) -> bool:
        """Return whether an optimizer's entry is one tensor of all ranks: shaped like its parameter, or a scalar."""
        (_, parameter, key, *inner), (_, shape) = path, form_of(leaf)
        scalar = key == STEP or not shape
        return scalar or bool(inner) or self._optimizer.is_shaped_like(self._optimizer.slots[parameter], shape)

    @cached_property
    def _by_rank(self) -> list[WholeTag]:
        sizes = self.opened.topology
        ranks = range(sizes.ep * sizes.tp)
        return [self.seen_from(Topology(dp=sizes.ep, tp=sizes.tp, ep=sizes.ep, rank=rank)) for rank in ranks]

    def model_state(self) -> dict[str, Any]:
        """Return the model's state dict: a stub or assembly for each tensor, other values as saved.

        Raises PartNotFound, TopologyMismatch or IncompatibleState if a tensor cannot be assembled.
        """
        return {name: self._model_value(name, value) for name, value in self._model.values.items()}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the entries of each parameter that has any, with its master weights, by parameter name.

        Raises PartNotFound, TopologyMismatch, OptimizerMismatch or IncompatibleState if one cannot be assembled.
        """
        return {
            name: {key: self._entry_value(name, key) for key in entries}
            for name, slot in self._optimizer.slots.items()
            if (entries := slot.state)
        }

    @cached_property
    def general_state(self) -> dict[str, Any]:
        """Optimizer state that belongs to no parameter, equal on all ranks, by the optimizer's keys."""
        return dict(self._optimizer.general)

    def _model_value(self, name: str, value: Any) -> Any:
        if isinstance(value, _LEAVES):
            return self._model_leaf((name,))
        tree = self._model.leaf(name, None)
        refuse_missing(self.opened.where, tree)
        return tree

    def _model_leaf(self, path: Path) -> TensorStub | Assembly:
        name = path[0]
        value = self._model.values[path[0]]
        spec = self._context.as_recorded(name, *_form(value)) if is_tensor(value) else None
        leaf = self._model.leaf(name, spec)
        weight = self._state.required_weight(_name(*path), _at(leaf, path[1:]))
        assert isinstance(weight, (TensorStub, Assembly))
        return weight

    def _entry_value(self, parameter: str, key: str) -> Any:
        try:
            spec = self._spec_of(parameter)
            self._optimizer.slot(parameter, spec)
            return self._optimizer.value(parameter, key, spec)
        except TopologyMismatch as error:
            if not parameter.startswith("#"):
                raise
            raise OptimizerMismatch(
                f"{self.opened.where} does not name the parameter of optim/{parameter}/{key}, so its cut is not known; "
                "pass saved_param_names=: for each pipeline stage, for each param group, the names in order"
            ) from error

    def _spec_of(self, parameter: str) -> ParameterSpec:
        slot = self._optimizer.slots[parameter]
        return self._context.as_recorded(parameter, "float32", slot.likely_shape, expert=slot.expert)

    @cached_property
    def _model_places(self) -> dict[str, _Place]:
        return _places({"model": self._model.values})

    @cached_property
    def _entry_places(self) -> dict[str, _Place]:
        return _places({"optim": {name: slot.state for name, slot in self._optimizer.slots.items()}})

    @cached_property
    def _general_places(self) -> dict[str, _Place]:
        section, key = _GENERAL
        return _places({section: {key: self.general_state}})

    @cached_property
    def _value_places(self) -> dict[str, _Place]:
        """Values that are no tensors, with their paths, by name; containers with tensors in them are split."""
        candidates: list[tuple[Path, Any]] = [(("model", name), value) for name, value in self._model.values.items()]
        candidates += [
            (("optim", name, key), value)
            for name, slot in self._optimizer.slots.items()
            for key, value in slot.entries.items()
        ]
        candidates += [((*_GENERAL, key), value) for key, value in self.general_state.items()]
        places: dict[str, _Place] = {}
        for prefix, value in candidates:
            places.update({_name(*path): (path, leaf) for path, leaf in _without_tensors(prefix, value)})
        return places

    def _describe(self, name: str, path: Path, leaf: Any) -> GlobalTensor:
        (_, parameter, *inner), dtype = path, _form(leaf)[0]
        local = None if isinstance(leaf, MissingTensor) else leaf.shape
        if inner:
            return GlobalTensor(name, dtype, leaf.shape, local, None)
        return GlobalTensor(name, dtype, self._whole(parameter, dtype, leaf.shape), local, self._partition(parameter))

    def _describe_entry(self, name: str, path: Path, leaf: Any) -> GlobalTensor:
        (_, parameter, key, *inner), (dtype, local) = path, form_of(leaf)
        slot = self._optimizer.slots[parameter]
        if key == STEP or not local:
            return GlobalTensor(name, dtype, local, local, None)
        if inner or not self._optimizer.is_shaped_like(slot, local):
            return GlobalTensor(name, dtype, local if self._optimizer.holds_whole(slot) else None, local, None)
        whole = self._whole(parameter, dtype, slot.likely_shape, expert=slot.expert)
        return GlobalTensor(name, dtype, whole, local, self._partition(parameter))

    def _whole(
        self, parameter: str, dtype: str, shape: tuple[int, ...] | None, *, expert: bool = False
    ) -> tuple[int, ...] | None:
        if shape is None:
            return None
        try:
            return self._context.as_recorded(parameter, dtype, shape, expert=expert).shape
        except TopologyMismatch:
            return None

    def _partition(self, parameter: str) -> Partition:
        recorded = self._context.recorded.get(parameter)
        if recorded is not None:
            return recorded.partition
        sizes = self._context.saved
        return Partition(known=sizes.tp == sizes.ep == 1)


def _places(tree: Mapping[str, Any]) -> dict[str, _Place]:
    """Return the tensors of a tree with their paths, by name."""
    return {_name(*path): (path, leaf) for path, leaf in iter_tensors(tree, _LEAVES)}


def _at(tree: Any, path: Sequence[Any]) -> Any:
    """Return the tensor at a path."""
    return dict(iter_tensors(tree, _LEAVES))[tuple(path)]


def _name(*path: Any) -> str:
    return "/".join(map(str, path))


def _form(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape; if the tensor is in no file, as far as its info file records them."""
    if isinstance(leaf, MissingTensor):
        return leaf.dtype or UNKNOWN_DTYPE, leaf.shape or ()
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
