"""Plain torch optimizers: state kept under the parameters themselves.

Nothing tells how an optimizer's plain tensor for a rank's own shard of a DTensor is cut: low-bit optimizers keep codes
and scales of their shard. So they are of that rank alone (`is_of_rank`): a load on the same mesh gives each rank its
own back; on another one it is refused. In older tags they are rows of one tensor, named with that placement.

FSDP cuts a parameter of two rows over four ranks; ranks without a row may leave it out of their optimizer. To the other
ranks it is one of the optimizer's parameters, so here it counts as one too, with empty state.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.mesh import Placed
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import OptimizerMismatch, UnsupportedState
from nxd_ckpt.formats.optimizer_trees import OPTIMIZER_NAME, OWN_FORM, ROWS, VALUE, is_rows, options_of
from nxd_ckpt.formats.state import OptimizerForm
from nxd_ckpt.formats.tensors import Path, form_of, iter_tensors, map_tensors
from nxd_ckpt.live.dtensor import as_part, is_dtensor, like, local_of, placed_of
from nxd_ckpt.live.frozen import LiveState
from nxd_ckpt.live.load_hooks import call_post_hooks, keys_of_its_own, loads_itself, shows_by_user_code
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.optimizer_state import (
    ON_HOST,
    AtOnce,
    Keeps,
    LeafSource,
    OptimizerAdapter,
    Slot,
    check_form,
    check_groups,
    check_state,
    entries_of,
    fill_state,
    flat_parameters,
    form_of_slots,
    keeps_any_shape,
    keeps_nothing,
    materialise,
    overwrite,
    restore_groups,
    state_by_slots,
    traits_of_all,
)
from nxd_ckpt.live.parameters import spec_of
from nxd_ckpt.live.state_names import if_known, parameter_names
from nxd_ckpt.surroundings import as_called


def is_of_rank(parameter: torch.Tensor, entry: Any, value: Any) -> bool:
    """Return whether a parameter's state entry has plain tensors that differ from rank to rank.

    True for plain tensors in the state of a parameter that is cut over ranks, and containers of them. Numbers, and
    tensors as large as the whole parameter, count as equal on all ranks.
    """
    if entry in ON_HOST or not _is_cut(parameter):
        return False
    tensors = [tensor for _, tensor in iter_tensors(value, torch.Tensor)]
    if any(map(is_dtensor, tensors)):
        return False
    return any(tensor.dim() and tensor.shape != parameter.shape for tensor in tensors)


def row_name(parameter: torch.Tensor, entry: Any) -> str:
    """Return the name under which older tags have the rows of an entry: ``codes@ranks|2x2|S(0),R``."""
    about: Any = parameter
    sizes = "x".join(map(str, about.device_mesh.shape))
    return f"{entry}{ROWS}{sizes}|{','.join(map(str, about.placements))}"


def name_of_rows(entry: Any) -> str | None:
    """Return the name of the entry whose rows these are; None for an entry without rows."""
    name, mark, _ = str(entry).partition(ROWS)
    return name if mark else None


def own_of_rows(rows: Any) -> Any:
    """Return this rank's value, from tensors of which each was loaded as this rank's row."""
    return map_tensors(rows, lambda row: row[0], torch.Tensor)


def placed_rows(name: str, parameter: torch.Tensor, saved: Any) -> dict[Path, Placed]:
    """Return the mesh positions of an entry's saved rows, one a rank, by the path of each tensor in it."""
    library: Any = sys.modules["torch.distributed.tensor"]
    about: Any = parameter
    mesh = about.device_mesh

    def placed(shape: tuple[int, ...]) -> Placed:
        row, rows = (torch.empty((size, *shape[1:]), device="meta") for size in (1, mesh.size()))
        return placed_of(name, as_part(row, mesh, [library.Shard(0)] * mesh.ndim, rows))

    return {path: placed(form_of(leaf)[1]) for path, leaf in iter_tensors(saved)}


def check_rows(name: str, parameter: torch.Tensor, entries: Mapping[Any, Any]) -> None:
    """Raise OptimizerMismatch for rows that were saved with another placement of the parameter."""
    for entry in entries:
        own = name_of_rows(entry)
        if own is None or (is_dtensor(parameter) and entry == row_name(parameter, own)):
            continue
        placement = row_name(parameter, own).partition("|")[2] if is_dtensor(parameter) else "one rank"
        raise OptimizerMismatch(
            f"optim/{name}/{own} is a plain tensor that each rank keeps for its own shard. It was saved on a mesh "
            f"{str(entry).partition('|')[2]}, the live parameter lies on {placement}, and nothing tells how to cut it "
            f"for that: load on the mesh that it was saved on, or without it, ignore_keys=['optim/*/{own}*']"
        )


