"""The structure that a state dict must have: checked where a file's tree leaves this layer, and nowhere above."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from nxd_ckpt.core.limits import check_sizes, shown
from nxd_ckpt.core.parsing import parsing
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.tensors import TENSORS, TensorReference

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_BY_INDEX = ("state", "base_state")


def reading(method: MethodT) -> MethodT:
    """A method of a layout, which has ``files``: whatever it comes across in them is an error of ours."""

    @wraps(method)
    def read(self: Any, *args: Any, **keywords: Any) -> Any:
        with parsing(self.files.where("").rstrip("/"), "a checkpoint with the structure that its names tell"):
            return method(self, *args, **keywords)

    return cast("MethodT", read)


def is_optimizer(state: Any) -> bool:
    """Whether a state dict is an optimizer's: torch's keys, or ZeRO-1's."""
    return isinstance(state, dict) and "param_groups" in state and ("state" in state or "base_state" in state)


def is_model(state: Any) -> bool:
    """Whether a state dict is that of a model: tensors by name, and nothing else."""
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(name, str) for name in state)
        and all(isinstance(leaf, (*TENSORS, TensorReference)) for leaf in state.values())
    )


def checked_model(tree: Any, where: str) -> dict[str, Any]:
    """``tree``, if it has names for keys. Raises MalformedFile, naming ``where``."""
    return _names(tree, f"{where}: expected a model's state dict")


def checked_optimizer(tree: Any, where: str) -> dict[str, Any]:
    """``tree``, if it is as optimizers make it: torch's, or ZeRO-1's. Raises MalformedFile, naming ``where``."""
    _names(tree, f"{where}: expected an optimizer's state dict")
    for key in _BY_INDEX:
        for index, state in _dict(tree.get(key, {}), f"{where}: {key}").items():
            if not isinstance(index, (int, str)):
                raise MalformedFile(f"{where}: {key} must be by index or name, found {shown(index)}")
            if isinstance(index, int):  # what has a name may be of the optimizer as a whole, and of any form
                _names(state, f"{where}: {key} of {shown(index)}")
    _dict(tree.get("sharded_master_weights", {}), f"{where}: sharded_master_weights")
    for index, shape in _dict(tree.get("shape_info", {}), f"{where}: shape_info").items():
        check_sizes(shape, f"{where}: shape_info of {shown(index)}")
    groups = tree.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        raise MalformedFile(f"{where}: param_groups must be a list, found {shown(groups)}")
    for group in groups:
        params = _names(group, f"{where}: a param group").get("params", [])
        if not isinstance(params, (list, tuple)) or not all(isinstance(index, (int, str)) for index in params):
            raise MalformedFile(f"{where}: the params of a group must be indices, found {shown(params)}")
    return cast("dict[str, Any]", tree)


def _names(value: Any, what: str) -> dict[str, Any]:
    for name in _dict(value, what):
        if not isinstance(name, str):
            raise MalformedFile(f"{what}: its keys must be names, found {shown(name)}")
    return cast("dict[str, Any]", value)


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise MalformedFile(f"{what}: expected a dict, found {shown(value)}")
    return value
