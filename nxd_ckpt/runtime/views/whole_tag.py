"""A tag as global tensors: each under its name, put together of what the ranks saved. Reads trees only, no tensor.

What cannot be put together is named all the same, and asking for it says why: NxD's own tags do not tell how their
tensors are cut, or whose the entries of their optimizer are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

from nxd_ckpt.adapters.optimizer_state import STEP
from nxd_ckpt.adapters.parameters import form_of, is_tensor
from nxd_ckpt.adapters.state import MASTER_WEIGHTS
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import closest
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import KeyMismatch, OptimizerMismatch, PartNotFound, TopologyMismatch
from nxd_ckpt.formats.tensors import Assembly, Path, TensorStub, by_digest, itemsize, iter_leaves, iter_tensors
from nxd_ckpt.layout.files import MissingTensor
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.tag.verification import refuse_missing
from nxd_ckpt.runtime.views.reshard_context import ReshardContext
from nxd_ckpt.runtime.views.resharded_model import ReshardedModel
from nxd_ckpt.runtime.views.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.runtime.views.saved_optimizer import SavedSlot
from nxd_ckpt.runtime.views.target import recorded_parameters, respecified_here, shape_of_entries

_LEAVES = (TensorStub, Assembly, MissingTensor)

_GENERAL = ("optim", "state")
"""Where state is that is no parameter's, as the filters of a load name it."""

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
        self.opened = opened
        self._partitions = partitions
        recorded = recorded_parameters(opened, partitions or {})
        self._context = ReshardContext(opened, live or Topology(), recorded=recorded, every_stage=True)
        self._model = ReshardedModel(self._context) if opened.parts.model else None
        self._saved_names = saved_param_names

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
        for name, leaf in self._general_leaves.items():
            dtype, shape = form_of(leaf)
            found[name] = GlobalTensor(name, dtype, shape, shape, None)
        return found

    @cached_property
    def values(self) -> dict[str, Any]:
        """What stands beside the tensors under such names and is none: Python numbers, extra state, by name."""
        return {name: value for name, (_, value) in self._value_places.items()}

    def path(self, name: str) -> Path:
        """The keys that lead to what has that name: "model" or "optim", the name or the parameter's, and so on."""
        if name in self._model_places:
            return ("model", *self._model_places[name][0])
        if name in self._entry_places:
            parameter, key, inner = self._entry_places[name]
            return ("optim", parameter, key, *inner)
        return self._value_places[name][0]

    def is_general(self, name: str) -> bool:
        """Whether it is a part of the optimizer's state that is no parameter's."""
        return name in self._general_leaves or (name in self._value_places and self.path(name)[:2] == _GENERAL)

    @cached_property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of each param group, and under "params" the names of its parameters.

        A stage may lack groups, and experts have groups of their own: a parameter is in the group of its number if that
        has its options, else in the first that has.
        """
        if self._optimizer is None:
            return []
        groups = [(options, list[str]()) for options in self._optimizer.groups()]
        for name, (_, slot) in self._slots.items():
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
            return self._model_leaf(name, *self._model_places[name])
        if name in self._entry_places:
            return self._entry_leaf(name, *self._entry_places[name])
        if name in self._general_leaves:
            return self._general_leaves[name]
        names = [*self._model_places, *self._entry_places]
        close = closest(name, names)
        others = f"it has {len(names)}{', such as ' if names else ''}{', '.join(names[:3])}"
        meant = others if close is None else f"did you mean {close!r}?"
        raise KeyMismatch(f"{self.opened.where} has no tensor {name!r}; {meant}")

    def model_state(self) -> dict[str, Any]:
        """The model's state dict, by name: what each tensor is made of in its place, all else as it was saved.

        Raises as :meth:`leaf`.
        """
        return {name: self._model_value(name, *found) for name, found in self._model_values.items()}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """The entries of each parameter that has any, master weights among them, by its name.

        Raises as :meth:`leaf`.
        """
        return {
            name: {key: self._entry_value(name, key) for key in entries}
            for name, (_, slot) in self._slots.items()
            if (entries := _entries(slot))
        }

    @cached_property
    def general_state(self) -> dict[str, Any]:
        """The optimizer's state that is no parameter's, the same on all ranks, by the keys that it gave it."""
        return {} if self._optimizer is None else self._optimizer.general()

    def _model_value(self, name: str, pp_rank: int, value: Any) -> Any:
        if isinstance(value, _LEAVES):
            return self._model_leaf(f"model/{name}", (name,), pp_rank)
        assert self._model is not None
        self._refuse_doubtful(name)
        tree = self._model.leaf(name, pp_rank, None)
        refuse_missing(self.opened.where, tree)
        return tree

    def _model_leaf(self, name: str, path: Path, pp_rank: int) -> TensorStub | Assembly:
        assert self._model is not None
        parameter, reference = path[0], self._model.reference(pp_rank)[path[0]]
        self._refuse_doubtful(parameter)
        spec = self._spec(parameter, *_form(reference)) if is_tensor(reference) else None
        leaf = self._model.leaf(parameter, pp_rank, spec)
        if len(path) > 1:
            leaf = dict(iter_tensors(leaf, _LEAVES))[path[1:]]
        if isinstance(leaf, MissingTensor):
            found = self._master_weight(parameter, leaf)
            if found is None:
                unnamed = any(slot.startswith("#") for slot in self._slots)
                raise PartNotFound(
                    f"{self.opened.where}: no file holds {name} ({leaf.file} is missing), nor its master weights"
                    f"{', as far as the tag tells: pass saved_param_names=' if unnamed else ''}"
                )
            return found
        assert isinstance(leaf, (TensorStub, Assembly))
        return leaf

    def _refuse_doubtful(self, name: str) -> None:
        assert self._model is not None
        if name in self._repeated:
            self._model.refuse_another_of_the_name(name)

    def _entry_leaf(self, name: str, parameter: str, key: str, inner: Path) -> TensorStub | Assembly:
        leaf = dict(iter_tensors(self._entry_value(parameter, key), _LEAVES))[inner]
        assert isinstance(leaf, (TensorStub, Assembly))
        return leaf

    def _entry_value(self, parameter: str, key: str) -> Any:
        assert self._optimizer is not None
        slot = self._slots[parameter][1]
        try:
            spec = self._slot_spec(parameter, slot)
            self._optimizer.slot(parameter, spec)
            return self._optimizer.value(parameter, key, spec)
        except TopologyMismatch as error:
            if not parameter.startswith("#"):
                raise
            raise OptimizerMismatch(
                f"{self.opened.where} does not say whose state optim/{parameter}/{key} is, so its cut is not known; "
                "pass saved_param_names=: for each pipeline stage, for each param group, the names in order"
            ) from error

    def _master_weight(self, parameter: str, missing: MissingTensor) -> Assembly | None:
        if self._optimizer is None or missing.dtype is None or parameter not in self._slots:
            return None
        spec = self._slot_spec(parameter, self._slots[parameter][1])
        return self._optimizer.entry(parameter, MASTER_WEIGHTS, replace(spec, dtype=missing.dtype))

    @cached_property
    def _model_values(self) -> dict[str, tuple[int, Any]]:
        """Every name in the model's state, the first stage that holds it, and what a rank of that has there."""
        found: dict[str, tuple[int, Any]] = {}
        if self._model is not None:
            for pp_rank in self._model.stages():
                for name, value in self._model.reference(pp_rank).items():
                    found.setdefault(name, (pp_rank, value))
        return found

    @cached_property
    def _repeated(self) -> set[str]:
        """Names in the model's state that several stages have."""
        stages = {} if self._model is None else self._model.stages()
        return {name for name, count in Counter(chain.from_iterable(stages.values())).items() if count > 1}

    @cached_property
    def _model_places(self) -> dict[str, tuple[Path, int]]:
        """(path in the state dict, stage) by the name of the tensor there."""
        return {
            _name("model", name, *path): ((name, *path), pp_rank)
            for name, (pp_rank, value) in self._model_values.items()
            for path, _ in iter_tensors(value, _LEAVES)
        }

    @cached_property
    def _value_places(self) -> dict[str, tuple[Path, Any]]:
        """(path, value) by the name of what is no tensor. Of what has tensors in it, each thing beside them."""
        held: list[tuple[Path, Any]] = [(("model", name), value) for name, (_, value) in self._model_values.items()]
        held += [
            (("optim", name, key), value)
            for name, (_, slot) in self._slots.items()
            for key, value in slot.entries.items()
        ]
        held += [((*_GENERAL, key), value) for key, value in self.general_state.items()]
        found: dict[str, tuple[Path, Any]] = {}
        for above, value in held:
            has_tensors = any(True for _ in iter_tensors(value, _LEAVES))
            for path, leaf in iter_leaves(value) if has_tensors else [((), value)]:
                if not is_tensor(leaf):
                    found[_name(*above, *path)] = (*above, *path), leaf
        return found

    @cached_property
    def _optimizer(self) -> ReshardedOptimizer | None:
        if self.opened.parts.optimizer is None:
            return None
        return ReshardedOptimizer(self._context, saved_names=self._names_as_saved())

    @cached_property
    def _slots(self) -> dict[str, tuple[int, SavedSlot]]:
        """The optimizer's parameters by name, and the stage of each."""
        stages = {} if self._optimizer is None else self._optimizer.stages()
        found: dict[str, tuple[int, SavedSlot]] = {}
        for pp_rank, slots in stages.items():
            for name, slot in slots.items():
                found.setdefault(name, (pp_rank, slot))
        return found

    @cached_property
    def _entry_places(self) -> dict[str, tuple[str, str, Path]]:
        """(parameter, key, path in what is there) by the name of the tensor there."""
        return {
            _name("optim", name, key, *path): (name, key, path)
            for name, (_, slot) in self._slots.items()
            for key, value in _entries(slot).items()
            for path, _ in iter_tensors(value, _LEAVES)
        }

    @cached_property
    def _general_leaves(self) -> dict[str, TensorStub]:
        return {_name(*_GENERAL, *path): leaf for path, leaf in iter_tensors(self.general_state, TensorStub)}

    def _describe(self, name: str, path: Path, pp_rank: int) -> GlobalTensor:
        assert self._model is not None
        value = self._model.reference(pp_rank)[path[0]]
        leaf = dict(iter_tensors(value, _LEAVES))[path[1:]]
        dtype = _form(leaf)[0]
        local = None if isinstance(leaf, MissingTensor) else leaf.shape
        if len(path) > 1:
            return GlobalTensor(name, dtype, leaf.shape, local, None)
        return GlobalTensor(name, dtype, self._whole(path[0], dtype, leaf.shape), local, self._partition(path[0]))

    def _describe_entry(self, name: str, parameter: str, key: str, inner: Path) -> GlobalTensor:
        slot = self._slots[parameter][1]
        dtype, local = form_of(dict(iter_tensors(_entries(slot)[key], _LEAVES))[inner])
        held = self._slot_shape(parameter, slot)
        assert self._optimizer is not None
        if key == STEP or not local:
            return GlobalTensor(name, dtype, local, local, None)
        if inner or not self._optimizer.is_shaped_like(slot, held, local):
            return GlobalTensor(name, dtype, local if self._optimizer.holds_whole(slot) else None, local, None)
        whole = self._whole(parameter, dtype, held, expert=slot.expert)
        return GlobalTensor(name, dtype, whole, local, self._partition(parameter))

    def _whole(
        self, parameter: str, dtype: str, held: tuple[int, ...] | None, *, expert: bool = False
    ) -> tuple[int, ...] | None:
        if held is None:
            return None
        try:
            return self._spec(parameter, dtype, held, expert=expert).shape
        except TopologyMismatch:
            return None

    def _partition(self, parameter: str) -> Partition:
        recorded = self._context.recorded.get(parameter)
        if recorded is not None:
            return recorded.partition
        sizes = self._context.saved
        return Partition(known=sizes.tp == sizes.ep == 1)

    def _spec(self, parameter: str, dtype: str, held: tuple[int, ...], *, expert: bool = False) -> ParameterSpec:
        return respecified_here(self._context, parameter, dtype, held, expert=expert)

    def _slot_spec(self, parameter: str, slot: SavedSlot) -> ParameterSpec:
        return self._spec(parameter, "float32", self._slot_shape(parameter, slot), expert=slot.expert)

    def _slot_shape(self, parameter: str, slot: SavedSlot) -> tuple[int, ...]:
        """The shape that the parameter had on each saving rank, before ZeRO-1."""
        return slot.shape or self._context.recorded_shape(parameter) or shape_of_entries(slot)

    def _names_as_saved(self) -> Sequence[Sequence[Sequence[str]]] | None:
        """Names for every saved entry; "#3" (of the only stage, else "#1.3") where nobody knows them."""
        if self._saved_names is not None:
            return self._saved_names
        names = self.opened.optimizer_names(Coordinates())
        if names is not None and not any(name.startswith("#") for name in names):
            return None
        sizes, stages = self.opened.topology, []
        for pp_rank in range(sizes.pp):
            groups = self.opened.optimizer_tree(Coordinates(pp_rank))["param_groups"]
            prefix = "#" if sizes.pp == 1 else f"#{pp_rank}."
            stages.append([[f"{prefix}{index}" for index in range(sum(len(group["params"]) for group in groups))]])
        return stages


def _name(*path: Any) -> str:
    return "/".join(map(str, path))


def _form(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape; of a tensor that is in no file, as far as its info file says."""
    if isinstance(leaf, MissingTensor):
        return leaf.dtype or UNKNOWN_DTYPE, leaf.shape or ()
    return form_of(leaf)


def _entries(slot: SavedSlot) -> dict[str, Any]:
    masters = {} if slot.master is None else {MASTER_WEIGHTS: slot.master}
    return {**slot.entries, **masters}
