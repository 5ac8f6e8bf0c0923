"""Protocol of adapters of optimizers; per-parameter state, which they share: describing, checking and filling it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.mesh import Placed
from nxd_ckpt.errors import DtypeMismatch, OptimizerMismatch, ShapeMismatch
from nxd_ckpt.formats.memory import allocated, fill, strided
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS, MOMENTS, OPTIMIZER_NAME, STEP, is_rows, options_of
from nxd_ckpt.formats.state import OptimizerForm, OptimizerSlot, State, StateTensor
from nxd_ckpt.formats.strides import Stride, fitted, stored_stride, stride_of
from nxd_ckpt.formats.tensors import Assembly, Path, dtype_name, form_of, is_tensor, iter_tensors, map_tensors
from nxd_ckpt.live.dtensor import is_dtensor, like, local_of, model_of, placed_of, tell_autograd
from nxd_ckpt.live.frozen import LiveState
from nxd_ckpt.live.parameters import (
    is_dense,
    is_row_major,
    is_unusual,
    memory_for,
    overlaps_itself,
    own_stride,
    refuse_short,
    refuse_unsupported,
    stride_like,
    traits_of,
)
from nxd_ckpt.live.torch_xla import copy_in, place


class LeafSource(Protocol):
    """A reader of saved leaves: at once, or by the end of the load, several at a time."""

    def __call__(self, leaf: Any) -> torch.Tensor:
        """Return the leaf now, as a CPU tensor that the caller may keep."""

    def into(self, leaf: Any, memory: torch.Tensor) -> None:
        """Fill ``memory``, a contiguous CPU tensor of the leaf's form, which must not be read before the load ends.

        Where memories overlap, the later call wins.
        """

    def then(self, leaf: Any, take: Callable[[torch.Tensor], None]) -> None:
        """Call ``take`` with the leaf as a CPU tensor, on this thread, in the order of these calls."""


class AtOnce:
    """A LeafSource that reads each leaf at once."""

    def __init__(self, read: LeafSource) -> None:
        self._read = read

    def __call__(self, leaf: Any) -> torch.Tensor:
        return self._read(leaf)

    def into(self, leaf: Any, memory: torch.Tensor) -> None:
        memory.copy_(self._read(leaf))

    def then(self, leaf: Any, take: Callable[[torch.Tensor], None]) -> None:
        take(self._read(leaf))


Keeps = Callable[[str], bool]
"""A predicate on global names ("optim/up.weight/exp_avg", "optim/state/..."): True if the live value stays."""


def keeps_nothing(name: str) -> bool:
    return False


class OptimizerAdapter(Protocol):
    """A live optimizer as a state tree and back. ``kind`` is "plain" or "zero1" (each rank has its own state).

    ``parameter_names`` lists the names of all parameters in the order of their indices, None if they are unknown.
    ``stepping`` is the live optimizer whose class keeps the state; None if there are several, or none. By default
    nothing lies on meshes or follows the model, and there are no hooks.
    """

    kind: str
    parameter_names: list[str] | None
    stepping: Any = None
    is_filled: bool = False
    """True for a dict, which a load fills with the tag's own state: nothing steps on it."""

    def is_still(self, optimizer: Any) -> bool:
        """Return whether this is the adapter of ``optimizer``, which still has the parameters and groups of before."""
        return False

    @abstractmethod
    def form(self) -> OptimizerForm | None:
        """Return the form of its state dict on this rank; None for a dict, which takes any saved one.

        Raises OptimizerMismatch if only the optimizer itself knows how its state is cut.
        """

    @abstractmethod
    def entries(self) -> Iterable[str]:
        """Return the global names of its state so far."""

    @abstractmethod
    def live_state(self) -> LiveState:
        """Return the optimizer's state dict in NxD's form, with its live tensors. No device work."""

    def capture(self) -> State:
        """Return the same, as it is now."""
        return self.live_state().frozen()

    @abstractmethod
    def validate(self, saved: Mapping[str, Any]) -> None:
        """Check that ``saved`` (a state dict whose leaves are tensors or have ``dtype`` and ``shape``) fits.

        Changes nothing. Raises OptimizerMismatch for another kind or other param groups, ShapeMismatch or
        DtypeMismatch for a tensor that does not fit.
        """

    def know_names(self, names: Sequence[str]) -> None:
        """Use these names of the parameters, by index, if there are no others, as in a dict."""
        return

    def placed(self, saved: Mapping[str, Any], plain: Collection[str] = ()) -> Mapping[Path, Placed]:
        """Return the mesh positions of those of ``saved``'s tensors, by path, that are loaded into DTensors.

        ``plain`` are global names of entries that were no DTensors beside a parameter that was one. `load` takes this
        rank's part of each placed tensor instead. Raises UnsupportedState for a DTensor that is not cut into boxes.
        """
        return {}

    @abstractmethod
    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        """Continue from ``saved``, which `validate` accepted, reading one leaf at a time; after the model's load.

        State whose name ``keeps`` accepts is not in ``saved``, and stays.

        No collective, nothing compiled. Gradients are dropped: the next backward pass makes new ones. (With
        ``zero_grad(set_to_none=False)``, torch-xla's and NxD's default, an uninterrupted run would keep zero gradients,
        and so would go on decaying a parameter that had a gradient before and gets none in the next step.)
        """

    def after_load(self) -> None:
        """Call the hooks that torch calls after a load, when everything is loaded."""
        return

    def followed(self, saved: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the live parameters, by name, that `load` copies into shards because ``saved`` has no such values."""
        return ()

    @property
    def passes_user_code(self) -> bool:
        """True if user code that a load calls may put another state there than was saved."""
        return False

    def shards(self, saved: Mapping[str, Any]) -> Mapping[Any, Slot]:
        """Return the parameters with shards of their own, by their indices in ``saved``."""
        return {}

    def follow(self, keeps: Keeps) -> None:
        """Copy the model's weights again into ZeRO-1's shards, after a load of the model alone.

        Otherwise the next step would restore the old weights.
        """
        return


Group = dict[str, Any]
_Entries = dict[Any, Any]


ON_HOST = (STEP, "mu_product")
"""Entries that torch keeps on the CPU, unless the optimizer's step runs on the device as a whole."""


@dataclass(frozen=True)
class Slot:
    """One parameter of an optimizer.

    ``key`` is the tensor that its state belongs to and is shaped like: the ``parameter`` itself, or its ZeRO-1 shard,
    number ``shard`` of ``shards``. ``group`` is the param group of ``key``. In a load, ``placed`` has the mesh
    positions of the tensors that are, or become, DTensors, by entry and path in it; ``models`` has a model DTensor for
    those not shaped as ``key``.
    """

    name: str
    parameter: torch.Tensor
    key: torch.Tensor
    group: Group
    spec: ParameterSpec | None
    shards: int = 1
    shard: int = 0
    placed: dict[Path, Placed] = field(default_factory=dict, compare=False)
    models: dict[Path, torch.Tensor] = field(default_factory=dict, compare=False)

    def place(self, saved: Mapping[Any, Any], live: Mapping[Any, Any], plain: Collection[str]) -> None:
        """Find the mesh positions of tensors ``saved`` as whole ones: as ``live`` ones, else as the parameter.

        ``plain`` are global names of those that are not as the parameter.
        """
        self.placed.clear()
        self.models.clear()
        if not any(map(is_dtensor, (self.key, *live.values()))):
            return  # as without a mesh: quickly, for there may be many
        lives = dict(iter_tensors(live, torch.Tensor))
        for path, value in iter_tensors(saved):
            entry = path[0]
            own = lives.get(path)
            is_as_parameter = entry != STEP and not (plain and self.global_name(*path) in plain)
            model: Any = self.key if own is None and is_as_parameter else own
            if not is_dtensor(model):
                continue
            shape = form_of(value)[1]
            if own is None and entry not in ON_HOST and shape and shape != tuple(model.shape):
                # Plain tensors of that kind are a rank's own, or rows: this one was a DTensor, of factored moments.
                if is_rows(entry):
                    continue
                cut = {dim for part in Assembly.of(value).fragments for dim, at in enumerate(part.target.offset) if at}
                model = self.models[path] = model_of(self.key, shape, sorted(cut))
            if shape == tuple(model.shape):
                self.placed[path] = placed_of(self.global_name(*path), model)

    @cached_property
    def is_row_major(self) -> bool:
        return is_row_major(local_of(self.key))

    def as_placed(self, entry: Any, value: Any) -> Any:
        """Return the loaded ``value`` in the form of a new entry, with a DTensor for each tensor that is placed."""
        if not self.placed or is_rows(entry):
            return value
        path_of = {id(tensor): (entry, *path) for path, tensor in iter_tensors(value, torch.Tensor)}

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            path = path_of[id(tensor)]
            return like(tensor, self.models.get(path, self.key)) if path in self.placed else tensor

        return map_tensors(value, placed, torch.Tensor)

    def describe(self, parts: Path, tensor: torch.Tensor) -> StateTensor:
        """Describe the state entry at ``parts`` ("exp_avg", ...): cut like the parameter if shaped like it."""
        name = f"optim/{self.name}/{parts[0]}" if len(parts) == 1 else self.global_name(*parts)
        if parts == (STEP,) or tensor.shape != self._shape:
            return StateTensor(name, None, 1, 0, None, self._is_expert)
        return StateTensor(name, self.spec, self.shards, self.shard, None, self._is_expert)

    @cached_property
    def _is_expert(self) -> bool:
        return self.spec is not None and self.spec.partition.expert

    @cached_property
    def _shape(self) -> torch.Size:
        return self.key.shape

    @property
    def master_dtype(self) -> str | None:
        """Dtype of the master weights that the state belongs to; None if it belongs to the parameter itself."""
        return None if self.key is self.parameter else dtype_name(self.key.dtype)

    def global_name(self, *path: Any) -> str:
        """Return the global name of an entry of its state, or of a tensor at a ``path`` that begins with the entry."""
        return "/".join(map(str, ("optim", self.name, *path)))

    def clear_gradients(self) -> None:
        for tensor in (self.parameter, self.key):
            tensor.grad = None
            if hasattr(tensor, "main_grad"):  # torch-xla's gradient accumulation: its presence alone means "step"
                del tensor.main_grad


def form_of_slots(kind: str, slots: Sequence[Slot], groups: Sequence[Group]) -> OptimizerForm:
    """Return the form of an optimizer with these parameters and live groups."""
    optimizer_slots = tuple(
        OptimizerSlot(slot.name, slot.spec, slot.shards, slot.shard, slot.master_dtype)
        for slot in slots
        if slot.spec is not None
    )
    sizes = tuple(len(group["params"]) for group in groups)
    options = tuple(map(options_of, groups))
    return OptimizerForm(kind, optimizer_slots, sizes, options=options)


def check_groups(live: Sequence[Group], saved: Sequence[Group]) -> list[Any]:
    """Return the saved indices of all parameters, in live order.

    Raises OptimizerMismatch if groups differ in size, UnsupportedState for an option whose memory was freed.
    """
    for number, group in enumerate(live):
        for option, value in options_of(group).items():
            if isinstance(value, torch.Tensor):
                refuse_short(f"optim/param_groups/{number}/{option}", value)
    live_sizes, sizes = ([len(group["params"]) for group in groups] for groups in (live, saved))
    if live_sizes != sizes:
        raise OptimizerMismatch(
            f"optimizer: the checkpoint has parameters per param group {sizes}, the live optimizer has {live_sizes}; "
            "build param_groups as when it was saved (same groups, same frozen parameters)"
        )
    return [index for group in saved for index in group["params"]]


def check_state(
    slots: Mapping[Any, Slot], saved: Mapping[Any, Any], live: Mapping[torch.Tensor, Any], *, any_shape: bool = False
) -> None:
    """Check that `fill_state` can take ``saved``. A parameter without an entry never had a gradient.

    ``any_shape``: entries may have other shapes than their parameters, named or not.

    Raises OptimizerMismatch for unknown indices, ShapeMismatch and DtypeMismatch for entries that do not fit,
    UnsupportedState for live ones that cannot take a value, as their memory was freed.
    """
    for index, entries in saved.items():
        if isinstance(index, str):
            continue  # state of the optimizer as a whole
        if index not in slots:
            raise OptimizerMismatch(
                f"optimizer: the checkpoint has state for parameter {index!r}, but no param group lists that index; "
                "it was not written by this kind of optimizer"
            )
        slot = slots[index]
        for entry, value in entries.items():
            own = live.get(slot.key, {}).get(entry)
            if isinstance(own, torch.Tensor):
                refuse_unsupported(slot.global_name(entry), own)
            if entry != STEP and is_tensor(value) and not is_rows(entry):
                check_form(slot, entry, value, own, any_shape=any_shape)


def keeps_any_shape(optimizer: Any) -> bool:
    """Return whether the class is not torch's own: it may keep state of any shape for a parameter."""
    return not type(optimizer).__module__.startswith("torch.optim")


def check_form(slot: Slot, entry: str, saved: Any, live: Any, *, any_shape: bool = False) -> None:
    """Compare a saved tensor with the live one, or with the tensor it will belong to if there is none yet."""
    dtype, shape = form_of(saved)
    if isinstance(live, torch.Tensor):
        live_dtype, live_shape = form_of(live)
    else:
        # The optimizer chooses dtype and rank of an entry; one of the parameter's own rank must have its shape,
        # except for reduced dimensions (Adafactor's row_var and col_var).
        live_dtype = dtype
        # Others may keep matrices of any shape (Shampoo, SOAP, GaLore), and programs their own entries beside torch's.
        of_key = tuple(1 if saved_size == 1 else size for saved_size, size in zip(shape, slot.key.shape, strict=False))
        is_own = entry not in MOMENTS and slot.key is slot.parameter and not slot.name.startswith("#")
        live_shape = of_key if 0 < len(shape) == slot.key.dim() and not (any_shape or is_own) else shape
    if shape != live_shape:
        raise ShapeMismatch(
            f"optim/{slot.name}/{entry}: saved with shape {shape}, the live one has {live_shape}; the checkpoint was "
            "saved for another data- or tensor-parallel size, or for other param_groups"
        )
    if dtype != live_dtype:
        raise DtypeMismatch(
            f"optim/{slot.name}/{entry}: saved as {dtype}, the live one is {live_dtype}; "
            "build the optimizer with the dtype that was saved: values are never cast silently"
        )


def entries_of(slots: Iterable[Slot], state: Mapping[Any, Any]) -> Iterator[str]:
    """Yield the global names of the entries in an optimizer's ``state``."""
    yield from (f"optim/state/{key}" for key in state if isinstance(key, str))
    for slot in slots:
        yield from map(slot.global_name, state.get(slot.key, ()))


def restore_groups(live: Sequence[Sequence[Group]], saved: Sequence[Group], read: LeafSource) -> None:
    """Restore the options (lr, betas, ...) of each list of groups in ``live``, in place, all from ``saved``.

    In place, because learning-rate schedulers refer to the groups. Options that were not saved stay.
    """
    for number, options in enumerate(saved):
        first, *others = (groups[number] for groups in live)
        for option, value in options_of(options).items():
            if option == OPTIMIZER_NAME:
                continue
            first[option] = _option(option, value, first.get(option), read)
            for group in others:
                group[option] = first[option]


def fill_state(
    state: dict[Any, Any],
    slots: Mapping[Any, Slot],
    saved: Mapping[Any, Any],
    read: LeafSource,
    keeps: Keeps,
) -> None:
    """Replace the optimizer's ``state`` with the saved one, one tensor at a time; other entries go, unless kept.

    Tensors that fit are overwritten in place, others are made on the parameter's device. ``step`` stays in the place
    and form in which the optimizer keeps it.
    """
    for key in [key for key in state if isinstance(key, str) and not keeps(f"optim/state/{key}")]:
        del state[key]
    for index, slot in slots.items():
        live = state.get(slot.key, {})
        kept = {entry: value for entry, value in live.items() if keeps(slot.global_name(entry))}
        if index not in saved:
            _replace(state, slot.key, kept)
            continue
        filled: _Entries = dict.fromkeys(saved[index]) | kept  # in their order, whenever they arrive
        state[slot.key] = filled
        parameter = _ParameterState(filled, live, slot, read)
        for entry, value in saved[index].items():
            parameter.fill(entry, value)
    for key, value in saved.items():
        if isinstance(key, str):
            state[key] = materialise(value, read, torch.device("cpu"))


def overwrite(live: torch.Tensor, leaf: Any, read: LeafSource) -> None:
    """Overwrite ``live`` in place with the saved leaf; without an intermediate copy if it is on the CPU."""
    memory = memory_for(live)
    if memory is None:
        if live.device.type == "cpu":
            copy_in(live, read(leaf))  # at once: it may share memory with what comes next
        else:
            read.then(leaf, partial(copy_in, live))
    else:
        tell_autograd(live)
        read.into(leaf, memory)


def materialise(tree: Any, read: LeafSource, device: torch.device, key: torch.Tensor | None = None) -> Any:
    """Return ``tree`` with copied containers and every saved leaf as a tensor on ``device``.

    Each tensor gets its saved strides, or those of ``key`` where they were saved as the parameter's.
    """
    if device.type == "cpu":
        return map_tensors(tree, lambda leaf: _new(leaf, read, key))
    return map_tensors(tree, lambda leaf: place(_strided(read(leaf), leaf, key), device))


def describe_path(path: Path, tensor: torch.Tensor, slot: Slot | None) -> StateTensor:
    """Describe the tensor at ``path`` of an optimizer's state dict; ``slot`` is its parameter's, if it has one."""
    if is_unusual(tensor) or tensor.is_meta:
        owner = path if slot is None else (slot.name, *path[2:])
        refuse_unsupported("/".join(map(str, ("optim", *owner))), tensor)
    if slot is None:
        return StateTensor("/".join(map(str, ("optim", *path))))
    return slot.describe(path[2:] or (MASTER_WEIGHTS,), tensor)


def traits_of_all(optimizer: Any) -> list[Hashable]:
    """Return the traits of all parameters of an optimizer, in order."""
    return [traits_of(parameter) for parameter, _ in flat_parameters(optimizer.param_groups)]


def flat_parameters(groups: Sequence[Group]) -> Iterator[tuple[torch.Tensor, Group]]:
    return ((parameter, group) for group in groups for parameter in group["params"])


def _option(option: str, value: Any, live: Any, read: LeafSource) -> Any:
    if isinstance(live, torch.Tensor):
        # A tensor learning rate is part of compiled steps: it stays the same tensor.
        copy_in(live, _like(read(value) if is_tensor(value) else value, live))
        return live
    value = materialise(value, read, torch.device("cpu"))
    return tuple(value) if isinstance(value, list) and (option == "betas" or isinstance(live, tuple)) else value


@dataclass(frozen=True)
class _ParameterState:
    """The new state of one parameter: its ``entries``, in place of the ``live`` ones where these fit."""

    entries: _Entries
    live: Mapping[Any, Any]
    slot: Slot
    read: LeafSource

    def fill(self, entry: Any, value: Any) -> None:
        """Fill an entry with the saved value."""
        live = self.live.get(entry)
        if entry in ON_HOST:
            self._fill_step(entry, value, live)
        elif is_tensor(value) and isinstance(live, torch.Tensor) and not overlaps_itself(live):
            overwrite(live, value, self.read)
            self.entries[entry] = live
        elif is_tensor(value):
            self._make(entry, value, self.slot.key.device)
        else:
            made = materialise(value, self.read, self.slot.key.device, self.slot.key)
            self.entries[entry] = self.slot.as_placed(entry, made)

    def _fill_step(self, entry: Any, value: Any, live: Any) -> None:
        if isinstance(live, torch.Tensor):
            self.entries[entry] = live
            if is_tensor(value) and form_of(value) == form_of(live):
                overwrite(live, value, self.read)
            else:
                copy_in(live, _like(self.read(value) if is_tensor(value) else value, live))
        elif not is_tensor(value):
            self.entries[entry] = value
        elif isinstance(live, (int, float)):
            self.entries[entry] = type(live)(self.read(value).item())
        else:
            # torch: the count is on the device only for optimizers whose step runs there as a whole.
            on_device = self.slot.group.get("capturable") or self.slot.group.get("fused")
            self._make(entry, value, self.slot.key.device if on_device else torch.device("cpu"))

    def _make(self, entry: Any, leaf: Any, device: torch.device) -> None:
        slot = self.slot
        key = _layout_of(self.slot, entry)
        if device.type == "cpu":
            self.entries[entry] = slot.as_placed(entry, _new(leaf, self.read, key))
        else:

            def take(value: torch.Tensor) -> None:
                self.entries[entry] = slot.as_placed(entry, place(_strided(value, leaf, key), device))

            self.read.then(leaf, take)


def _layout_of(slot: Slot, entry: Any) -> torch.Tensor | None:
    """Return the tensor whose memory layout a new entry takes; None for a contiguous one.

    SGD and Rprop make some entries like the first gradient, which is contiguous for a parameter with gaps in its
    memory; all others take the parameter's order.
    """
    of_gradient = _LIKE_GRADIENTS.get(entry) in slot.group
    return None if of_gradient and not is_dense(slot.key) else slot.key


_LIKE_GRADIENTS = {"momentum_buffer": "dampening", "step_size": "etas"}
"""Entries that are like the gradient, each with an option that only their class has."""


def _new(leaf: Any, read: LeafSource, key: torch.Tensor | None) -> torch.Tensor:
    """Return the leaf as a new CPU tensor with its strides, filled by the end of the load."""
    dtype, shape = form_of(leaf)
    memory = allocated(shape, dtype, _stride(leaf, key))
    if memory.is_contiguous():
        read.into(leaf, memory)
    else:
        read.then(leaf, partial(fill, memory))
    return memory


def _strided(value: torch.Tensor, leaf: Any, key: torch.Tensor | None) -> torch.Tensor:
    """Return the leaf's CPU tensor ``value`` with the strides that `_new` gives it."""
    return strided(value, Stride(_stride(leaf, key)))


def _stride(leaf: Any, key: torch.Tensor | None) -> tuple[int, ...]:
    """Return the saved tensor's strides, or those of the live ``key``.

    The latter if ``key`` has its shape, and no other strides were noted.
    """
    shape = form_of(leaf)[1]
    stride = stored_stride(leaf)
    is_shaped_like = key is not None and tuple(local_of(key).shape) == shape
    if stride is None or (is_shaped_like and (stride.as_parameter or stride_of(leaf) is None)):
        return stride_like(key, shape)
    return fitted(stride.steps, shape)


def state_by_slots(tree: dict[str, Any], slot_at: Callable[[Path], Slot | None], cache_key: Any) -> LiveState:
    """Return the state of an optimizer's state dict; ``slot_at`` returns the parameter of a path, if it has one."""
    return LiveState(
        tree,
        lambda path, tensor: describe_path(path, tensor, slot_at(path)),
        cache_key,
        lambda path, tensor: _stride_to_note(path, tensor, slot_at(path)),
    )


def _stride_to_note(path: Path, tensor: torch.Tensor, slot: Slot | None) -> Stride | None:
    if slot is None:
        return own_stride(tensor, None)
    # Master weights are written into the live ones. Nearly all others are row-major, in each save: this is quick.
    if len(path) == 2 or (slot.is_row_major and is_row_major(tensor)):
        return None
    return own_stride(tensor, _layout_of(slot, path[2]) if len(path) == 3 else slot.key)


def _replace(state: dict[Any, Any], key: Any, entries: _Entries) -> None:
    if entries:
        state[key] = entries
    else:
        state.pop(key, None)


def _like(value: Any, live: torch.Tensor) -> torch.Tensor:
    """Return a number or CPU tensor as a CPU tensor of the form of ``live``."""
    return torch.as_tensor(value, dtype=live.dtype).reshape(live.shape)
