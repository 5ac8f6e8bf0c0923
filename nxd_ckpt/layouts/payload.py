"""State dicts of other programs, whose structure is checked here, and a script's dict of several under usual keys.

Lightning saves lists of optimizers and of schedulers, Composer dicts of them by class, all below "state".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar, cast

from nxd_ckpt.core.dcp_names import MASTER_WEIGHTS
from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import check_sizes, shown
from nxd_ckpt.core.manifest import Parts
from nxd_ckpt.core.parameter_names import is_extra_state
from nxd_ckpt.core.suggestions import first_of
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import MalformedFile, PartNotFound
from nxd_ckpt.formats.optimizer_trees import MASTERS, MOMENTS, numbered, restore_types
from nxd_ckpt.formats.tensors import TensorReference, TensorStub, iter_tensors, map_tensors, tensor_types
from nxd_ckpt.layouts.files import MissingTensor, TagFiles

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_BY_INDEX = ("state", "base_state")

_MAY_BE_ONE_NUMBER = {"exp_avg_sq"}
"""Keys for which some optimizers (NovoGrad) have a tensor of one number for each parameter."""


def reading(method: MethodT) -> MethodT:
    """Decorate a method of a layout: unexpected content of its ``files`` is raised as an error of ours."""

    @wraps(method)
    def read(self: Any, *args: Any, **keywords: Any) -> Any:
        with parsing(self.files.directory, "a checkpoint with the structure that its names tell"):
            return method(self, *args, **keywords)

    return cast("MethodT", read)


def is_optimizer(state: Any) -> bool:
    """Return whether a state dict is an optimizer's: torch's keys, or ZeRO-1's."""
    has_groups = isinstance(state, dict) and isinstance(state.get("param_groups"), (list, tuple))
    return has_groups and ("state" in state or "base_state" in state)


def is_model(state: Any) -> bool:
    """Return whether a state dict is a model's: tensors by name, and nothing else."""
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(name, str) for name in state)
        and all(isinstance(leaf, (*tensor_types(), TensorReference)) for leaf in state.values())
    )


def checked_model(tree: Any, where: str) -> dict[str, Any]:
    """Return ``tree`` if its keys are names. Raises MalformedFile, naming ``where``."""
    return checked_names(tree, f"{where}: expected a model's state dict")


def checked_optimizer(tree: Any, where: str) -> dict[str, Any]:
    """Return ``tree`` if it has an optimizer's form: torch's, or ZeRO-1's. Raises MalformedFile, naming ``where``."""
    checked_names(tree, f"{where}: expected an optimizer's state dict")
    for key in _BY_INDEX:
        for index, state in checked_dict(tree.get(key, {}), f"{where}: {key}").items():
            if not isinstance(index, (int, str)):
                raise MalformedFile(f"{where}: {key} must be by index or name, found {shown(index)}")
            if isinstance(index, int):  # a named entry may belong to the whole optimizer, and have any form
                checked_names(state, f"{where}: {key} of {shown(index)}")
    checked_dict(tree.get("sharded_master_weights", {}), f"{where}: sharded_master_weights")
    for index, shape in checked_dict(tree.get("shape_info", {}), f"{where}: shape_info").items():
        check_sizes(shape, f"{where}: shape_info of {shown(index)}")
    groups = tree.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        raise MalformedFile(f"{where}: param_groups must be a list, found {shown(groups)}")
    for group in groups:
        params = checked_names(group, f"{where}: a param group").get("params")
        if not isinstance(params, (list, tuple)) or not all(isinstance(index, (int, str)) for index in params):
            raise MalformedFile(f"{where}: the params of a group must be indices, found {shown(params)}")
    return cast("dict[str, Any]", tree)


