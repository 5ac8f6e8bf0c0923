"""Choice of the adapter for a live optimizer, the adapter of several, and a check that saved state is of its class.

torch loads another class's state, and fails or drifts later. Each class's entries are those of torch.optim 2.5 to 2.14.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from nxd_ckpt.core.mesh import Placed
from nxd_ckpt.core.suggestions import first_of, listed
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import InvalidArgument, OptimizerMismatch, UnsupportedState
from nxd_ckpt.formats.optimizer_trees import KEYS, OPTIMIZER_NAME, VALUE
from nxd_ckpt.formats.state import OptimizerForm, StateTensor
from nxd_ckpt.formats.strides import Stride
from nxd_ckpt.formats.tensors import Path
from nxd_ckpt.live.dtensor import is_dtensor
from nxd_ckpt.live.frozen import LiveState
from nxd_ckpt.live.load_hooks import loads_itself
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.named import by_name, is_model
from nxd_ckpt.live.optimizer_dict import DictOptimizer
from nxd_ckpt.live.optimizer_state import Keeps, LeafSource, OptimizerAdapter, Slot, flat_parameters, keeps_nothing
from nxd_ckpt.live.own_form import OwnFormOptimizer, own_form_of
from nxd_ckpt.live.plain import PlainOptimizer, TorchZeroOptimizer, is_torch_zero, with_left_out
from nxd_ckpt.live.state_names import if_known, parameter_names
from nxd_ckpt.live.zero1 import ExpertZero1Optimizer, Zero1Optimizer

_EXPECTED = "must be a torch optimizer, an NxD optimizer or a state dict"


def open_optimizer(
    optimizer: Any,
    *,
    model: ModelAdapter | None = None,
    param_names: Sequence[Sequence[str]] | None = None,
    zero1_optimizer: bool = False,
    topology: Topology | None = None,
) -> OptimizerAdapter:
    """Return the adapter of ``optimizer``, recognised by its attributes; NxD's and accelerate's wrappers are removed.

    Names come from ``param_names`` (per param group), else from the identity of ``model``'s parameters, else from names
    that torch keeps in the groups. ``zero1_optimizer``: a dict, or an optimizer of another kind, has state of this rank
    alone. An optimizer of DTensors needs no such flag.

    Raises InvalidArgument for an object that is no optimizer, UnsupportedState for shards that do not follow the
    ``topology``.
    """
    topology = topology or Topology()
    several = by_name(optimizer, "optimizer")
    if several is not None:
        return _open_several(several, model, param_names, zero1_optimizer, topology)
    if isinstance(optimizer, dict):
        return DictOptimizer(optimizer, param_names, model, zero1_optimizer, topology)
    optimizer = _unwrapped(optimizer)
    if hasattr(optimizer, "ep_zero_optimizer"):
        inner = optimizer.non_ep_zero_optimizer, optimizer.ep_zero_optimizer
        names = parameter_names([*inner[0].param_groups, *inner[1].param_groups], model, param_names)
        return ExpertZero1Optimizer(optimizer, names, topology)
    if is_torch_zero(optimizer):
        return TorchZeroOptimizer(optimizer, model, param_names, topology)
    groups = getattr(optimizer, "param_groups", [])
    names = _names_in(groups, model, param_names)
    adapter = _adapter(optimizer, names, model, zero1_optimizer, topology)
    if type(adapter) is PlainOptimizer and model is not None and model.is_placed and not loads_itself(optimizer):
        params = with_left_out(groups, model)
        named = dict(zip((id(one) for one, _ in flat_parameters(groups)), names, strict=True))
        whole = [{"params": own, "param_names": [named.get(id(one)) for one in own]} for own in params]
        names = _names_in(whole, model, None)
        if len(names) > len(adapter.parameter_names or names):
            return PlainOptimizer(optimizer, names, topology.tp, model=model, params=params)
    return adapter


def _adapter(
    optimizer: Any, names: list[str], model: ModelAdapter | None, zero1_optimizer: bool, topology: Topology
) -> OptimizerAdapter:
    """Return the adapter of one optimizer whose parameters have these names."""
    if hasattr(optimizer, "sharding_groups"):
        return Zero1Optimizer(optimizer, names, topology)
    own_form = own_form_of(optimizer)
    if own_form is not None:
        return OwnFormOptimizer(optimizer, own_form, names)
    if not hasattr(optimizer, "param_groups"):
        raise InvalidArgument(f"optimizer= {_EXPECTED}, found a {type(optimizer).__name__}, which has no param_groups")
    parameters = [parameter for parameter, _ in flat_parameters(optimizer.param_groups)]
    if not zero1_optimizer and any(map(_is_piece, parameters)):
        raise UnsupportedState(
            "optimizer: its parameters are FSDP1's (FullyShardedDataParallel with use_orig_params=True), of which each "
            "rank has other pieces: use fully_shard (FSDP2), whose optimizer is saved as it is, or pass what "
            "FullyShardedDataParallel.optim_state_dict() returns on all ranks as user_content="
        )
    on_meshes = any(map(is_dtensor, parameters))
    return PlainOptimizer(optimizer, names, topology.tp, model=model, sharded=zero1_optimizer and not on_meshes)


def _is_piece(parameter: torch.Tensor) -> bool:
    """Return whether FSDP1 put a rank's piece of the parameter into a flat one, and left it in its place."""
    return hasattr(parameter, "_fsdp_flattened") and not hasattr(parameter, "_is_flat_param")


