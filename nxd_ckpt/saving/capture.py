"""Capture of the state to save from the caller's objects, without ignored names. Reads no tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.name_patterns import PARAM_GROUPS, unmatched
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.formats.memory import is_shards
from nxd_ckpt.formats.plain_data import check_picklable_as_data
from nxd_ckpt.formats.state import ModelState, SaveState, State, StateTensor
from nxd_ckpt.formats.tensors import Path, iter_tensors
from nxd_ckpt.layouts.payload import is_model, is_optimizer
from nxd_ckpt.live.data_position import is_random_state
from nxd_ckpt.live.dtensor import is_dtensor
from nxd_ckpt.live.ignoring import RANDOM_STATE, Ignoring
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.named import LiveObjects, NamedObjects, named_states, state_of, with_state
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer import open_optimizer
from nxd_ckpt.live.optimizer_state import OptimizerAdapter, flat_parameters
from nxd_ckpt.live.parameters import is_short, refuse_fake_mode, refuse_unsupported
from nxd_ckpt.live.state_names import key_text, leaf_name, replaced, state_entries, without
from nxd_ckpt.reshard.resharding import check_partitions, checked_partitions
from nxd_ckpt.saving.options import SaveOptions


def leave_out(state: SaveState, ignoring: Ignoring, topology: Topology) -> SaveState:
    """Return ``state`` without ignored names; copies containers, no tensor.

    A glob that matches nothing is not an error: too much is saved, and nothing is lost. Rank 0 warns, if it has all
    names.

    Raises:
        InvalidArgument, KeyMismatch: a function did not return a list of the names that it received.
    """
    if not ignoring:
        return state
    names = list(_names(state))
    ignoring.choose(names)
    unmatched_globs = unmatched(ignoring.globs, names)
    if unmatched_globs and topology.rank == 0 and topology.pp == 1:
        logger.warning("ignore_keys= matches nothing that is saved with %s", listed(unmatched_globs, names))
    model, optimizer = state.model, state.optimizer
    covered = set(filter(ignoring.covers, ("model", "optim", "scheduler", "user_content", "rank_content")))
    model = None if model is None or "model" in covered else _model_without(model, ignoring)
    optimizer = None if "optim" in covered else optimizer
    if optimizer is not None:
        tree = without(optimizer.tree, state.optimizer_names or (), ignoring.ignores, ignoring.covers)
        optimizer = replace(optimizer, tree=tree, describe=partial(_described, optimizer, tree))
    return replace(
        state,
        model=model,
        optimizer=optimizer,
        optimizer_kind=None if optimizer is None else state.optimizer_kind,
        optimizer_names=None if optimizer is None else state.optimizer_names,
        scheduler=None if "scheduler" in covered else state.scheduler,
        user_content=None if "user_content" in covered else ignoring.pruned("user_content", state.user_content),
        rank_content=None if "rank_content" in covered else ignoring.pruned("rank_content", state.rank_content),
        left_out=sorted(ignoring.globs) or ["what a function chooses"],
    )


def _names(state: SaveState) -> Iterator[str]:
    """Yield all names that a glob may match, as in a load."""
    if state.model is not None:
        yield from (f"model/{name}" for name in state.model.tree)
    if state.optimizer is not None:
        yield PARAM_GROUPS
        yield from (name for _, name, _ in state_entries(state.optimizer.tree, state.optimizer_names or ()))
    if state.scheduler is not None:
        yield "scheduler"
    for part, content in (("user_content", state.user_content), ("rank_content", state.rank_content)):
        if content is not None:
            yield part
            yield from (f"{part}/{key}" for key in (content if isinstance(content, dict) else ()))
    rank_content = state.rank_content
    if isinstance(rank_content, dict) and any(map(is_random_state, rank_content.values())):
        yield RANDOM_STATE


def _model_without(model: ModelState, ignoring: Ignoring) -> ModelState:
    tree = {name: value for name, value in model.tree.items() if not ignoring.ignores_model(name)}

    def specify() -> dict[str, Any]:
        return {name: spec for name, spec in model.parameters.items() if name in tree}

    return replace(model, tree=tree, describe=lambda: _described(model, tree), specify=specify)


def _described(state: State, tree: Mapping[str, Any]) -> dict[Path, StateTensor]:
    return {path: state.tensors[path] for path, _ in iter_tensors(tree, torch.Tensor)}


def capture(
    topology: Topology,
    options: SaveOptions,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    rank_content: Any = None,
    state: Mapping[str, Any] | None = None,
) -> SaveState:
    """Return the state that this rank is to save, with tensors still live.

    Raises:
        UnsupportedState: SPMD or meta state.
        InvalidArgument: ``weights_only`` without a model; nothing to save.
        UnsafePickle: user content, rank content or scheduler that a safe load would refuse.
    """
    model, optimizer, scheduler = with_state(LiveObjects(model, optimizer, scheduler), state)
    if options.weights_only:
        if model is None:
            raise InvalidArgument("weights_only=True saves the model and nothing else: pass model=")
        optimizer = scheduler = user_content = rank_content = None
    if topology.rank == 0:
        _require_any(model, optimizer, scheduler, user_content, rank_content)
    model_adapter = None if model is None else open_model(model)
    model_state = None if model_adapter is None else model_adapter.capture(topology.tp)
    live_partitions = {} if model_adapter is None else model_adapter.partitions(topology.tp)
    partitions = checked_partitions(options.partitions, topology.tp)
    if model_state is not None and partitions:
        model_state = _with_partitions(model_state, partitions, topology)
    optimizer_state, kind, names = None, None, None
    if optimizer is not None:
        adapter = open_optimizer(
            optimizer, model=model_adapter, param_names=options.param_names,
            zero1_optimizer=options.zero1_optimizer, topology=topology,
        )  # fmt: skip
        optimizer_state = _captured(adapter, model_adapter, topology)
        kind, names = adapter.kind, adapter.parameter_names
        if options.use_zero1_dcp:
            kind = _as_dcp(kind)
        if live_partitions or partitions:
            optimizer_state = _repartitioned(optimizer_state, {**live_partitions, **partitions})
    contents = {"scheduler": _scheduler_state(scheduler), "user_content": user_content, "rank_content": rank_content}
    captured = SaveState(
        model=model_state,
        optimizer=optimizer_state,
        optimizer_kind=kind,
        optimizer_names=None if names is None else tuple(names),
        use_xser=options.use_xser,
        lower_precision_weights=not options.avoid_saving_lower_precision_weights,
        is_of_rank=model_adapter is not None and model_adapter.is_of_rank,
        **contents,
    )
    captured = _without_ignored(captured, options, model_adapter, topology)
    if not options.trust_pickle:
        for what in contents:
            check_picklable_as_data(getattr(captured, what), what)
        _check_values(captured)
    _refuse_valueless(captured)
    return _with_own_apart(captured)


def _with_own_apart(state: SaveState) -> SaveState:
    """Return the state with what this rank alone has apart from the tree of the optimizer."""
    optimizer = state.optimizer
    if optimizer is None or not optimizer.of_rank:
        return state
    saved = optimizer.tree["state"]
    own = {path: saved[path[1]][path[2]] for path in optimizer.of_rank if path[2] in saved.get(path[1], {})}
    emptied = [
        ("state", index)
        for index, entries in saved.items()
        if entries and isinstance(entries, dict) and all(("state", index, entry) in own for entry in entries)
    ]
    rest = replace(
        optimizer,
        tree=replaced(optimizer.tree, {}, [*own, *emptied]),
        describe=lambda: {path: about for path, about in optimizer.tensors.items() if path[:3] not in own},
    )
    names = state.optimizer_names
    named = {leaf_name("optimizer", path, names, key_text): (path, value) for path, value in own.items()}
    return replace(state, optimizer=rest, own=named)


def _without_ignored(
    state: SaveState, options: SaveOptions, model: ModelAdapter | None, topology: Topology
) -> SaveState:
    """Return the state without names in ``ignore_keys``.

    Raises UnsupportedState if no load could restore the rest, or it has no values: in a FakeTensorMode.
    """
    ignoring = Ignoring(options.ignore_keys)
    ignoring.know_ties(model)
    state = leave_out(state, ignoring, topology)
    if model is not None and state.model is not None:
        model.require_loadable(state.model.tree)
    refuse_fake_mode()
    return state


def _refuse_valueless(state: SaveState) -> None:
    """Raise UnsupportedState for a tensor without memory of its own that capturing model and optimizer did not see."""
    if state.optimizer is not None:
        for path, tensor in iter_tensors(state.optimizer.tree, torch.Tensor):
            if is_short(tensor) or is_shards(tensor):  # its name takes longer than the look
                refuse_unsupported(state.optimizer.tensors[path].name, tensor)
    model = {} if state.model is None else state.model.tree
    contents = {part: getattr(state, part) for part in ("scheduler", "user_content", "rank_content")}
    contents["model"] = {name: value for name, value in model.items() if not isinstance(value, torch.Tensor)}
    for path, tensor in iter_tensors(contents, torch.Tensor):
        name = "/".join(map(str, path))
        refuse_unsupported(name, tensor)
        if is_dtensor(tensor) and path[0] != "model":
            raise UnsupportedState(
                f"{name} is a DTensor, of which this rank has a part: pass the model or optimizer that it is of, or "
                "save its to_local() in rank_content="
            )


def _check_values(state: SaveState) -> None:
    """Raise UnsafePickle for values in model or optimizer that are neither tensors nor plain data.

    A load would refuse them.
    """
    for part, values in state.trees().items():
        for name, value in _unusual(values.tree, part, depth=2):
            check_picklable_as_data(value, name)


def _unusual(tree: Mapping[Any, Any], name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield everything except tensors and numbers, with its name.

    Fast, because it runs on the caller's thread in each save.
    """
    for key, value in tree.items():
        kind = type(value)
        if kind is dict and depth:
            yield from _unusual(value, f"{name}/{key}", depth - 1)
        elif kind not in _USUAL and not isinstance(value, torch.Tensor):
            yield f"{name}/{key}", value