def refuse_numbers(tree: Mapping[str, Any], names: Sequence[str] | None, where: str) -> None:
    """Raise MalformedFile for a number or text in place of a moment or of master weights in the state dict ``tree``.

    A tensor of one number beside a parameter's own tensors is refused too. ``names`` are the parameters. Optimizers
    would compute with it and spread it over the parameter; and without a digest, nothing else shows that the file was
    changed.
    """
    for index, master in tree.get("sharded_master_weights", {}).items():
        if _is_plain(master):
            raise _number_error(f"{where}: optimizer, master weights of {_parameter_text(index, names)}", master)
    states = {index: state for key in _BY_INDEX for index, state in tree.get(key, {}).items()}
    by_index = {index: state for index, state in states.items() if isinstance(state, Mapping)}
    tensors = {
        name: index for index, state in by_index.items() for name in state if getattr(state[name], "shape", None)
    }
    for index, state in by_index.items():
        of_parameter = any(getattr(value, "shape", None) for value in state.values())
        for name in sorted(MOMENTS & state.keys()):
            value = state[name]
            is_one = of_parameter and name not in _MAY_BE_ONE_NUMBER and getattr(value, "shape", None) == ()
            if is_one or _is_plain(value):
                expected = (
                    f"as {name} of {_parameter_text(tensors[name], names)} is"
                    if name in tensors
                    else "like the parameter"
                )
                raise _number_error(f"{where}: optimizer, {name} of {_parameter_text(index, names)}", value, expected)


def _parameter_text(index: Any, names: Sequence[str] | None) -> str:
    if names is not None and isinstance(index, int) and 0 <= index < len(names):
        return repr(names[index])
    return f"parameter {shown(index)}"


def _number_error(what: str, value: Any, expected: str = "like the parameter") -> MalformedFile:
    described = f"the number {value!r}" if type(value) in (int, float) else shown(value)
    described = "a tensor of one number" if hasattr(value, "shape") else described
    return MalformedFile(f"{what} is {described}, expected a tensor, {expected}; the file is damaged, or was changed")


def _is_plain(value: Any) -> bool:
    """True for a number or text, or several of these; None means that an optimizer has no such state."""
    several = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(item, (bool, int, float, complex, str, bytes)) for item in several)


def checked_names(value: Any, what: str) -> dict[str, Any]:
    """Return ``value`` if it is a dict by name. Raises MalformedFile, naming ``what`` was expected."""
    for name in checked_dict(value, what):
        if not isinstance(name, str):
            raise MalformedFile(f"{what}: its keys must be names, found {shown(name)}")
    return cast("dict[str, Any]", value)


def checked_dict(value: Any, what: str) -> dict[Any, Any]:
    """Return ``value`` if it is a dict. Raises MalformedFile, naming ``what`` was expected."""
    if not isinstance(value, dict):
        raise MalformedFile(f"{what}: expected a dict, found {shown(value)}")
    return value


_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states", "optimizers")
_SCHEDULER_KEYS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_schedulers", "schedulers")
_PARTS = {"model": _MODEL_KEYS, "optimizer": _OPTIMIZER_KEYS, "scheduler": _SCHEDULER_KEYS}
_STATE = "state"

_COUNTS = ("step", "global_step", "epoch")
"""Keys of counters beside the model that distinguish saves."""


