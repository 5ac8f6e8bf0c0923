"""Tensor subclasses in a state dict that torch DCP saves or loads, such as torchao's low-bit states and float8 weights.

A tensor that offers torch's ``__tensor_flatten__`` is saved as the tensors that it is made of, beside a record of its
class. ``exp_avg`` becomes ``exp_avg|codes``, ``exp_avg|scale`` and ``exp_avg|class``. If it is a DTensor's shard, the
rank's number is in the names, ``exp_avg|3|codes``: no other rank can do anything with it.

A load puts these tensors into those of a tensor of the same class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import is_not
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nxd_ckpt.errors import MalformedFile, UnsupportedState
from nxd_ckpt.formats.tensors import iter_leaves
from nxd_ckpt.torch_dcp.storage_reader import StorageReader

_CLASS = "class"


def taken_apart(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with what subclasses are made of in their place; other values are those of ``state``.

    Raises UnsupportedState for a class that does not say what it is made of.
    """
    return dict(_apart(state))


def _apart(value: Any) -> Any:
    """``value`` itself where there is no subclass in it."""
    if isinstance(value, Mapping):
        items: dict[Any, Any] = {}
        for key, child in value.items():
            items |= _named(key, child) if _is_subclass(child) else {key: _apart(child)}
        return items if items.keys() != value.keys() or any(items[key] is not value[key] for key in items) else value
    if type(value) is list:
        children = [_named("", child) if _is_subclass(child) else _apart(child) for child in value]
        return children if any(map(is_not, children, value)) else value
    return value


def _named(key: Any, tensor: torch.Tensor) -> dict[str, Any]:
    head = _head(key, tensor)
    return {**{f"{head}{name}": inner for name, inner in _inner(tensor)}, f"{head}{_CLASS}": _record(tensor)}


def _head(key: Any, tensor: torch.Tensor) -> str:
    return f"{key}|{dist.get_rank()}|" if isinstance(tensor, DTensor) else f"{key}|"


def _is_subclass(value: Any) -> bool:
    if isinstance(value, DTensor):
        return _is_subclass(value._local_tensor)
    if not (isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)):
        return False
    return not (value.is_nested or _is_pending(value))


def _is_pending(value: torch.Tensor) -> bool:
    """Return whether it is the result of a collective that is under way, and no subclass of its own."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return isinstance(value, AsyncCollectiveTensor)


def _inner(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that it is made of, by name."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    for name in local.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        child = getattr(local, name)
        if _is_subclass(child):
            yield from ((f"{name}|{below}", plain) for below, plain in _inner(child))
        else:
            yield name, child.detach()


def _record(tensor: torch.Tensor) -> str:
    """Class, shape and context, as JSON: equal for tensors that may take each other's place."""
    if isinstance(tensor, DTensor):
        at = {"mesh": list(tensor.device_mesh.mesh.shape), "placements": list(map(str, tensor.placements))}
        return json.dumps({**_about(tensor._local_tensor), **at, "whole": list(tensor.shape)}, sort_keys=True)
    return json.dumps(_about(tensor), sort_keys=True)


def _about(tensor: Any) -> dict[str, Any]:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    return {
        "module": type(tensor).__module__,
        "class": type(tensor).__qualname__,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "context": _plain(context),
        "inner": {name: _about(child) if _is_subclass(child) else None for name, child in inner.items()},
    }


def _class_name(of: type) -> str:
    return f"{of.__module__}.{of.__qualname__}"


def _plain(value: Any) -> Any:
    """A context as JSON; what has no form there is compared by its class and, if that says what it is, its repr."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list, torch.Size):
        return {type(value).__name__: list(map(_plain, value))}
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(child)] for key, child in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    text = repr(value)
    return {"other": _class_name(type(value)) if " at 0x" in text else f"{_class_name(type(value))}: {text}"}


def with_parts(state: Mapping[str, Any], saved: StorageReader) -> dict[str, Any]:
    """Return the state dict that torch loads into: what subclasses are made of is in their place.

    Raises UnsupportedState for what is saved as another class, or cut otherwise, than it is here.
    """
    parts = taken_apart(state)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    for path, value in iter_leaves(parts):
        name = ".".join(map(str, path))
        whole = name.split("|", 1)[0]
        if name.endswith(f"|{_CLASS}"):
            record = saved.value(name)
            if record != value:
                raise UnsupportedState(_difference(whole, value, record or saved.value(f"{whole}|{_CLASS}")))
        elif isinstance(value, torch.Tensor):
            for head in (f"{name}|", f"{name}|{rank}|", f"{name}|0|"):
                record = saved.value(f"{head}{_CLASS}")
                if record is not None:
                    raise UnsupportedState(_difference(name, None, record, type(value)))
    return parts


def settle(loaded: Any, target: Any) -> None:
    """Put values and tensors of no subclass into ``target``, if a copy of their container was loaded into."""
    if loaded is target:
        return
    for key in target if isinstance(target, Mapping) else range(len(target)):
        if isinstance(target, Mapping) and key not in loaded:
            continue
        child = loaded[key]
        if isinstance(target[key], (Mapping, list)) and isinstance(child, type(target[key])):
            settle(child, target[key])
        elif isinstance(child, torch.Tensor) or not isinstance(target[key], torch.Tensor):
            target[key] = child  # a tensor too, where torch made one in place of a meta tensor


def _class(about: Any) -> str:
    return f"{about['module']}.{about['class']}"


def _read(record: Any, name: str) -> Any:
    try:
        about = json.loads(record)
        kinds = {"module": str, "class": str, "shape": list, "stride": list, "inner": dict}
        if not all(isinstance(about[key], kind) for key, kind in kinds.items()) or "context" not in about:
            raise TypeError("another form")
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedFile(f"{name}|{_CLASS} does not describe a tensor: {record!s:.100}") from error
    return about


def _difference(name: str, live: str | None, saved: str | None, plain: type | None = None) -> str:
    """Why the saved tensor cannot be loaded into the live one, by their records."""
    expected = "a plain tensor" if saved is None else _described(_read(saved, name))
    shown = _class_name(plain or torch.Tensor) if live is None else _described(_read(live, name))
    return f"{name} was saved as {expected}, and the state dict has {shown}: make both the same, on the same mesh"


def _described(about: Any) -> str:
    mesh = f" on a mesh of {about['mesh']}, {', '.join(about['placements'])}" if "mesh" in about else ""
    return (
        f"{_class(about)} of shape {about.get('whole', about['shape'])}{mesh} (made by {json.dumps(about['context'])})"
    )