def _open_several(
    optimizers: Mapping[str, Any],
    model: ModelAdapter | None,
    param_names: Sequence[Sequence[str]] | None,
    zero1_optimizer: bool,
    topology: Topology,
) -> NamedOptimizers:
    """Return the adapter of several. Raises InvalidArgument if two of them hold one parameter."""
    ordered = {name: _unwrapped(optimizers[name], f"optimizer[{name!r}]") for name in sorted(optimizers)}
    for name, optimizer in ordered.items():
        if hasattr(optimizer, "ep_zero_optimizer") or is_torch_zero(optimizer):
            raise UnsupportedState(
                f"optimizer[{name!r}] is a {type(optimizer).__name__}, which is saved and loaded alone: use a "
                "directory of its own for it"
            )
    groups = [group for optimizer in ordered.values() for group in optimizer.param_groups]
    names = _names_in(groups, model, param_names)
    adapters: dict[str, OptimizerAdapter] = {}
    owners: dict[int, str] = {}
    rest = iter(names)
    for name, optimizer in ordered.items():
        parameters = [parameter for parameter, _ in flat_parameters(optimizer.param_groups)]
        own = list(islice(rest, len(parameters)))
        for parameter, its_name in zip(parameters, own, strict=True):
            if owners.setdefault(id(parameter), name) != name:
                raise InvalidArgument(
                    f"optimizer[{owners[id(parameter)]!r}] and optimizer[{name!r}] both hold the parameter "
                    f"{its_name!r}, whose state in a tag is by its name: give it to one of them, or save one of the "
                    "two under a directory of its own"
                )
        adapters[name] = _adapter(optimizer, own, model, zero1_optimizer, topology)
    return NamedOptimizers(adapters, names)


def _names_in(
    groups: Sequence[dict[str, Any]], model: ModelAdapter | None, param_names: Sequence[Sequence[str]] | None
) -> list[str]:
    """Return the parameters' names. Raises OptimizerMismatch if some are not those of a model of DTensors."""
    names = parameter_names(groups, model, param_names)
    named = zip(names, flat_parameters(groups), strict=True)
    unnamed = [name for name, (parameter, _) in named if name.startswith("#") and not is_dtensor(parameter)]
    if unnamed and model is not None and model.is_placed:
        raise OptimizerMismatch(
            f"optimizer: its parameter {unnamed[0]} is not one of the model's ({len(unnamed)} are not): fully_shard "
            "and parallelize_module replace parameters, so make the optimizer after them, and clones in full precision "
            "of the DTensors, not of their local parts: parameter.detach().float().clone()"
        )
    return names


def _unwrapped(optimizer: Any, called: str = "optimizer=") -> Any:
    inner = optimizer
    # NxD's and accelerate's wrappers have no state of their own; others (Lookahead) do, and are saved themselves.
    while hasattr(inner, "optimizer") and any(hasattr(inner, name) for name in ("nxd_config", "accelerator_state")):
        inner = inner.optimizer
    if isinstance(inner, type) or not callable(getattr(inner, "state_dict", None)) or is_model(inner):
        kind = f"the class {inner.__name__} itself" if isinstance(inner, type) else f"a {type(optimizer).__name__}"
        several = isinstance(optimizer, (list, tuple)) and bool(optimizer)
        advice = "; pass several by name, optimizer={name: optimizer}" if several else ""
        raise InvalidArgument(f"{called} {_EXPECTED}, found {kind}{advice}")
    return inner


