"""Live objects by name: several models, several optimizers, and anything else with a state, as torch's app state."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.formats.tensors import iter_tensors
from nxd_ckpt.live.dtensor import is_dtensor

OBJECTS = "objects"
"""The only key of the scheduler's state where several objects were saved by name: their states."""

_KINDS = {"model": "a torch.nn.Module or NxD model", "optimizer": "an optimizer"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_DOTTED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names of optimizers: one of a single parameter may be called by that."""


class LiveObjects(NamedTuple):
    """The objects of one save or load. Each of the first three may be a dict of several by name."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None


class NamedObjects(dict[str, Any]):
    """Objects by name, each with ``state_dict()`` and ``load_state_dict()``; in place of a scheduler."""


def by_name(objects: Any, argument: str) -> Mapping[str, Any] | None:
    """Return ``objects`` if it is a dict of live objects by name; None if it is one object or a state dict.

    Raises InvalidArgument, naming the ``argument``, for a dict of both, a name that cannot be in a tensor's, and one
    object under two names.
    """
    if not isinstance(objects, dict) or not any(map(_is_live, objects.values())):
        return None
    names: dict[int, str] = {}
    is_kind = {"model": is_model, "optimizer": is_optimizer}.get(argument, _is_live)
    for name, one in objects.items():
        if _is_live(one) and not is_kind(one):
            raise InvalidArgument(
                f"{argument}[{name!r}] is a {type(one).__name__}, expected {_KINDS[argument]}: pass models, optimizers "
                "and anything else with a state together by name, as state={...}"
            )
        if not _is_live(one):
            raise InvalidArgument(
                f"{argument}= is a dict of live objects, but {name!r} is a {type(one).__name__}: plain data and "
                "tensors are saved by user_content="
            )
        if not isinstance(name, str) or not (_DOTTED if is_optimizer(one) else _NAME).fullmatch(name):
            raise InvalidArgument(
                f"{argument}=: {name!r} cannot be a name, with which the names of tensors begin: use letters, digits, "
                "'_' and '-' after a letter or '_'; an optimizer may have '.' too, and begin with a digit"
            )
        first = names.setdefault(id(one), name)
        if first != name:
            raise InvalidArgument(f"{argument}=: {first!r} and {name!r} are one object: pass it once")
    return objects


def with_state(objects: LiveObjects, state: Mapping[str, Any] | None) -> LiveObjects:
    """Return the objects with those of ``state``, by name, each where its kind belongs.

    Raises InvalidArgument for what is no live object, cannot be loaded, is given twice, or as another argument.
    """
    _refuse_swapped(objects)
    if state is None:
        return objects
    if not isinstance(state, Mapping) or not state:
        raise InvalidArgument(f"state= must be a dict of objects by name, found {state!r:.80}")
    plain = [name for name, one in state.items() if not _is_live(one)]
    if plain:
        raise InvalidArgument(
            f"state[{plain[0]!r}] is a {type(state[plain[0]]).__name__}, expected an object with state_dict(): pass "
            "plain data and tensors as user_content=, each rank's own as rank_content="
        )
    models: dict[str, Any] = {}
    optimizers: dict[str, Any] = {}
    on_mesh: dict[str, Any] = {}
    others = NamedObjects()
    for name, one in (by_name(dict(state), "state") or {}).items():
        if is_model(one):
            models[name] = one
        elif is_optimizer(one):
            optimizers[name] = one
        elif is_placed(one):
            on_mesh[name] = ObjectOnMesh(one)
        else:
            others[name] = one
    if on_mesh and objects.optimizer is not None and not optimizers:
        several = by_name(objects.optimizer, "optimizer")
        optimizers = {"optimizer": objects.optimizer} if several is None else dict(several)
        objects = objects._replace(optimizer=None)
    if on_mesh.keys() & optimizers.keys():
        raise InvalidArgument(f"optimizer= and state= both have {', '.join(map(repr, on_mesh.keys() & optimizers))}")
    optimizers |= on_mesh
    for name, one in others.items():
        if not callable(getattr(one, "load_state_dict", None)):
            raise InvalidArgument(
                f"state[{name!r}]: {type(one).__name__} has state_dict() and no load_state_dict(), so no load could "
                "give it back; write one, or pass its state_dict() as user_content="
            )
    if objects.scheduler is not None and others:
        if "scheduler" in others:
            raise InvalidArgument("scheduler= and state['scheduler'] are both given: pass one of them")
        others["scheduler"] = objects.scheduler
    for argument, single, named in (("model", objects.model, models), ("optimizer", objects.optimizer, optimizers)):
        if single is not None and named:
            raise InvalidArgument(
                f"{argument}= is given, and state= has {', '.join(map(repr, named))} too: pass all in state=, each by "
                "its name"
            )
    return LiveObjects(models or objects.model, optimizers or objects.optimizer, others or objects.scheduler)


def _refuse_swapped(objects: LiveObjects) -> None:
    """Raise InvalidArgument for an object that belongs to another argument, and a scheduler that has no state."""
    for argument, one in objects._asdict().items():
        belongs = _argument_of(one)
        if belongs not in (None, argument):
            article = "an" if belongs == "optimizer" else "a"
            state = "'s state dict" if isinstance(one, Mapping) else f" ({type(one).__name__})"
            raise InvalidArgument(f"{argument}= is {article} {belongs}{state}: pass it as {belongs}=")
    if objects.scheduler is not None and not _has_state(objects.scheduler):
        raise InvalidArgument(
            "scheduler= must be an object with state_dict() and load_state_dict(), a list of them, or a state dict, "
            f"found {objects.scheduler!r:.80}"
        )


def _argument_of(one: Any) -> str | None:
    """Return the argument that an object can only be; None if it can be any."""
    if isinstance(one, (type, NamedObjects)):
        return None
    if is_model(one):
        return "model"
    is_state = isinstance(one, Mapping) and "param_groups" in one and ("state" in one or "base_state" in one)
    if is_state or is_optimizer(one):
        return "optimizer"
    return "scheduler" if isinstance(one, torch.optim.lr_scheduler.LRScheduler) else None


def _has_state(one: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return all(map(_has_state, one))
    return isinstance(one, Mapping) or _is_live(one)


class ObjectOnMesh:
    """An object whose state has DTensors, such as an average of weights: an optimizer without parameters."""

    def __init__(self, one: Any) -> None:
        self._one = one
        self.param_groups: list[dict[str, Any]] = [{"params": []}]

    def state_dict(self) -> Any:
        return self._one.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._one.load_state_dict(state)


def is_placed(one: Any) -> bool:
    """Return whether the state of the object, one with ``load_state_dict``, has DTensors."""
    if "torch.distributed.tensor" not in sys.modules or not callable(getattr(one, "load_state_dict", None)):
        return False
    return any(is_dtensor(tensor) for _, tensor in iter_tensors(one.state_dict(), torch.Tensor))


def named_states(saved: Any) -> Mapping[str, Any] | None:
    """Return the states by name in a saved state of a scheduler; None if it is that of one scheduler, or a list."""
    is_named = isinstance(saved, Mapping) and saved.keys() == {OBJECTS} and isinstance(saved[OBJECTS], Mapping)
    return saved[OBJECTS] if is_named else None


def is_model(one: Any) -> bool:
    """Return whether an object is a model: a module, or NxD's wrapper of one."""
    return isinstance(one, torch.nn.Module) or callable(getattr(one, "local_state_dict", None))


def is_optimizer(one: Any) -> bool:
    """Return whether an object is an optimizer, or NxD's wrapper of one."""
    return hasattr(one, "param_groups") or (hasattr(one, "nxd_config") and hasattr(one, "optimizer"))


def _is_live(one: Any) -> bool:
    return not isinstance(one, type) and callable(getattr(one, "state_dict", None))


def state_of(one: Any) -> Any:
    """Return the state of a scheduler, a list of them, or objects by name; of a dict, which is a state, itself."""
    if isinstance(one, NamedObjects):
        return {OBJECTS: {name: state_of(each) for name, each in one.items()}}
    if isinstance(one, (list, tuple)):
        return [state_of(each) for each in one]
    return one.state_dict() if hasattr(one, "state_dict") else one
