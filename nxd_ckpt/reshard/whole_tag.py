"""A tag as global tensors: each under its name, put together from what the ranks saved. Reads trees only, no tensor.

What cannot be put together has a name all the same, and asking for it raises the reason: NxD's own tags do not say how
their tensors are cut, or which parameters the entries of their optimizer belong to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import closest
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import KeyMismatch, OptimizerMismatch, TopologyMismatch
from nxd_ckpt.formats.tensors import Assembly, Path, TensorStub, by_digest, itemsize, iter_leaves, iter_tensors
from nxd_ckpt.live.optimizer_state import STEP
from nxd_ckpt.live.parameters import form_of, is_tensor
from nxd_ckpt.reshard.resharded_state import recorded_state
from nxd_ckpt.tag.files import MissingTensor
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.verification import refuse_missing

_LEAVES = (TensorStub, Assembly, MissingTensor)

_Place = tuple[Path, Any]
"""The keys that lead to something, and what a saving rank has there."""

_GENERAL = ("optim", "state")
"""Where state is that belongs to no parameter, as the filters of a load name it."""

UNKNOWN_DTYPE = "?"
"""Of a tensor that is in no file, and of which none says what it was."""


@dataclass(frozen=True)
class GlobalTensor:
    """One tensor of a tag, all of it.

    ``name`` is "model/embed.weight", "optim/embed.weight/exp_avg" or, where a tag does not tell whose it is,
    "optim/#3/exp_avg". ``shape`` is the whole tensor's, None where its cut is not known; ``local_shape`` what a saving
    rank's file holds of it (its shard, under ZeRO-1), None where no file does. ``dtype`` is torch's name ("bfloat16").
    ``partition`` says how saving ranks cut it over tensor- and expert-parallel ranks; None where it has no parameter's
    shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    local_shape: tuple[int, ...] | None
    partition: Partition | None

    @property
    def nbytes(self) -> int | None:
        """Bytes of the whole tensor; None where its shape or dtype is not known."""
        if self.shape is None or self.dtype == UNKNOWN_DTYPE:
            return None
        return prod(self.shape) * itemsize(self.dtype)