_USUAL = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)})


def _require_any(*parts: Any) -> None:
    if all(part is None for part in parts):
        raise InvalidArgument(
            "nothing was passed to be saved, and an empty tag would count as the latest checkpoint: pass model=, "
            "optimizer=, scheduler=, user_content= or rank_content="
        )


def _as_dcp(kind: str) -> str:
    """Return the kind of an optimizer of that ``kind`` with ``use_zero1_dcp``."""
    if kind != "zero1":
        raise UnsupportedState(
            "use_zero1_dcp=True is for ZeRO-1 optimizers, and for their state dicts with zero1_optimizer=True; this "
            "one's state is the same on all data-parallel ranks: leave it out"
        )
    return "zero1_dcp"


def _captured(optimizer: OptimizerAdapter, model: ModelAdapter | None, topology: Topology) -> State:
    """Return its state; once it is described, rank 0 warns of an optimizer that has no parameter of the model."""
    state = optimizer.capture()
    if model is None or topology.rank or optimizer.kind == "zero1":  # which steps on shards, never the model's
        return state
    groups = getattr(optimizer.stepping, "param_groups", ())
    parameters = {id(parameter): parameter for parameter, _ in flat_parameters(groups)}

    def described() -> dict[Path, StateTensor]:
        if parameters and model.apart(parameters.values()) == parameters.keys():
            logger.warning(
                "optimizer: none of its %d parameters is one of the model's; they are saved with values of their own, "
                "as clones (master weights) need it. If it is another model's optimizer, make it of this model's",
                len(parameters),
            )
        return state.tensors

    return replace(state, describe=described)