@dataclass(frozen=True)
class Payload:
    """Content of such a file: the dict, or the state dict of a model or of an optimizer itself.

    ``part_keys`` are keys of parts that the caller names, "" for the content itself.
    """

    content: dict[str, Any]
    part_keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Any] | None:
        """The model's state dict, None without one."""
        return self.content if self._is_bare_model else self._part("model")

    @property
    def optimizer(self) -> dict[str, Any] | None:
        return self.content if is_optimizer(self.content) else self._part("optimizer")

    @property
    def scheduler(self) -> dict[str, Any] | None:
        return self._part("scheduler")

    @property
    def rest(self) -> dict[str, Any]:
        """Everything else: step, epoch, arguments; and of several optimizers or models those that were not taken."""
        if is_optimizer(self.content) or self._is_bare_model:
            return {}
        taken = set(map(self._key, _PARTS))
        of_parts = {key for keys in _PARTS.values() for key in keys}
        rest = {key: value for key, value in self.content.items() if key not in taken}
        return {key: value for key, value in rest.items() if key not in of_parts or not _is_nothing(value)}

    @property
    def keys(self) -> list[str]:
        """The first few keys, for errors."""
        return [str(key) for key in self.content][:8]

    @property
    def _is_bare_model(self) -> bool:
        """True for a state dict itself: tensors or extra state at the top level, and no parts."""
        nested = any(self._part(part) is not None for part in ("model", "optimizer"))
        has_tensors = any(len(path) == 1 for path, _ in iter_tensors(self.content))
        is_model = has_tensors or any(map(is_extra_state, self.content))
        return self.part_keys.get("model") == "" or (not nested and not is_optimizer(self.content) and is_model)

    @property
    def taken(self) -> str:
        """The keys that were taken for each part, for people; "" for the state dict itself."""
        if self._is_bare_model or is_optimizer(self.content):
            return ""
        parts = [f"the {part} under {key!r}" for part in _PARTS if (key := self._key(part)) is not None]
        rest = f"user content under {first_of(map(repr, self.rest))}" if self.rest else None
        return ", ".join([*parts, *([] if rest is None else [rest])])

    def _part(self, part: str) -> dict[str, Any] | None:
        key = self._key(part)
        return None if key is None else _alone(self.content[key])

    def _key(self, part: str) -> str | None:
        """Return the first key of a state; under others a script may have its settings of model and optimizer."""
        if part in self.part_keys:
            return self.part_keys[part]
        states = {key: state for key in _PARTS[part] if isinstance(state := _alone(self.content.get(key)), dict)}
        others = (key for key, state in states.items() if not state or part == "scheduler")
        return next((key for key, state in states.items() if _holds_state(state)), next(others, None))


def _alone(value: Any) -> Any:
    """Return the only one of a list of optimizers or schedulers, or of a dict of them by class; None for several."""
    if isinstance(value, dict) and value and all(map(_is_state, value.values())):
        value = list(value.values())
    if not isinstance(value, list):
        return value
    return value[0] if len(value) == 1 else None


def _holds_state(part: dict[str, Any]) -> bool:
    has_tensors = any(iter_tensors(part, (*tensor_types(), MissingTensor)))
    return _is_state(part) or "param_groups" in part or has_tensors or any(map(is_extra_state, part))


def _is_state(value: Any) -> bool:
    return is_optimizer(value) or (isinstance(value, dict) and "last_epoch" in value)


def refuse_other_counts(ranks: Mapping[str, Payload], above: str) -> None:
    """Raise MalformedFile if files of ``ranks`` count other steps or epochs than the first that counts them.

    ``ranks`` are by name below the directory ``above``.
    """
    for key in _COUNTS:
        values = {name: payload.content.get(key) for name, payload in ranks.items()}
        counts = {name: number for name, number in values.items() if type(number) is int}
        first = next(iter(counts), "")
        for name, number in counts.items():
            if number != counts[first]:
                raise MalformedFile(
                    f"{above}/{name} is of {key} {shown(number)}, {first} of {shown(counts[first])}; files of two "
                    "saves are mixed"
                )


def payload_of(tree: Any, where: str) -> Payload:
    """Return the payload that a file's ``tree`` is. Raises MalformedFile, naming ``where``, if it is no dict."""
    if not isinstance(tree, dict):
        what = "a tensor" if isinstance(tree, TensorStub) else type(tree).__name__
        what += ": save its state_dict()" if hasattr(tree, "state_dict") else ""
        raise MalformedFile(f"{where}: expected a dict, found {what}")
    inner = tree.get(_STATE)
    if isinstance(inner, dict) and not is_optimizer(tree) and not {*_MODEL_KEYS}.isdisjoint(inner):
        return Payload({**{key: value for key, value in tree.items() if key != _STATE}, **inner})
    return Payload(tree)