class WholeTag:
    """The tag ``opened``, as a single rank would hold it.

    Args:
        live: as the rank would hold it that this is seen from, in a job of its sizes.
        partitions: how parameters of the tag were cut, by name, where it does not say.
        saved_param_names: the optimizer's parameter names as saved, by stage and group, where it does not say.
    """

    def __init__(
        self,
        opened: OpenTag,
        *,
        live: Topology | None = None,
        partitions: Mapping[str, Partition] | None = None,
        saved_param_names: Sequence[Sequence[Sequence[str]]] | None = None,
    ) -> None:
        self.opened, self._partitions, self._saved_names = opened, partitions, saved_param_names
        self._state = recorded_state(opened, live or Topology(), partitions=partitions, saved_names=saved_param_names)
        self._context, self._model, self._optimizer = self._state.context, self._state.model, self._state.optimizer

    def seen_from(self, live: Topology) -> WholeTag:
        """The same, as another rank would hold it."""
        return WholeTag(self.opened, live=live, partitions=self._partitions, saved_param_names=self._saved_names)

    @cached_property
    def tensors(self) -> dict[str, GlobalTensor]:
        """Every tensor by its name: the model's in its order, then the optimizer's.

        Raises:
            OptimizerMismatch: ``saved_param_names`` do not fit the optimizer.
        """
        found = {name: self._describe(name, *place) for name, place in self._model_places.items()}
        found |= {name: self._describe_entry(name, *place) for name, place in self._entry_places.items()}
        for name, (_, leaf) in self._general_places.items():
            found[name] = GlobalTensor(name, *form_of(leaf), form_of(leaf)[1], None)
        return found

    @cached_property
    def values(self) -> dict[str, Any]:
        """What is not a tensor, by names of the same kind: Python numbers, extra state."""
        return {name: value for name, (_, value) in self._value_places.items()}

    def path(self, name: str) -> Path:
        """The keys that lead to what has that name: "model" or "optim", the name or the parameter's, and so on."""
        places = next(one for one in (self._model_places, self._entry_places, self._value_places) if name in one)
        return places[name][0]

    def is_general(self, name: str) -> bool:
        """Whether it is optimizer state that belongs to no parameter."""
        return name in self._general_places or (name in self._value_places and self.path(name)[:2] == _GENERAL)

    @cached_property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of each param group, and under "params" the names of its parameters.

        A stage may lack groups, and experts have groups of their own: a parameter is in the group of its number if that
        has its options, else in the first that has.
        """
        groups = [(options, list[str]()) for options in self._optimizer.groups]
        for name, slot in self._optimizer.slots.items():
            likely = groups[slot.group : slot.group + 1]
            fits = (names for options, names in likely + groups if by_digest(options) == by_digest(slot.options))
            found = next(fits, None)
            if found is None:
                found = []
                groups.append((dict(slot.options), found))
            found.append(name)
        return [{**options, "params": names} for options, names in groups]

    def leaf(self, name: str) -> TensorStub | Assembly:
        """What the tensor is made of, to be read by ``opened.reader()``.

        Raises:
            KeyMismatch: no such tensor.
            PartNotFound: no file holds it.
            TopologyMismatch: how it is cut is not known.
            OptimizerMismatch, IncompatibleState: it cannot be put together; says why.
        """
        if name in self._model_places:
            return self._model_leaf(self._model_places[name][0][1:])
        found: TensorStub | Assembly
        if name in self._entry_places:
            (_, parameter, key, *inner), _ = self._entry_places[name]
            found = _at(self._entry_value(parameter, key), inner)
            return found
        if name in self._general_places:
            _, found = self._general_places[name]
            refuse_missing(self.opened.where, {name: found})
            return found
        names = [*self._model_places, *self._entry_places]
        close = closest(name, names)
        others = f"it has {len(names)}{', such as ' if names else ''}{', '.join(names[:3])}"
        meant = others if close is None else f"did you mean {close!r}?"
        raise KeyMismatch(f"{self.opened.where} has no tensor {name!r}; {meant}")

    def leaves_by_rank(self, name: str) -> list[TensorStub | Assembly]:
        """What each expert- and tensor-parallel rank holds of the tensor. For that its cut need not be known. Of state
        that is not of its parameter's shape, as Adafactor's, what each saving rank has of its own.

        Raises as :meth:`leaf`.
        """
        if name not in self._entry_places or self._is_put_together(*self._entry_places[name]):
            return [seen.leaf(name) for seen in self._by_rank]
        try:
            return list(self._as_held(name))
        except TopologyMismatch:
            return [leaf for seen in self._by_rank for leaf in seen._as_held(name)]

    def _as_held(self, name: str) -> Sequence[TensorStub]:
        (_, parameter, key), _ = self._entry_places[name]
        return self._optimizer.as_held(parameter, key, self._spec_of(parameter))

    def _is_put_together(self, path: Path, leaf: Any) -> bool:
        """Whether an optimizer's entry is one tensor of all ranks: shaped like its parameter, or a scalar."""
        (_, parameter, key, *inner), (_, held) = path, form_of(leaf)
        scalar = key == STEP or not held
        return scalar or bool(inner) or self._optimizer.is_shaped_like(self._optimizer.slots[parameter], held)

    @cached_property
    def _by_rank(self) -> list[WholeTag]:
        sizes = self.opened.topology
        ranks = range(sizes.ep * sizes.tp)
        return [self.seen_from(Topology(dp=sizes.ep, tp=sizes.tp, ep=sizes.ep, rank=rank)) for rank in ranks]

    def model_state(self) -> dict[str, Any]:
        """The model's state dict, by name: what each tensor is made of in its place, all else as it was saved.

        Raises as :meth:`leaf`.
        """
        return {name: self._model_value(name, value) for name, value in self._model.values.items()}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The entries of each parameter that has any, master weights among them, by its name.

        Raises as :meth:`leaf`.
        """
        return {
            name: {key: self._entry_value(name, key) for key in entries}
            for name, slot in self._optimizer.slots.items()
            if (entries := slot.state)
        }

    @cached_property
    def general_state(self) -> dict[str, Any]:
        """The optimizer's state that belongs to no parameter, the same on all ranks, by the optimizer's keys."""
        return dict(self._optimizer.general)

    def _model_value(self, name: str, value: Any) -> Any:
        if isinstance(value, _LEAVES):
            return self._model_leaf((name,))
        tree = self._model.leaf(name, None)
        refuse_missing(self.opened.where, tree)
        return tree

    def _model_leaf(self, path: Path) -> TensorStub | Assembly:
        name, value = path[0], self._model.values[path[0]]
        spec = self._context.as_recorded(name, *_form(value)) if is_tensor(value) else None
        leaf = self._model.leaf(name, spec)
        found = self._state.required_weight(_name(*path), _at(leaf, path[1:]))
        assert isinstance(found, (TensorStub, Assembly))
        return found

    def _entry_value(self, parameter: str, key: str) -> Any:
        try:
            spec = self._spec_of(parameter)
            self._optimizer.slot(parameter, spec)
            return self._optimizer.value(parameter, key, spec)
        except TopologyMismatch as error:
            if not parameter.startswith("#"):
                raise
            raise OptimizerMismatch(
                f"{self.opened.where} does not say which parameter optim/{parameter}/{key} belongs to, so its cut is "
                "not known; pass saved_param_names=: for each pipeline stage, for each param group, the names in order"
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
        """(path, value) by the name of what is no tensor. Of what has tensors in it, each thing beside them."""
        held: list[tuple[Path, Any]] = [(("model", name), value) for name, value in self._model.values.items()]
        held += [
            (("optim", name, key), value)
            for name, slot in self._optimizer.slots.items()
            for key, value in slot.entries.items()
        ]
        held += [((*_GENERAL, key), value) for key, value in self.general_state.items()]
        found: dict[str, _Place] = {}
        for above, value in held:
            has_tensors = any(True for _ in iter_tensors(value, _LEAVES))
            for path, leaf in iter_leaves(value) if has_tensors else [((), value)]:
                if not is_tensor(leaf):
                    found[_name(*above, *path)] = (*above, *path), leaf
        return found

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
        self, parameter: str, dtype: str, held: tuple[int, ...] | None, *, expert: bool = False
    ) -> tuple[int, ...] | None:
        if held is None:
            return None
        try:
            return self._context.as_recorded(parameter, dtype, held, expert=expert).shape
        except TopologyMismatch:
            return None

    def _partition(self, parameter: str) -> Partition:
        recorded = self._context.recorded.get(parameter)
        if recorded is not None:
            return recorded.partition
        sizes = self._context.saved
        return Partition(known=sizes.tp == sizes.ep == 1)


def _places(tree: Mapping[str, Any]) -> dict[str, _Place]:
    """Of each tensor in a tree, by its name."""
    return {_name(*path): (path, leaf) for path, leaf in iter_tensors(tree, _LEAVES)}


def _at(tree: Any, path: Sequence[Any]) -> Any:
    """The tensor there."""
    return dict(iter_tensors(tree, _LEAVES))[tuple(path)]


def _name(*path: Any) -> str:
    return "/".join(map(str, path))


def _form(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape; of a tensor that is in no file, as far as its info file says."""
    if isinstance(leaf, MissingTensor):
        return leaf.dtype or UNKNOWN_DTYPE, leaf.shape or ()
    return form_of(leaf)
