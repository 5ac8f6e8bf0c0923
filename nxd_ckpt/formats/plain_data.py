"""A check for plain data when saving, so that no file is written that a load would refuse."""

from __future__ import annotations

import io
import pickle
import types
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nxd_ckpt.errors import CheckpointError, UnsafePickle
from nxd_ckpt.formats.machine import Machine, check_walk
from nxd_ckpt.formats.memory import TENSORS
from nxd_ckpt.formats.pickling import PROTOCOL
from nxd_ckpt.formats.tensors import SCALARS, TensorReference, is_flat
from nxd_ckpt.formats.unpickle import global_named


def check_picklable_as_data(obj: Any, name: str = "object") -> None:
    """Raise UnsafePickle, naming class and place, if loading ``obj`` would need ``trust_pickle=True``."""
    why = _refusal(obj)
    if why is not None:
        node = obj
        path = name
        with suppress(RecursionError):  # nested too deeply to look further
            node, path, why = _culprit(obj, name, why, {id(obj)})
        kind = node if isinstance(node, type) else type(node)
        raise UnsafePickle(
            f"{path} is {kind.__module__}.{kind.__qualname__}, which a load refuses, because {why}. Keep its values in "
            "dicts, lists, numbers, strings and tensors (a state_dict()), or load it with trust_pickle=True"
        )


def _refusal(node: Any) -> str | None:
    """Return why a load would refuse the value: it is pickled and read by the load's own reader, without tensors."""
    file = io.BytesIO()
    try:
        check_walk(node)
        _WithoutTensors(file, PROTOCOL).dump(_abridged(node, {}))
        _Reread(file.getvalue()).load()
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # of its own __reduce__, for example
        return f"it cannot be pickled: {error}"
    return None


def _abridged(node: Any, copies: dict[int, Any]) -> Any:
    """Return ``node`` without dicts, lists and tuples of plain data, of which a load refuses none; None for such a one.

    What is left of others is a list. Of a dict the keys are, unless all are text: some may have one hash.
    """
    kind = type(node)
    if kind not in (dict, list, tuple):
        return None if kind in SCALARS else node
    if id(node) not in copies:
        rest: list[Any] = []
        copies[id(node)] = rest  # before its children, since it may contain itself
        if kind is dict and not all(type(key) is str for key in node):
            rest.append(dict.fromkeys(node))
        if not is_flat(node):
            parts = (_abridged(child, copies) for child in (node.values() if kind is dict else node))
            rest.extend(part for part in parts if part is not None)
        copies[id(node)] = rest or None
    return copies[id(node)]


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return 0 if isinstance(obj, (*TENSORS, TensorReference)) else None


class _Reread(Machine):
    def find_class(self, module: str, name: str) -> Any:
        return global_named(module, name)

    def persistent_load(self, pid: Any) -> None:
        return None


def _culprit(node: Any, path: str, why: str, above: set[int]) -> tuple[Any, str, str]:
    """Return the innermost part of ``node`` that is refused, with its path, and why."""
    for part, where in _parts(node, path):
        refused = None if id(part) in above else _refusal(part)
        if refused is not None:
            return _culprit(part, where, refused, {*above, id(part)})
    return node, path, why


def _parts(node: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yield the parts of a container, each with its path."""
    if isinstance(node, defaultdict):
        yield node.default_factory, f"{path}.default_factory"
    if isinstance(node, dict):
        yield from ((key, f"{path}'s key {key!r:.80}") for key in node)
        yield from ((value, f"{path}[{key!r:.80}]") for key, value in node.items())
    elif isinstance(node, (list, tuple, deque)):
        yield from ((item, f"{path}[{index}]") for index, item in enumerate(node))
    elif isinstance(node, (set, frozenset)):
        yield from ((item, f"{path}'s item {item!r:.80}") for item in node)
    elif isinstance(node, (Namespace, types.SimpleNamespace)):
        yield from ((value, f"{path}.{key}") for key, value in vars(node).items())


def without_refused(obj: Any, name: str = "object") -> tuple[Any, list[str]]:
    """Return ``obj`` without the values that `check_picklable_as_data` refuses, and a sentence about each of them.

    Entries of dicts, and items of sets, are left out; an item of a list or tuple becomes None, so that the others keep
    their places. Containers with such values are copied, all others are shared.
    """
    refused: list[str] = []
    above: set[int] = set()

    def pruned(node: Any, path: str) -> Any:
        try:
            check_picklable_as_data(node, path)
        except UnsafePickle as error:
            if type(node) not in _PRUNED or id(node) in above:
                refused.append(str(error).partition(", because")[0])
                return _REFUSED
        else:
            return node
        above.add(id(node))
        if isinstance(node, dict):
            keys = [key for key in node if pruned(key, f"{path}'s key {key!r:.80}") is not _REFUSED]
            values = {key: pruned(node[key], f"{path}[{key!r:.80}]") for key in keys}
            copy: Any = node.copy()
            copy.clear()
            copy.update({key: value for key, value in values.items() if value is not _REFUSED})
        else:
            items = [pruned(item, f"{path}[{number}]") for number, item in enumerate(node)]
            is_set = isinstance(node, (set, frozenset))
            kept = [None if item is _REFUSED else item for item in items if not (is_set and item is _REFUSED)]
            copy = type(node)(kept)
        above.discard(id(node))
        return copy

    kept = pruned(obj, name)
    return None if kept is _REFUSED else kept, refused


_REFUSED = object()

_PRUNED = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset)
"""Containers that are saved without those of their values that are refused."""
