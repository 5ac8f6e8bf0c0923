"""Models: names, tensors and specifications in a module or a state dict."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.mesh import Placed
from nxd_ckpt.core.parameter_names import EXTRA_STATE, canonical, is_extra_state, without_wrappers
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import SIZE_ADVICE, ShapeProblems
from nxd_ckpt.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, UnsupportedState
from nxd_ckpt.formats.state import ModelState, StateTensor
from nxd_ckpt.formats.strides import Stride
from nxd_ckpt.formats.tensors import Path, TensorStub, dtype_name, form_of, is_tensor, itemsize, iter_tensors
from nxd_ckpt.live.dtensor import PLAIN, is_dtensor, like, local_of, placed_of, tell_autograd
from nxd_ckpt.live.frozen import Frozen
from nxd_ckpt.live.load_hooks import ModuleHooks, has_module_of, loads_as_a_whole, own_root, set_extra_state
from nxd_ckpt.live.model_names import gathered_names, name_in_stage, names_in_stage, replicated, without_replication
from nxd_ckpt.live.parallel_layers import layer_partitions
from nxd_ckpt.live.parameters import (
    broadcast_ranks,
    find_ties,
    has_address,
    materialize,
    memory_for,
    memory_of,
    overlapping,
    overlaps_itself,
    own_stride,
    plain_address,
    refuse_unsupported,
    spec_of,
    traits_of,
)
from nxd_ckpt.live.torch_xla import copy_in
from nxd_ckpt.surroundings import as_called

_WITHOUT_SHAPE = (UninitializedParameter, UninitializedBuffer)
"""Parameters and buffers of a lazy module before its first batch, or its load."""


class ModelAdapter:
    """A model as live values by name: tensors (parameters with NxD's attributes), and other values as extra state."""

    path = "model/"
    """Beginning of its tensors' names in errors."""
    is_of_rank = False
    """True if each rank has tensors of its own, which are no copies: flat shards of torch-xla's FSDP."""

    def __init__(self, live: dict[str, Any], may_be_meta: bool = False) -> None:
        self.live: dict[str, Any] = live
        self._may_be_meta = may_be_meta

    def capture(self, tp: int) -> ModelState:
        """Return the model's state on this rank, for ``tp`` tensor-parallel ranks. Nothing is copied.

        Raises UnsupportedState, naming the tensor, for SPMD, meta, sparse and ``Partial`` tensors.
        """
        for name, value in self.live.items():
            if isinstance(value, _WITHOUT_SHAPE):
                raise UnsupportedState(
                    f"model/{name} has no shape yet, as it is a lazy module's: run a first batch through the model"
                )
        ties = self._ties
        kept = self.kept()
        frozen = Frozen({name: self.live[live] for name, live in kept.items()} | self.notes(), _stride_to_note)
        broadcast = self.broadcast_ranks()

        def describe() -> dict[Path, StateTensor]:
            described = {}
            for path, leaf in iter_tensors(frozen.tree, torch.Tensor):
                spec = state.parameters.get(name := "/".join(map(str, path)))
                expert = spec is not None and spec.partition.expert
                live = kept.get(name, name)
                ranks = broadcast.get(live, ())
                about = StateTensor(f"model/{name}", spec, tie=ties.get(live), expert=expert, broadcast_ranks=ranks)
                described[path] = frozen.placed(about, leaf)
            return described

        def specify() -> dict[str, ParameterSpec]:
            specs = self.parameters(tp)
            return {name: specs[live] for name, live in kept.items() if live in specs}

        traits = [traits_of(tensor) for tensor in self._tensors.values()]
        cache_key = tp, traits, self.layer_cuts(tp), ties, broadcast, frozen.cache_key()
        state = ModelState(frozen.tree, describe, cache_key, frozen.is_placed, specify=specify)
        return state

    def broadcast_ranks(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks that get the first one's value before the next use, by the buffer's name."""
        return {}

    def kept(self) -> dict[str, str]:
        """Map the names that a save keeps to the live names."""
        return {name: name for name in self.live}

    def notes(self) -> dict[str, Any]:
        """Return further values that a save keeps and a load ignores."""
        return {}

    def partitions(self, tp: int) -> dict[str, Partition]:
        """Return the known and unknown cuts of parameters, by name, whose attributes are lost, missing or wrong."""
        return {name: cut for name, cut in self.layer_cuts(tp).items() if cut is not None}

    def base_names(self) -> dict[str, str]:
        """Map live names to their names in a tag of the model before it was wrapped, where they differ."""
        return {}

    def former_names(self) -> dict[str, str]:
        """Map live names to those in tags of earlier versions, where they differ."""
        return {}

    def parameters(self, tp: int) -> dict[str, ParameterSpec]:
        """Return the specifications of this rank's parameters and buffers, by name. Raises as `capture` does."""
        ties = self._ties
        specs: dict[str, ParameterSpec] = {}
        for name, tensor in self._tensors.items():
            if not is_extra_state(name):
                spec = spec_of(own := self.attributed(name), tp)
                specs[name] = spec if own is tensor else replace(spec, dtype=dtype_name(tensor.dtype))
        for name, cut in self.layer_cuts(tp).items():
            if name in specs:
                changes = {"explicit": False} if cut is None else {"partition": cut, "explicit": cut.known}
                specs[name] = replace(specs[name], **changes)
        return specs | {name: replace(specs[name], tie=tie) for name, tie in ties.items() if name in specs}

    def attributed(self, name: str) -> torch.Tensor:
        """Return the live tensor that has NxD's attributes for ``name``."""
        return self._tensors[name]

    def layer_cuts(self, tp: int) -> dict[str, Partition | None]:
        """Return the cuts that layers tell, by name of the parameter; see `layer_partitions`."""
        return {}

    def parameter_names(self) -> dict[int, str]:
        """Return names by the id of the live parameter; of tied names, the first."""
        names: dict[int, str] = {}
        for name, value in self.live.items():
            names.setdefault(id(value), name)
        return names

    def names(self) -> list[str]:
        """Return all names, in order."""
        return list(self.live)

    def aliases(self, name: str) -> list[str]:
        """Return all names of the parameter called ``name`` (several for tied weights), in order."""
        return self.tied.get(name, [name])

    def missing(self, saved: Collection[str]) -> list[str]:
        """Return the live names that are absent from the names ``saved``, and no name tied to them is there."""
        ties = self._ties
        present = {ties.get(name, name) for name in saved}
        absent = (name for name in self.expected(saved) if ties.get(name, name) not in present)
        return [name for name in absent if not self.takes_any(name)]

    def takes(self, name: str) -> bool:
        """Return whether a load can use the saved name."""
        return name in self.live or self.takes_any(name)

    def validate(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of ``saved`` (mapped to tensors, or to stand-ins) that are to be assigned. Changes nothing.

        Raises:
            ShapeMismatch, DtypeMismatch: for a name that both have.
            UnsupportedState: for a tensor that cannot be written to.
        """
        names = [name for name in saved if name in self.live or self.takes_any(name)]
        problems = ShapeProblems()
        for name in names:
            if self.takes_any(name):
                continue
            self.check_writable(name)
            if not is_extra_state(name):
                try:
                    _check_form(name, saved[name], self.live[name])
                except ShapeMismatch as error:
                    problems.keep(name, error)
        problems.complain()
        return names

    def owns(self, name: str) -> bool:
        """Return whether the name's module loads it by itself; see `ModuleHooks`."""
        return False

    def passes_user_code(self, name: str) -> bool:
        """Return whether user code that a load calls may put another value there than was saved."""
        return False

    def takes_any(self, name: str) -> bool:
        """Return whether only that module knows which values the name may have, and whether it must exist."""
        return False

    def require_loadable(self, names: Iterable[str]) -> None:
        """Raise UnsupportedState for a saved name that a load could not restore."""

    def load_own(self, values: dict[str, Any], strict: bool) -> None:
        """Pass modules the values (CPU tensors, or others) that they load by themselves, see `owns`.

        Raises KeyMismatch or ShapeMismatch if one of them refuses.
        """

    def after_load(self, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
        """Call the hooks that torch calls after a load, when everything is loaded.

        ``missing`` are live names that the checkpoint lacked, ``unexpected`` names in it that no rank's model has.
        """

    def expected(self, saved: Collection[str]) -> Iterable[str]:
        """Return the live names that ``saved`` must have to be the whole model."""
        return self.live

    def assign(self, name: str, value: Any) -> None:
        """Overwrite the live value of ``name`` with a CPU tensor (or other value) that `validate` accepted.

        Tensors are written in place, and ``value`` may be reused afterwards. No device computation, nothing compiled.
        """
        copy_in(self.live[name], value)

    def ids(self, names: Iterable[str]) -> set[int]:
        """Return the ids of the live tensors with these names."""
        return {id(self.live[name]) for name in names if name in self.live}

    def on_meta(self) -> dict[int, str]:
        """Return tensors on the meta device, as name by id; also those in no state dict, such as computed buffers."""
        return {id(tensor): name for name, tensor in self._tensors.items() if tensor.is_meta}

    def materialize(self, names: Iterable[str]) -> None:
        """Give those of ``names`` that are on the meta device uninitialised memory on the CPU."""
        for name in names if self._may_be_meta else ():
            if name in self._tensors and self._tensors[name].is_meta:  # of tied names, at the first
                materialize(self._tensors[name])

    def destinations(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the memory of tensors that saved bytes can be read straight into, to be overwritten: `memory_for`."""
        own = {name: memory_for(self.live[name]) for name in names if name in self.live and not is_extra_state(name)}
        memory = {name: memory for name, memory in own.items() if memory is not None}
        tell_autograd(*map(self.live.__getitem__, memory))
        return memory

    def may_hold(self, parameter: torch.Tensor) -> bool:
        """Return whether assigning to one of the names may assign to that live parameter."""
        return True

    def apart(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """Return the ids of those that are known not to be the model's."""
        return {id(parameter) for parameter in parameters} - self.parameter_names().keys()

    @property
    def is_placed(self) -> bool:
        """True if there are DTensors among the tensors."""
        return any(map(is_dtensor, self._tensors.values()))

    def placed(self, names: Iterable[str]) -> dict[Path, Placed]:
        """Return the mesh positions of the DTensors among ``names``, by path. Raises as `capture` does."""
        live = {name: self._tensors[name] for name in names if is_dtensor(self._tensors.get(name))}
        return {(name,): placed_of(f"model/{name}", tensor) for name, tensor in live.items()}

    def has_values(self, name: str, dim: int, start: int) -> bool:
        """Return whether the live tensor has non-zeros from ``start`` on along ``dim``; False on meta."""
        live = self._tensors[name].detach()
        if live.is_meta or start >= live.shape[dim]:
            return False
        on_host = live.cpu()  # as a whole: a slice on the device would be compiled
        return bool((on_host.narrow(dim, start, on_host.shape[dim] - start) != 0).any())

    def is_on_host(self, name: str) -> bool:
        """Return whether the name is a live tensor on the CPU."""
        live = self.live.get(name)
        return isinstance(live, torch.Tensor) and live.is_cpu

    def is_as(self, before: ModelAdapter) -> bool:
        """Return whether the tensors are those that the model had ``before``, in the same memory.

        Then their ties and specifications are the same, too.
        """
        own = self._tensors
        old = before._tensors
        is_same = own.keys() == old.keys() and all(old[name] is tensor for name, tensor in own.items())
        return is_same and self._begins == before._begins

    @cached_property
    def _begins(self) -> dict[str, int]:
        return {name: plain_address(tensor) for name, tensor in self._tensors.items()}

    @cached_property
    def _ties(self) -> dict[str, str]:
        for name, tensor in self._tensors.items():
            if not (tensor.is_meta and self._may_be_meta) or is_dtensor(tensor):
                refuse_unsupported(f"model/{name}", tensor)
        return find_ties(self._tensors, self._begins)

    @cached_property
    def tied(self) -> dict[str, list[str]]:
        """All names of each tensor that has several, by each of them."""
        names: dict[str, list[str]] = {}
        for name, tie in self._ties.items():
            names.setdefault(tie, []).append(name)
        return {name: names[tie] for name, tie in self._ties.items()}

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        own = {name: value for name, value in self.live.items() if isinstance(value, torch.Tensor)}
        return {name: one for name, one in own.items() if type(one) in PLAIN or not isinstance(one, _WITHOUT_SHAPE)}

    def check_writable(self, name: str) -> None:
        """Raise UnsupportedState if a value assigned to ``name`` would be lost."""

    def expanded(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return those of the live tensors, by name, of which several elements share memory."""
        own = self._tensors
        return {name: own[name] for name in names if name in own and not self.owns(name) and overlaps_itself(own[name])}


class ModuleModel(ModelAdapter):
    """A module as a model.

    Values go straight into parameters and buffers, not through ``load_state_dict``; but user code that it would call is
    called.

    Pipeline models are recognised by ``local_state_dict``, which has this stage under the whole model's names.
    """

    def __init__(self, model: Any, may_be_meta: bool = False) -> None:
        self._broadcast = broadcast_ranks(model)
        model = own_root(model)
        local = getattr(model, "local_state_dict", None)
        self._is_stage = callable(local)
        if self._is_stage and not getattr(model, "partitioned", True):
            raise InvalidArgument(
                f"{type(model).__name__} is not partitioned yet, so the content of this stage is unknown: before "
                "saving or loading call its partition(), or run a first step, in which it partitions itself"
            )
        # keep_vars gives the parameters themselves: identity (ties, the optimizer's names) and NxD's attributes.
        super().__init__({}, may_be_meta)
        self._model = self._root = model
        live = local(keep_vars=True) if local is not None and self._is_stage else self._state_with_identity(model)
        self._gathered: dict[str, str] = {}
        self._cuts: dict[int, dict[str, Partition | None]] = {}
        if self._is_stage:
            self._root = torch.nn.ModuleList(model.local_modules())
            own = self._state_with_identity(self._root)
            self._modules = [*self._root]
            self._wrapped_names = names_in_stage(live, own)
        else:
            self._modules = [model]
            prefixes = replicated(model)
            self._gathered = gathered_names(model)
            shorter = {without_replication(self._gathered.get(name, name), prefixes): name for name in live}
            self._wrapped_names = {name: shorter[key] for name, key in canonical(shorter, "model").items()}
            live = {name: live[wrapped] for name, wrapped in self._wrapped_names.items()}
        self.live: dict[str, Any] = dict(live)
        self.is_of_rank: bool = has_module_of(self._root, "torch_xla.distributed.fsdp.", "XlaFullyShardedDataParallel")
        self._hooks = ModuleHooks(self._root)
        if self._is_stage and self._hooks and len(self._wrapped_names) < len(live):
            raise UnsupportedState(
                f"model: modules of this stage have hooks, or methods of their own, that a load calls, but which of "
                f"{type(model).__name__}'s names are theirs is not known: local_state_dict(keep_vars=True) must give "
                "the parameters and buffers of local_modules()"
            )

    def _state_with_identity(self, root: Any) -> dict[str, Any]:
        """Return the state dict of ``root``, with parameters and buffers themselves in place of detached ones."""
        try:
            state = root.state_dict(keep_vars=True)
        except TypeError:  # a wrapper's own may not know it, or not pass it on
            state = root.state_dict()
        own = self._own_by_name if root is self._model else _own(root)
        return {name: own[name] if _is_detached(value, own.get(name)) else value for name, value in state.items()}

    @cached_property
    def _own_ids(self) -> set[int]:
        if self._modules == [self._model] and isinstance(self._model, torch.nn.Module):
            return set(map(id, self._own_by_name.values()))
        return {id(tensor) for module in self._modules for tensor in (*module.parameters(), *module.buffers())}

    def broadcast_ranks(self) -> dict[str, tuple[int, ...]]:
        return {name: ranks for name, tensor in self._tensors.items() if (ranks := self._broadcast.get(id(tensor)))}

    def parameter_names(self) -> dict[int, str]:
        """Return names by the id of the live parameter, also of parameters that ``state_dict()`` leaves out."""
        names = super().parameter_names()
        for name, own in ({} if self._is_stage else self._own_by_name).items():
            names.setdefault(id(own), name)
        return names

    def former_names(self) -> dict[str, str]:
        return {name: without_wrappers(at) for name, at in self._wrapped_names.items() if at in self._gathered}

    def on_meta(self) -> dict[int, str]:
        names = super().on_meta()
        for module in self._modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_meta:
                    names.setdefault(id(tensor), name)
        return names

    def require_loadable(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.live or self.owns(name):
                continue
            remedy = f"pass ignore_keys=['{self.path}{name}'], or the model's state_dict() as model="
            if is_extra_state(name):
                owner = self._owner(name)
                if type(owner).set_extra_state is torch.nn.Module.set_extra_state:
                    raise UnsupportedState(
                        f"{self.path}{name}: {type(owner).__name__} has get_extra_state() and no set_extra_state(), so "
                        f"no load could give it back; write one, or {remedy}"
                    )
            elif isinstance(self._model, torch.nn.Module) and id(self.live[name]) not in self._own_ids:
                raise UnsupportedState(
                    f"{self.path}{name} is computed by state_dict(), and is no parameter or buffer, so no load could "
                    f"give it back; give {type(self._model).__name__} a load_state_dict() of its own that takes it, or "
                    f"{remedy}"
                )

    @cached_property
    def _is_loaded_whole(self) -> bool:
        """True if a load calls the model's ``load_state_dict`` with everything.

        That is so if its class has one of its own, or a ``state_dict()`` with other tensors in place of parameters and
        buffers.
        """
        if self._is_stage or not isinstance(self._model, torch.nn.Module):
            return False
        return loads_as_a_whole(self._model) or any(self._twin(name) is not None for name in self._tensors)

    def _twin(self, name: str) -> torch.Tensor | None:
        """Return the parameter or buffer that ``state_dict()`` replaces with a computed tensor; else None."""
        value = self.live[name]
        if id(value) in self._own_ids or self._is_stage or not isinstance(self._model, torch.nn.Module):
            return None
        twin = self._own_by_name.get(self._wrapped_names.get(name, name))
        return twin if twin is not None and twin.shape == value.shape else None

    @cached_property
    def _own_by_name(self) -> dict[str, torch.Tensor]:
        return _own(self._model)

    def attributed(self, name: str) -> torch.Tensor:
        twin = self._twin(name)
        return super().attributed(name) if twin is None else twin

    def owns(self, name: str) -> bool:
        return self._is_loaded_whole or self.takes_any(name)

    def passes_user_code(self, name: str) -> bool:
        return self.owns(name) or is_extra_state(name) or self._hooks.may_change(self._inner_name(name))

    def takes_any(self, name: str) -> bool:
        return bool(self._hooks) and self._hooks.owns(self._inner_name(name))

    def _inner_name(self, name: str) -> str:
        """Return the name inside the modules; of an old name, which is not live, by its module's names."""
        if self._is_stage and name not in self._wrapped_names:
            return name_in_stage(name, self._wrapped_names)
        return self._wrapped_names.get(name, name)

    def load_own(self, values: dict[str, Any], strict: bool) -> None:
        live = self.live
        state = {
            self._inner_name(name): like(value, live[name]) if is_dtensor(live.get(name)) else value
            for name, value in values.items()
        }
        if not self._is_loaded_whole:
            self._hooks.load(state, strict)
            return
        with as_called():  # the model's own method may have no parameter "strict"; names were compared before
            self._model.load_state_dict(state, **({} if live.keys() <= values.keys() else {"strict": False}))

    def after_load(self, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
        if not self._is_loaded_whole:  # else it has called them
            self._hooks.after_load(list(missing), list(unexpected))

    def assign(self, name: str, value: Any) -> None:
        if is_extra_state(name):
            set_extra_state(self._owner(name), value, f"{self.path}{name}")
        else:
            super().assign(name, value)

    def _owner(self, name: str) -> torch.nn.Module:
        name = self._inner_name(name)
        owner: torch.nn.Module = self._root.get_submodule(name.removesuffix(EXTRA_STATE).removesuffix("."))
        # torch-xla's FSDP gives the module whose parameters it flattens the name of what flattens them.
        return owner._modules.get("_fpw_module") or owner

    def check_writable(self, name: str) -> None:
        if is_extra_state(name):
            try:
                self._owner(name)
            except AttributeError as error:
                raise UnsupportedState(
                    f"{self.path}{name}: {error}; extra state needs its module by that name"
                ) from error
            return
        super().check_writable(name)
        if id(self.live[name]) not in self._own_ids and not self.owns(name):
            raise UnsupportedState(
                f"{self.path}{name} is computed by state_dict(), not a parameter or buffer that could be written to; "
                "load into a dict (model={}) and pass that to the model's load_state_dict()"
            )

    def layer_cuts(self, tp: int) -> dict[str, Partition | None]:
        if tp not in self._cuts:
            cuts = {id(tensor): cut for tensor, cut in layer_partitions(self._model, tp)}
            live = self.live.items() if cuts else ()
            self._cuts[tp] = {name: cuts[id(value)] for name, value in live if id(value) in cuts}
        return self._cuts[tp]


class DictModel(ModelAdapter):
    """A state dict as a model. An empty one is filled with CPU tensors; in another, tensors are overwritten in place.
    """

    def may_hold(self, parameter: torch.Tensor) -> bool:
        if has_address(local_of(parameter)):
            return memory_of(parameter) in self._memory
        # It is not known whether tensors on XLA in a state dict are the parameters themselves.
        return any((own.device, own.shape) == (parameter.device, parameter.shape) for own in self._tensors.values())

    def apart(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        return {id(parameter) for parameter in parameters if self.live and not self.may_hold(parameter)}

    @cached_property
    def _memory(self) -> set[Hashable]:
        return {memory_of(tensor) for tensor in self._tensors.values()}

    def validate(self, saved: Mapping[str, Any]) -> list[str]:
        names = super().validate(saved) if self.live else list(saved)
        _refuse_overlaps({name: self._tensors[name] for name in names if name in self._tensors})
        return names

    def assign(self, name: str, value: Any) -> None:
        """Overwrite the live tensor of ``name`` in place; without one, store ``value`` itself in the dict."""
        if isinstance(self.live.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
            copy_in(self.live[name], value)
        else:
            self.live[name] = value


def _own(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; tied ones by all of their names, if the model tells them."""
    if not hasattr(model, "named_parameters"):
        return {}
    try:
        parameters = dict(model.named_parameters(remove_duplicate=False))
    except TypeError:  # a wrapper's own
        parameters = dict(model.named_parameters())
    return {**parameters, **dict(model.named_buffers())}


def _is_detached(value: Any, own: torch.Tensor | None) -> bool:
    """Return whether ``value`` is the tensor ``own``, but another object. On XLA its name must be enough."""
    if own is None or not isinstance(value, torch.Tensor) or value is own or form_of(value) != form_of(own):
        return False
    if has_address(local_of(own)):
        return memory_of(value) == memory_of(own)
    return value.device == own.device


def _stride_to_note(path: Path, tensor: torch.Tensor) -> Stride | None:
    """Return the strides of a tensor of extra state, which no live tensor will tell."""
    return own_stride(tensor, None) if len(path) > 1 or is_extra_state(str(path[0])) else None


def _refuse_overlaps(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedState for two tensors that share only some of their memory. Tied ones are one tensor."""
    local = {name: local_of(tensor) for name, tensor in tensors.items()}
    pair = overlapping({name: tensor for name, tensor in local.items() if has_address(tensor)})
    if pair is not None:
        raise UnsupportedState(
            f"model/{pair[0]} and model/{pair[1]} share some of their memory, and are not one tensor: a load into one "
            "would change the other; load into clones"
        )


def _check_form(name: str, saved: Any, live: Any) -> None:
    if not isinstance(live, torch.Tensor):
        return
    if isinstance(saved, TensorStub) and saved.dtype == dtype_name(live.dtype) and saved.shape == live.shape:
        return  # as nearly all are
    if not is_tensor(saved):
        raise DtypeMismatch(f"model/{name}: saved as {type(saved).__name__}, the live one is {live.dtype}")
    (saved_dtype, saved_shape), (dtype, shape) = form_of(saved), form_of(live)
    if saved_shape != shape:
        raise ShapeMismatch(f"model/{name}: saved with shape {saved_shape}, the live one has {shape}; {SIZE_ADVICE}")
    if saved_dtype != dtype:
        is_wider = itemsize(saved_dtype) > itemsize(dtype)
        masters = f", or pass an optimizer that keeps {saved_dtype} master weights of it" if is_wider else ""
        raise DtypeMismatch(
            f"model/{name}: saved as {saved_dtype}, the live one is {dtype}; cast the model before loading "
            f"(model.to(torch.{saved_dtype})){masters}: values are never cast silently"
        )
