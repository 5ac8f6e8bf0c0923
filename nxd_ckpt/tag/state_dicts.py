"""Required structure of a state dict: checked where a file's tree leaves this layer, and nowhere above."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from nxd_ckpt.core.document import parsing
from nxd_ckpt.core.limits import check_sizes, shown
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.tensors import TensorReference, tensor_types

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_BY_INDEX = ("state", "base_state")

_MOMENTS = {
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
}
"""Keys of optimizers, torch's and others, for state that is a tensor for each parameter (or None)."""
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
    return isinstance(state, dict) and "param_groups" in state and ("state" in state or "base_state" in state)


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
    return _names(tree, f"{where}: expected a model's state dict")


def checked_optimizer(tree: Any, where: str) -> dict[str, Any]:
    """Return ``tree`` if it has an optimizer's form: torch's, or ZeRO-1's. Raises MalformedFile, naming ``where``."""
    _names(tree, f"{where}: expected an optimizer's state dict")
    for key in _BY_INDEX:
        for index, state in checked_dict(tree.get(key, {}), f"{where}: {key}").items():
            if not isinstance(index, (int, str)):
                raise MalformedFile(f"{where}: {key} must be by index or name, found {shown(index)}")
            if isinstance(index, int):  # a named entry may belong to the whole optimizer, and have any form
                _names(state, f"{where}: {key} of {shown(index)}")
    checked_dict(tree.get("sharded_master_weights", {}), f"{where}: sharded_master_weights")
    for index, shape in checked_dict(tree.get("shape_info", {}), f"{where}: shape_info").items():
        check_sizes(shape, f"{where}: shape_info of {shown(index)}")
    groups = tree.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        raise MalformedFile(f"{where}: param_groups must be a list, found {shown(groups)}")
    for group in groups:
        params = _names(group, f"{where}: a param group").get("params")
        if not isinstance(params, (list, tuple)) or not all(isinstance(index, (int, str)) for index in params):
            raise MalformedFile(f"{where}: the params of a group must be indices, found {shown(params)}")
    return cast("dict[str, Any]", tree)


_KEYS = (int, float, complex, str, bytes, tuple, type(None))
"""Types of keys of plain data."""


def checked_rank_state(tree: Any, where: str) -> dict[str, Any]:
    """Return ``tree`` if it has the form of what a rank saves for itself. Raises MalformedFile, naming ``where``."""
    _names(tree, f"{where}: expected a rank's own state")
    for key in ("leaves", "paths", "meshes"):
        _names(tree.get(key), f"{where}: {key}")
    for key in ("absent", "lost"):
        listed = tree.get(key)
        if not isinstance(listed, (list, tuple)) or not all(isinstance(name, str) for name in listed):
            raise MalformedFile(f"{where}: {key} must be names, found {shown(listed)}")
    for name, path in tree["paths"].items():
        if not isinstance(path, (list, tuple)) or not all(isinstance(key, _KEYS) for key in path):
            raise MalformedFile(f"{where}: the path of {shown(name)} must be keys, found {shown(path)}")
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
        for name in sorted(_MOMENTS & state.keys()):
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


def _names(value: Any, what: str) -> dict[str, Any]:
    for name in checked_dict(value, what):
        if not isinstance(name, str):
            raise MalformedFile(f"{what}: its keys must be names, found {shown(name)}")
    return cast("dict[str, Any]", value)


def checked_dict(value: Any, what: str) -> dict[Any, Any]:
    """Return ``value`` if it is a dict. Raises MalformedFile, naming ``what`` was expected."""
    if not isinstance(value, dict):
        raise MalformedFile(f"{what}: expected a dict, found {shown(value)}")
    return value