def _is_cut(parameter: torch.Tensor) -> bool:
    if not is_dtensor(parameter):
        return False
    about: Any = parameter
    cuts = zip(about.device_mesh.shape, about.placements, strict=True)
    return any(size > 1 and not placement.is_replicate() for size, placement in cuts)


class PlainOptimizer(OptimizerAdapter):
    """The OptimizerAdapter of a torch optimizer that is not ZeRO-1.

    ``sharded`` optimizers have state of this rank alone, cut in an unknown way. Parameters that are not the ``model``'s
    (full-precision clones) are state too: no other part of a tag has their values. ``params`` are the parameters of
    each group, if it leaves some out.
    """

    def __init__(
        self,
        optimizer: Any,
        names: list[str],
        tp: int,
        *,
        model: ModelAdapter | None = None,
        sharded: bool = False,
        params: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> None:
        self.kind = "zero1" if sharded else "plain"
        self.parameter_names: list[str] | None = if_known(names)
        self._model = model
        self._optimizer = optimizer
        self._names = names
        self._tp = tp
        self.stepping = optimizer
        self._params = params

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The param groups with all of their parameters."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        if self._params is None:
            return groups
        return [{**group, "params": params} for group, params in zip(groups, self._params, strict=True)]

    @cached_property
    def _held(self) -> set[int]:
        return {id(parameter) for parameter, _ in flat_parameters(self._optimizer.param_groups)}

    @cached_property
    def _slots(self) -> list[Slot]:
        parameters = list(flat_parameters(self._groups))
        for name, (parameter, _) in zip(self._names, parameters, strict=True):
            if torch.nn.parameter.is_lazy(parameter):
                raise OptimizerMismatch(
                    f"optim/{name}: its parameter has no shape yet, as it is a lazy module's: run a first batch "
                    "through the model before the load, or load the model alone first"
                )
        return [
            Slot(name, parameter, parameter, group, None if self.kind == "zero1" else spec_of(parameter, self._tp))
            for name, (parameter, group) in zip(self._names, parameters, strict=True)
        ]

    def is_still(self, optimizer: Any) -> bool:
        if optimizer is not self._optimizer:
            return False
        live = list(flat_parameters(self._groups))
        pairs = zip(self._slots, live, strict=False)
        is_same = all(slot.parameter is parameter and slot.group is group for slot, (parameter, group) in pairs)
        return is_same and len(live) == len(self._slots)

    def form(self) -> OptimizerForm:
        if self.kind != "plain":
            raise OptimizerMismatch(
                f"optimizer: how {type(self._optimizer).__name__} cuts its state over ranks is not known "
                "(zero1_optimizer=True for one that is not ZeRO-1); load it on the sizes that it was saved on"
            )
        return form_of_slots(self.kind, self._slots, self._groups)

    def entries(self) -> Iterator[str]:
        return entries_of(self._slots, self._optimizer.state)

    def live_state(self) -> LiveState:
        def slot_at(path: Path) -> Slot | None:
            return self._slots[path[1]] if path[0] == "state" and isinstance(path[1], int) else None

        cache_key = self.kind, self._tp, self._names, traits_of_all(self._optimizer)
        state = self._optimizer.state_dict()
        own = keys_of_its_own(state)
        if own and not self._loads_itself:
            raise UnsupportedState(
                f"optimizer: the state_dict() of {type(self._optimizer).__name__} has {first_of(own)} beside state and "
                "param_groups, and nothing that a load calls would take it back: write a load_state_dict() for it, or "
                "register_load_state_dict_pre_hook()"
            )
        if self._params is not None:
            state = with_empty_state(state, self._params, self._held)
        live = state_by_slots(self._with_values(state), slot_at, cache_key)
        return replace(live, of_rank=self._of_rank(live.tree["state"]))

    def _is_beside(self, slot: Slot) -> bool:
        """Return whether a parameter is known not to be the model's."""
        return bool(self._beside) and id(slot.parameter) in self._beside

    @cached_property
    def _beside(self) -> set[int]:
        return set() if self._model is None else self._model.apart(slot.parameter for slot in self._slots)

    def _with_values(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict with the values of parameters that are not the model's."""
        slots = enumerate(self._slots if self._beside else ())
        values = {index: {VALUE: slot.parameter} for index, slot in slots if self._is_beside(slot)}
        own = {index: {**state["state"].get(index, {}), **value} for index, value in values.items()}
        return {**state, "state": {**state["state"], **own}} if own else state

    def _of_rank(self, state: Mapping[Any, Any]) -> frozenset[Path]:
        """Return the paths of entries that this rank alone has."""
        slots = enumerate(self._slots if any(is_dtensor(slot.key) for slot in self._slots) else ())
        entries = ((index, slot.key, state.get(index, {})) for index, slot in slots)
        return frozenset(
            ("state", index, entry)
            for index, parameter, own in entries
            for entry, value in own.items()
            if is_of_rank(parameter, entry, value)
        )

    def validate(self, saved: Mapping[str, Any]) -> None:
        if "base_state" in saved or "state" not in saved:
            raise OptimizerMismatch(
                f"optimizer: the checkpoint holds a {'ZeRO-1' if 'base_state' in saved else 'foreign'} state "
                f"({', '.join(map(str, saved))}), the live {type(self._optimizer).__name__} is not sharded; "
                "build the optimizer as when it was saved, or load with optimizer=None"
            )
        if OWN_FORM in saved["state"]:
            raise OptimizerMismatch(
                "optimizer: the checkpoint holds a state_dict() of a form of its own, that of the live "
                f"{type(self._optimizer).__name__} has torch's; build the optimizer as when it was saved"
            )
        own = keys_of_its_own(saved)
        if own and not self._loads_itself:
            raise OptimizerMismatch(
                f"optimizer: the checkpoint holds {first_of(own)} beside state and param_groups, which the live "
                f"{type(self._optimizer).__name__} does not take: it has neither its own load_state_dict() nor a hook "
                "before a load; build the optimizer as when it was saved"
            )
        slots = self._by_index(saved)
        for index, slot in slots.items():
            entries = saved["state"].get(index, {})
            check_rows(slot.name, slot.key, entries)
            self._check_value(slot, entries)
        any_shape = keeps_any_shape(self._optimizer)
        check_state(slots, saved["state"], self._optimizer.state, any_shape=any_shape)

    def _check_value(self, slot: Slot, entries: Mapping[Any, Any]) -> None:
        """Raise an error for the saved value of a parameter that cannot take it."""
        if VALUE not in entries:
            return
        if self._model is not None and not self._is_beside(slot):
            raise OptimizerMismatch(
                f"optim/{slot.name}: its parameter was not the model's when it was saved, but a clone; the live one is "
                "the model's. Build the optimizer as when it was saved"
            )
        check_form(slot, VALUE, entries[VALUE], slot.parameter)

    def placed(self, saved: Mapping[str, Any], plain: Collection[str] = ()) -> dict[Path, Placed]:
        by_path: dict[Path, Placed] = {}
        for index, slot in self._by_index(saved).items():
            entries = saved["state"].get(index, {})
            slot.place(entries, self._optimizer.state.get(slot.key, {}), plain)
            by_path |= {("state", index, *path): placed for path, placed in slot.placed.items()}
            for entry in filter(is_rows, entries):
                rows = placed_rows(slot.global_name(entry), slot.key, entries[entry])
                by_path |= {("state", index, entry, *path): placed for path, placed in rows.items()}
        return by_path

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        saved = self._take_values(saved, read, keeps)
        if self._loads_itself:
            self._load_by_itself(saved, read, keeps)
            return
        restore_groups([self._optimizer.param_groups], saved["param_groups"], read)
        counted_in_numbers = self._counts_in_numbers
        try:
            fill_state(self._optimizer.state, self._by_index(saved), saved["state"], read, keeps)
        finally:  # after a damaged tag, an older one is loaded over this state
            for slot in self._slots:
                if id(slot.key) not in self._held:  # it was read to be proved, and torch takes no such state
                    self._optimizer.state.pop(slot.key, None)
            if self._counts_in_numbers and not counted_in_numbers:
                self._count_in_tensors()
        for slot in self._slots:
            slot.clear_gradients()

    def _take_values(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps) -> Mapping[str, Any]:
        """Read the values of parameters that are not the model's; return the state dict without them."""
        state = dict(saved["state"])
        stale: list[str] = []
        for index, slot in self._by_index(saved).items():
            entries = state.get(index, {})
            if VALUE in entries:
                overwrite(slot.parameter, entries[VALUE], read)
                state[index] = {entry: value for entry, value in entries.items() if entry != VALUE}
                if not state[index]:
                    del state[index]
            elif self._is_beside(slot) and not keeps(slot.global_name(VALUE)):
                stale.append(slot.name)
        if stale:
            logger.warning(
                "optimizer: the checkpoint does not hold the values of its parameters %s, which are not the model's: "
                "they stay as they are. Set them from the model before the next step, which would overwrite it",
                first_of(stale),
            )
        return {**saved, "state": state}

    def _load_by_itself(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps) -> None:
        """Let the optimizer load a state dict of tensors, as torch does."""
        cpu = torch.device("cpu")
        own = {key: materialise(value, AtOnce(read), cpu) for key, value in saved.items() if key != "state"}
        state: dict[Any, Any] = {}
        slots = self._by_index(saved)
        for index, slot in slots.items():
            live = self._optimizer.state.get(slot.key, {})
            kept = {entry: value for entry, value in live.items() if keeps(slot.global_name(entry))}
            entries = saved["state"].get(index, {})
            values = {entry: materialise(value, AtOnce(read), cpu, slot.key) for entry, value in entries.items()}
            rows = {name_of_rows(entry): own_of_rows(values.pop(entry)) for entry in list(values) if is_rows(entry)}
            loaded = {entry: slot.as_placed(entry, value) for entry, value in values.items()} | rows | kept
            if loaded:
                state[index] = loaded
        state |= {
            key: materialise(value, AtOnce(read), cpu) for key, value in saved["state"].items() if key not in slots
        }
        for group, live_group in zip(own["param_groups"], self._optimizer.param_groups, strict=True):
            group.pop(OPTIMIZER_NAME, None)
            for option, value in group.items():
                if isinstance(value, list) and isinstance(live_group.get(option), tuple):
                    group[option] = tuple(value)
        with as_called():
            self._optimizer.load_state_dict({"state": state, **own})
        for slot in self._slots:
            slot.clear_gradients()

    def after_load(self) -> None:
        for slot in self._slots:
            entries = self._optimizer.state.get(slot.key, {})
            for entry in list(filter(is_rows, entries)):
                entries[name_of_rows(entry)] = own_of_rows(entries.pop(entry))
        if not self._loads_itself:  # else it has called them
            call_post_hooks(self._optimizer)

    @property
    def passes_user_code(self) -> bool:
        return shows_by_user_code(self._optimizer)

    @property
    def _loads_itself(self) -> bool:
        return loads_itself(self._optimizer)

    @property
    def _counts_in_numbers(self) -> bool:
        """True if steps are numbers, not tensors. Tensors on their way to a device count as tensors."""
        steps = (self._optimizer.state.get(slot.key, {}).get("step") for slot in self._slots)
        return any(isinstance(step, (int, float)) for step in steps)

    def _count_in_tensors(self) -> None:
        """Convert steps that NxD's optimizers count as numbers to tensors, as torch's load_state_dict does.

        Another class with its own step continues with the numbers that it saved.
        """
        steps_by = next(kind for kind in type(self._optimizer).__mro__ if "step" in vars(kind))
        if steps_by.__module__.startswith("torch.optim"):
            groups = self._optimizer.param_groups
            self._optimizer.__setstate__({"state": self._optimizer.state, "param_groups": groups})

    def _by_index(self, saved: Mapping[str, Any]) -> dict[Any, Slot]:
        # By position, as torch does: the indices themselves are any numbers.
        indices = check_groups(self._groups, saved["param_groups"])
        return dict(zip(indices, self._slots, strict=True))


_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_torch_zero(optimizer: Any) -> bool:
    return any(kind.__module__ == _MODULE for kind in type(optimizer).__mro__)


class TorchZeroOptimizer(PlainOptimizer):
    """The OptimizerAdapter of torch's ZeroRedundancyOptimizer. It loads on as many ranks as it was saved on.

    Each rank steps whole parameters of its own, and alone has their state. ``optim`` is an optimizer of these, whose
    param groups are updated at each step. Its ``state_dict()`` needs a collective, which no save may make; so each rank
    saves its own state, as with ZeRO-1.
    """

    def __init__(
        self,
        optimizer: Any,
        model: ModelAdapter | None,
        param_names: Sequence[Sequence[str]] | None,
        topology: Topology,
    ) -> None:
        """Raise UnsupportedState if it has not divided the parameters yet, or steps during the backward pass."""
        if getattr(optimizer, "_overlap_with_ddp", False) or not hasattr(optimizer, "optim"):
            raise UnsupportedState(
                "optimizer: ZeroRedundancyOptimizer with overlap_with_ddp=True has state that is spread over buckets "
                "of DistributedDataParallel: make it without that option"
            )
        all_names = parameter_names(optimizer.param_groups, model, param_names)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        name_of = {id(parameter): name for parameter, name in zip(parameters, all_names, strict=True)}
        inner = optimizer.optim
        own = [name_of[id(parameter)] for group in inner.param_groups for parameter in group["params"]]
        super().__init__(inner, own, topology.tp, sharded=True)
        self.parameter_names: list[str] | None = None  # they differ from rank to rank, and no rank knows the others'
        self._outer = optimizer

    def live_state(self) -> LiveState:
        _copy_options(self._outer.param_groups, self._optimizer.param_groups)  # as its next step would
        return super().live_state()

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        super().load(saved, read, keeps)
        _copy_options(self._optimizer.param_groups, self._outer.param_groups)


def _copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for options, target_options in zip(source, target, strict=True):
        target_options.update(options_of(options))


def with_left_out(groups: Sequence[Mapping[str, Any]], model: ModelAdapter) -> list[list[torch.Tensor]]:
    """Return the parameters of each group, and those that were left out, in the order of the model.

    Nothing is added if trained parameters with elements are left out, too: then the reason is another one.
    """
    params = [list(group["params"]) for group in groups]
    group_of = {id(one): number for number, own in enumerate(params) for one in own}
    trained = [one for one in model.live.values() if isinstance(one, torch.nn.Parameter) and one.requires_grad]
    if any(id(one) not in group_of and not (is_dtensor(one) and local_of(one).numel() == 0) for one in trained):
        return params
    for place, one in enumerate(trained):
        if id(one) not in group_of:
            # Groups with and without weight decay differ in the number of dimensions.
            near = [each for each in (*reversed(trained[:place]), *trained[place:]) if id(each) in group_of]
            like_it = [each for each in near if each.dim() == one.dim()] or near
            number = group_of[id(like_it[0])] if like_it else 0
            params[number].insert(sum(group_of.get(id(each)) == number for each in trained[:place]), one)
            group_of[id(one)] = number
    return params


def with_empty_state(
    state: Mapping[str, Any], params: Sequence[Sequence[torch.Tensor]], held: set[int]
) -> dict[str, Any]:
    """Return an optimizer's state dict as if it held all of ``params``, of which it holds those with ids ``held``.

    What it leaves out has the entries of another parameter, without elements.
    """
    indices = iter([index for group in state["param_groups"] for index in group["params"]])
    every = [one for own in params for one in own]
    of_held = {number: next(indices) for number, one in enumerate(every) if id(one) in held}
    own = {number: state["state"][index] for number, index in of_held.items() if index in state["state"]}
    model, entries = next(((every[number], entries) for number, entries in own.items()), (None, {}))
    filled = {
        number: own.get(number) or {entry: _empty(value, model, every[number]) for entry, value in entries.items()}
        for number in range(len(every))
        if number in own or number not in of_held
    }
    whole = {key: value for key, value in state["state"].items() if isinstance(key, str)}
    numbers = iter(range(len(every)))
    groups = [
        {**group, "params": [next(numbers) for _ in its]}
        for group, its in zip(state["param_groups"], params, strict=True)
    ]
    return {**state, "state": {number: its for number, its in filled.items() if its} | whole, "param_groups": groups}


def _empty(value: Any, model: torch.Tensor | None, parameter: torch.Tensor) -> Any:
    """Return the entry ``value`` of the parameter ``model`` for a ``parameter`` without elements."""
    if is_dtensor(value) and model is not None and value.shape == model.shape:
        return like(torch.empty_like(local_of(parameter).detach(), dtype=value.dtype), parameter)
    return value.clone() if isinstance(value, torch.Tensor) else value