def names_of_groups(tree: Mapping[str, Any]) -> list[str] | None:
    """Return the parameters' names, if a state dict of an optimizer has them in place of numbers."""
    names = [name for group in tree["param_groups"] for name in group.get("params", ())]
    return names if names and all(isinstance(name, str) for name in names) else None


def masters_apart(tree: dict[str, Any], shapes: Mapping[int, tuple[int, ...]] | None = None) -> dict[str, Any]:
    """Return the state dict as ZeRO-1's on one rank if it has master weights among the entries of parameters.

    With the ``shapes`` of parameters it becomes ZeRO-1's in any case.
    """
    states = {index: state for index, state in tree.get("state", {}).items() if isinstance(state, dict)}
    masters = {index: state[MASTER_WEIGHTS] for index, state in states.items() if MASTER_WEIGHTS in state}
    if not masters and shapes is None:
        return tree
    rest = {
        index: {key: value for key, value in state.items() if key != MASTER_WEIGHTS} for index, state in states.items()
    }
    if shapes is None:
        shapes = {index: master.shape for index, master in masters.items()}
    apart: dict[str, Any] = {"base_state": {**tree["state"], **rest}, "shape_info": shapes}
    return restore_types({**tree, "state": {}, **apart, **({MASTERS: masters} if masters else {})})


class PayloadFile:
    """Layout (`TagLayout`) of a single rank's checkpoint, whose ``payload`` is in ``file``.

    In subclasses ranks have payloads of their own; what is neither model nor optimizer is the first rank's.
    """

    def __init__(self, files: TagFiles, file: str, payload: Payload) -> None:
        self.files = files
        self.where: str = files.where(file)
        self._first = payload

    @property
    def taken(self) -> str:
        """The keys that were taken for each part, for people; "" for the state dict itself."""
        return self._payload.taken

    def topology(self) -> Topology:
        return Topology()

    @reading
    def parts(self) -> Parts:
        optimizer = self._payload.optimizer
        optimizer = optimizer if optimizer is None else masters_apart(optimizer)
        return Parts(
            model=self._payload.model is not None,
            optimizer=None if optimizer is None else "zero1" if "base_state" in optimizer else "plain",
            scheduler=self._payload.scheduler is not None,
            user_content=bool(self._rest),
            master_weights=optimizer is not None and "sharded_master_weights" in optimizer,
        )

    @reading
    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        return self._model(self._payload_of(at), self.where)

    @reading
    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        tree = self._optimizer(self._payload_of(at), self.where)
        return masters_apart(tree if names_of_groups(tree) is None else numbered(tree))

    @reading
    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        optimizer = self._payload_of(at).optimizer
        return None if optimizer is None else names_of_groups(checked_optimizer(optimizer, self.where))

    @reading
    def scheduler(self) -> Any:
        return self._read(self._required(self._payload.scheduler, _SCHEDULER_KEYS))

    @reading
    def user_content(self) -> Any:
        """Return everything else in the file: step, epoch, arguments."""
        return self._read(self._rest)

    @property
    def _payload(self) -> Payload:
        """The first rank's."""
        return self._first

    def _payload_of(self, at: Coordinates) -> Payload:
        return self._payload

    @property
    def _rest(self) -> dict[str, Any]:
        return self._payload.rest

    def _model(self, payload: Payload, where: str) -> dict[str, Any]:
        return checked_model(self._required(payload.model, _MODEL_KEYS), where)

    def _optimizer(self, payload: Payload, where: str) -> dict[str, Any]:
        return checked_optimizer(self._required(payload.optimizer, _OPTIMIZER_KEYS), where)

    def _read(self, tree: Any) -> Any:
        return map_tensors(tree, self.files.read, TensorStub)

    def _required(self, part: dict[str, Any] | None, keys: tuple[str, ...]) -> dict[str, Any]:
        if part is None:
            raise PartNotFound(f"{self.where} has nothing under {' or '.join(keys)}; found keys {self._payload.keys}")
        return part


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (dict, list, tuple)) and not value)