_OF_WHOLE = "optim/state/"
"""Beginning of the global names of state that belongs to no parameter."""

_SECTIONS = ("state", *KEYS)


class _Part(NamedTuple):
    """One optimizer's part of a joint state dict: its own state dict, and the joint indices of its parameters."""

    tree: dict[str, Any]
    indices: list[Any]


class NamedOptimizers(OptimizerAdapter):
    """The OptimizerAdapter of several by name: one with the param groups of all, each with its optimizer's name.

    Indices of parameters count through; state and keys of an optimizer as a whole have its name in front.
    """

    def __init__(self, adapters: Mapping[str, OptimizerAdapter], names: Sequence[str]) -> None:
        """Take the optimizers by name, and the ``names`` of their parameters, in their order.

        Raises UnsupportedState if some are ZeRO-1, and others not.
        """
        self._adapters = adapters
        kinds = {adapter.kind: name for name, adapter in adapters.items()}
        if len(kinds) > 1:
            raise UnsupportedState(
                f"optimizer[{kinds['plain']!r}] is not sharded, optimizer[{kinds['zero1']!r}] is: a tag holds "
                "optimizers of one kind; save one of the two under a directory of its own"
            )
        self.kind: str = next(iter(kinds))
        self.parameter_names: list[str] | None = if_known(names)

    def form(self) -> OptimizerForm:
        forms = {name: form for name, adapter in self._adapters.items() if (form := adapter.form()) is not None}
        return OptimizerForm(
            self.kind,
            tuple(chain.from_iterable(form.slots for form in forms.values())),
            tuple(chain.from_iterable(form.groups for form in forms.values())),
            options=tuple(
                {**options, OPTIMIZER_NAME: name} for name, form in forms.items() for options in form.options
            ),
        )

    def entries(self) -> Iterator[str]:
        for name, adapter in self._adapters.items():
            yield from (_global(name, entry) for entry in adapter.entries())

    def live_state(self) -> LiveState:
        states = {name: adapter.live_state() for name, adapter in self._adapters.items()}
        origins: dict[Path, tuple[LiveState, Path]] = {}
        tree: dict[str, Any] = {"param_groups": []}
        of_rank: set[Path] = set()
        indices = 0
        for name, state in states.items():
            first = indices, len(tree["param_groups"])
            of_rank |= {_joint(name, path, first) for path in state.of_rank}
            origins |= {_joint(name, own, first): (state, own) for own in _tops(state.tree)}
            for group in state.tree["param_groups"]:
                own = {**group, "params": [index + first[0] for index in group["params"]], OPTIMIZER_NAME: name}
                tree["param_groups"].append(own)
                indices += len(group["params"])
            for key, value in state.tree.items():
                if key in _SECTIONS:
                    entries = tree.setdefault(key, {})
                    entries |= {_joint(name, (key, at), first)[1]: entry for at, entry in value.items()}
                elif key != "param_groups":
                    tree |= {_joint(name, (key,), first)[0]: value}

        def own_of(path: Path) -> tuple[LiveState, Path]:
            state, own = origins.get(path[:2]) or origins[path[:1]]
            return state, (*own, *path[len(own) :])

        def describe(path: Path, tensor: torch.Tensor) -> StateTensor:
            state, own = own_of(path)
            about = state.describe(own, tensor)
            return about._replace(name=_name_at(path)) if about.name == _name_at(own) else about  # of no parameter

        def stride(path: Path, tensor: torch.Tensor) -> Stride | None:
            state, own = own_of(path)
            return state.stride(own, tensor)

        cache_key = [(name, state.cache_key) for name, state in states.items()]
        return LiveState(tree, describe, cache_key, stride, frozenset(of_rank))

    def validate(self, saved: Mapping[str, Any]) -> None:
        for name, part in self._parts(saved).items():
            try:
                if self._adapters[name].stepping is not None:
                    check_class(self._adapters[name].stepping, part.tree["param_groups"], {})
                self._adapters[name].validate(part.tree)
            except OptimizerMismatch as error:
                raise OptimizerMismatch(f"optimizer[{name!r}]: {str(error).removeprefix('optimizer: ')}") from error

    def placed(self, saved: Mapping[str, Any], plain: Collection[str] = ()) -> dict[Path, Placed]:
        positions: dict[Path, Placed] = {}
        for name, part in self._parts(saved).items():
            for (section, key, *rest), placed in self._adapters[name].placed(part.tree, plain).items():
                own = f"{name}.{key}" if isinstance(key, str) else part.indices[key]
                path = section, own, *rest
                positions[path] = placed
        return positions

    def load(self, saved: Mapping[str, Any], read: LeafSource, keeps: Keeps = keeps_nothing) -> None:
        for name, part in self._parts(saved).items():
            self._adapters[name].load(part.tree, read, _keeps_of(name, keeps))

    def after_load(self) -> None:
        for adapter in self._adapters.values():
            adapter.after_load()

    def followed(self, saved: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, part in self._parts(saved).items():
            yield from self._adapters[name].followed(part.tree)

    @property
    def passes_user_code(self) -> bool:
        return any(adapter.passes_user_code for adapter in self._adapters.values())

    def shards(self, saved: Mapping[str, Any]) -> Mapping[Any, Slot]:
        return {
            part.indices[index]: slot
            for name, part in self._parts(saved).items()
            for index, slot in self._adapters[name].shards(part.tree).items()
        }

    def follow(self, keeps: Keeps) -> None:
        for name, adapter in self._adapters.items():
            adapter.follow(_keeps_of(name, keeps))

    @cached_property
    def _names_of_groups(self) -> list[str]:
        return [name for name, adapter in self._adapters.items() for _ in adapter.stepping.param_groups]

    def _parts(self, saved: Mapping[str, Any]) -> dict[str, _Part]:
        """Return each optimizer's part of a joint state dict.

        Raises OptimizerMismatch if it is not of optimizers with these names.
        """
        groups: dict[str, list[dict[str, Any]]] = {name: [] for name in self._adapters}
        others: list[str] = []
        for number, group in enumerate(saved["param_groups"]):
            name = _name_of(group, self._names_of_groups[number : number + 1])
            if name is None:
                raise OptimizerMismatch(
                    "optimizer: the checkpoint holds one optimizer, without a name, and not "
                    f"{', '.join(map(repr, groups))}; pass one optimizer"
                )
            if name in groups:
                groups[name].append({key: value for key, value in group.items() if key != OPTIMIZER_NAME})
            else:
                others.append(name)
        absent = [name for name, own in groups.items() if not own]
        if others or absent:
            texts = [f"there is no {listed(absent, others)} in the checkpoint" if absent else ""]
            texts.append(f"{listed(dict.fromkeys(others), absent)} of the checkpoint is not passed" if others else "")
            raise OptimizerMismatch(
                f"optimizer: {'; '.join(filter(None, texts))}; pass the optimizers that were saved, by their names"
            )
        return {name: _part(name, own, _without(saved, name, groups)) for name, own in groups.items()}


def _without(saved: Mapping[str, Any], name: str, names: Iterable[str]) -> Mapping[str, Any]:
    """Return the joint state dict without what is of optimizers whose names begin with that of another and a dot."""
    longer = tuple(f"{each}." for each in names if each.startswith(f"{name}."))
    if not longer:
        return saved

    def kept(section: Any) -> Any:
        return {at: own for at, own in section.items() if not (isinstance(at, str) and at.startswith(longer))}

    return {key: kept(own) if key in _SECTIONS else own for key, own in kept(saved).items()}


def _part(name: str, groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> _Part:
    indices = [index for group in groups for index in group["params"]]
    place = {index: number for number, index in enumerate(indices)}
    prefix = f"{name}."
    tree: dict[str, Any] = {"param_groups": []}
    for group in groups:
        tree["param_groups"].append({**group, "params": [place[index] for index in group["params"]]})
    for key, value in saved.items():
        if key in _SECTIONS:
            own = {place[index]: entries for index, entries in value.items() if index in place}
            whole = {at: entries for at, entries in value.items() if isinstance(at, str) and at.startswith(prefix)}
            tree[key] = own | {at.removeprefix(prefix): entries for at, entries in whole.items()}
        elif key.startswith(prefix):
            tree[key.removeprefix(prefix)] = value
    return _Part(tree, indices)


def _name_of(group: Mapping[str, Any], live: Sequence[str]) -> str | None:
    """Return the name of a saved group's optimizer: that of the ``live`` group, if the options were left out."""
    is_bare = group.keys() <= {"params"}
    name = next(iter(live), None) if is_bare else group.get(OPTIMIZER_NAME)
    return name if isinstance(name, str) else None


def _joint(name: str, path: Path, first: tuple[int, int]) -> Path:
    """Return the joint path of one in an optimizer's state dict; ``first`` are its first parameter and group."""
    section, *rest = path
    if section == "param_groups":
        return (section, rest[0] + first[1], *rest[1:])
    if section in _SECTIONS:
        return (section, f"{name}.{rest[0]}" if isinstance(rest[0], str) else rest[0] + first[0], *rest[1:])
    return (f"{name}.{section}", *rest)


def _tops(tree: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the paths of what has a place of its own in a joint state dict."""
    for key, value in tree.items():
        if key == "param_groups":
            yield from ((key, number) for number in range(len(value)))
        elif key in _SECTIONS:
            yield from ((key, at) for at in value)
        else:
            yield (key,)


def _name_at(path: Path) -> str:
    return "/".join(map(str, ("optim", *path)))


def _global(name: str, entry: str) -> str:
    """Return the global name of an entry of one of them: with its name, if it is of the optimizer as a whole."""
    return f"{_OF_WHOLE}{name}.{entry.removeprefix(_OF_WHOLE)}" if entry.startswith(_OF_WHOLE) else entry


def _keeps_of(name: str, keeps: Keeps) -> Keeps:
    return lambda entry: keeps(_global(name, entry))


_OPTIONS = {
    *("betas", "eps", "amsgrad", "momentum", "dampening", "nesterov", "alpha", "centered", "rho", "lr_decay"),
    *("initial_accumulator_value", "lambd", "t0", "momentum_decay", "etas", "step_sizes", "beta2_decay", "d"),
    *("ns_coefficients", "ns_steps", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn"),
}
"""Options that tell the class of torch.optim of a param group; others come and go with releases and schedulers."""

_ENTRIES = {
    "Adadelta": {"square_avg", "acc_delta"},
    "Adagrad": {"sum"},
    "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"},
    "Adamax": {"exp_avg", "exp_inf"},
    "ASGD": {"eta", "mu", "ax"},
    "NAdam": {"mu_product", "exp_avg", "exp_avg_sq"},
    "RAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg"},
    "Rprop": {"prev", "step_size"},
    "SparseAdam": {"exp_avg", "exp_avg_sq"},
}
"""Entries that classes of torch.optim keep for each parameter after its first step, with any options."""


def check_class(optimizer: Any, groups: Iterable[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
    """Raise OptimizerMismatch for param groups or state of several optimizers, or of one of another class."""
    kind = type(optimizer)
    groups = list(groups)
    several = {group[OPTIMIZER_NAME] for group in groups if OPTIMIZER_NAME in group}
    if len(several) > 1:
        raise OptimizerMismatch(
            f"optimizer: the checkpoint holds several by name ({first_of(sorted(map(repr, several)))}), not one; pass "
            "them as a dict, optimizer={name: optimizer}, or one of them with its model's prefix="
        )
    for number, (live, saved) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        unknown = sorted((saved.keys() & _OPTIONS) - live.keys())
        if unknown:
            raise OptimizerMismatch(
                f"optimizer: param group {number} was saved with {first_of(unknown)}, which the live {kind.__name__} "
                "does not know: another class of optimizer saved it; build that one, or load with optimizer=None"
            )
    if not kind.__module__.startswith("torch.optim"):
        return
    needed = _ENTRIES.get(kind.__name__, set())
    for index, entries in state.items():
        if isinstance(index, str) or not isinstance(entries, Mapping):
            continue
        lost = needed - entries.keys()
        if lost and entries.keys() - {VALUE}:
            raise OptimizerMismatch(
                f"optimizer: the state of parameter {index} has {first_of(map(str, entries))}, and not "
                f"{first_of(sorted(lost))}, without which {kind.__name__} cannot step: another class of optimizer "
                "saved it; build that one, or load with optimizer=None"
            )
