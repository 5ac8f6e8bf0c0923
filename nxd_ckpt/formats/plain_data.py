"""A check for plain data when saving, so that no file is written that a load would refuse."""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import pathlib
import types
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch

from nxd_ckpt.core import limits
from nxd_ckpt.errors import MalformedFile, UnsafePickle
from nxd_ckpt.formats.machine import check_walk
from nxd_ckpt.formats.memory import TENSORS
from nxd_ckpt.formats.safe_globals import BUILTIN_TYPES, Keys
from nxd_ckpt.formats.tensors import TensorReference

_ATOMS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        range,
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.torch_version.TorchVersion,
        TensorReference,
        datetime.date,
        datetime.timedelta,
        datetime.timezone,
        uuid.UUID,
        io.BytesIO,
    }
)


_AS_TEXT = (
    decimal.Decimal,
    fractions.Fraction,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
    pathlib.PosixPath,
    pathlib.WindowsPath,
)


def check_picklable_as_data(obj: Any, name: str = "object") -> None:
    """Raise UnsafePickle, naming class and place, if loading ``obj`` would need ``trust_pickle=True``."""
    try:
        check_walk(obj)
    except MalformedFile as error:
        raise _refused(name, f"is more than a load accepts: {error}") from None
    seen: set[int] = set()

    def walk(node: Any, path: str) -> None:
        if id(node) in seen or type(node) in _ATOMS or isinstance(node, TENSORS) or _is_plain_numpy(node):
            return
        seen.add(id(node))
        parts = _parts(node, path)
        if parts is None:
            kind = node if isinstance(node, type) else type(node)
            name = f"{kind.__module__}.{kind.__qualname__}"
            raise _refused(path, f"is {name}, which a load refuses, because it is not plain data")
        for part, where in parts:
            walk(part, where)

    walk(obj, name)


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


def _length(node: Any) -> tuple[int, int]:
    """Return the allowed and the actual length of a value that is written as text."""
    if isinstance(node, fractions.Fraction):  # conversion to text would exceed Python's own limit
        parts = (node.numerator, node.denominator)
        return limits.NUMBER_DIGITS, -(-max(part.bit_length() for part in parts) * 3 // 10)
    return limits.PATH_LENGTH if isinstance(node, pathlib.PurePath) else limits.NUMBER_DIGITS, len(str(node))


def _check_keys(node: Iterable[Any], path: str) -> None:
    try:
        Keys().check(node)
    except MalformedFile as error:
        raise _refused(path, f"has {error}, which is more than a load accepts") from None


def _refused(path: str, why: str) -> UnsafePickle:
    return UnsafePickle(
        f"{path} {why}. Keep its values in dicts, lists, numbers, strings and tensors (a state_dict()), "
        "or load it with trust_pickle=True"
    )


def _parts(node: Any, path: str) -> Iterable[tuple[Any, str]] | None:
    """Return the parts of an object of allowed type, each with its path; None if the type is not allowed."""
    kind = type(node)
    if kind in _AS_TEXT:
        longest, length = _length(node)
        if length > longest:
            raise _refused(path, f"is longer than the {longest} characters that a load accepts in a {kind.__name__}")
        return ()
    if kind in (dict, OrderedDict, Counter, defaultdict, set, frozenset):
        _check_keys(node, path)
    if kind in (dict, OrderedDict, Counter, defaultdict):
        factory = [(node.default_factory, f"{path}.default_factory")] if kind is defaultdict else []
        keys = [(key, f"{path}'s key {key!r:.80}") for key in node]
        return [*factory, *keys, *((value, f"{path}[{key!r:.80}]") for key, value in node.items())]
    if kind in (list, tuple, deque):
        return [(item, f"{path}[{index}]") for index, item in enumerate(node)]
    if kind in (set, frozenset):
        return [(item, f"{path}'s item {item!r:.80}") for item in node]
    if kind in (Namespace, types.SimpleNamespace):
        return [(value, f"{path}.{key}") for key, value in vars(node).items()]
    if kind is slice:
        return [(getattr(node, part), f"{path}.{part}") for part in ("start", "stop", "step")]
    if kind in (datetime.datetime, datetime.time):
        return [(node.tzinfo, f"{path}.tzinfo")]
    return () if isinstance(node, type) and node in BUILTIN_TYPES else None


def _is_plain_numpy(node: Any) -> bool:
    """Return whether it is a NumPy array, scalar or dtype of numbers or text, without importing NumPy."""
    kind = type(node)
    if kind.__module__.partition(".")[0] != "numpy":
        return False
    dtype = node if kind.__module__ == "numpy.dtypes" or kind.__name__ == "dtype" else getattr(node, "dtype", None)
    plain = getattr(dtype, "kind", "O") in "biufcSU" and getattr(dtype, "subdtype", None) is None
    return plain and (kind.__name__ == "ndarray" or node is dtype or not hasattr(node, "__array_finalize__"))