def _scheduler_state(scheduler: Any) -> Any:
    state = state_of(scheduler)
    several = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    objects = [each for each in several if hasattr(each, "state_dict")]
    if objects:
        raise UnsupportedState(
            f"scheduler= is a {type(scheduler).__name__} with {type(objects[0]).__name__} objects in it: pass them by "
            "names of your choice, state={'warmup': scheduler, ...}"
        )
    kind = "an optimizer" if is_optimizer(state) else "a model" if is_model(state) else None
    if kind is not None:
        raise UnsupportedState(
            f"scheduler= has the state of {kind}, which no load would take for a scheduler's: pass it as that, by a "
            "name in state={...}, or as user_content="
        )
    placed = sorted(name for name, own in (named_states(state) or {}).items() if any(map(is_dtensor, _tensors_in(own))))
    if isinstance(scheduler, NamedObjects) and placed:
        raise UnsupportedState(
            f"state[{placed[0]!r}]: the state_dict() of {type(scheduler[placed[0]]).__name__} has DTensors, of which a "
            "tag would keep rank 0's part: pass the model and the optimizer themselves, each by a name"
        )
    return state


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in iter_tensors(tree, torch.Tensor))


def _with_partitions(state: ModelState, partitions: Mapping[str, Partition], topology: Topology) -> ModelState:
    repartitioned_state = _repartitioned(state, partitions)

    def describe() -> dict[Path, StateTensor]:
        check_partitions(partitions, state.parameters, topology)
        return repartitioned_state.describe()

    def specify() -> dict[str, ParameterSpec]:
        return {
            name: replace(spec, partition=partitions[name], explicit=True) if name in partitions else spec
            for name, spec in state.parameters.items()
        }

    return replace(repartitioned_state, describe=describe, specify=specify)


_StateT = TypeVar("_StateT", bound=State)


def _repartitioned(state: _StateT, partitions: Mapping[str, Partition]) -> _StateT:
    """Return the state with these partitions on the tensors of the parameters that they name."""

    def repartitioned(about: StateTensor) -> StateTensor:
        partition = partitions.get(about.name.split("/")[1])  # "model/<name>", "optim/<name>/exp_avg"
        if partition is None:
            return about
        spec = None if about.spec is None else replace(about.spec, partition=partition)
        return about._replace(spec=spec, expert=partition.expert)

    def describe() -> dict[Path, StateTensor]:
        return {path: repartitioned(about) for path, about in state.tensors.items()}

    return replace(state, describe=describe, cache_key=(state.cache_key, dict(partitions)))
