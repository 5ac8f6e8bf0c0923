"""The allowlist of safe unpickling: globals that a checkpoint's pickle may name, as inert objects.

An unpickler *calls* the globals in a pickle and *sets the state* of the results. So it gets no real object that this
could misuse: only builtin types, values, and `Call` objects, which can only be called, check their arguments, and
refuse attributes. Arguments must be those that the object is written with, and as large as the result: a
``Fraction("1e999999999")`` would take all memory, and so would a set of a range. NumPy arrays and dtypes are
`inert.StandIn` objects, which are replaced once their state is set.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import io
import os
import pathlib
import re
import sys
import types
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nxd_ckpt.core import limits
from nxd_ckpt.core.limits import shown
from nxd_ckpt.errors import MalformedFile, UnsafePickle
from nxd_ckpt.formats.inert import Call, Inert, Marker, NumpyArray, NumpyDtype, numpy_scalar
from nxd_ckpt.formats.tensors import TensorReference

KindT = TypeVar("KindT")

def _encode(text: object, encoding: object) -> bytes:
    """Return bytes, which protocol 2 writes as text."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise MalformedFile(f"bytes are written as latin1 text, found {shown(text)} in {shown(encoding)}")
    return str.encode(text, "latin1")


def _bytes() -> bytes:
    return b""


def _bytearray(*contents: Any) -> bytearray:
    if contents and isinstance(contents[0], str):
        return bytearray(_encode(*contents))
    if contents and not isinstance(contents[0], bytes):
        raise MalformedFile("a bytearray is written with its bytes")
    return bytearray(*contents)


def _defaultdict(factory: object = None) -> defaultdict[Any, Any]:
    if factory is None:
        return defaultdict(None)
    if not isinstance(factory, type) or factory not in BUILTIN_TYPES:
        raise UnsafePickle(f"a defaultdict of {shown(factory)} is refused: only builtin types")
    return defaultdict(factory)


def _counter(counts: object = None) -> Counter[Any]:
    return Counter(_of(dict, counts or {}, "Counter"))


def _deque(items: object = (), longest: object = None) -> deque[Any]:
    """Return an empty deque, of a maximum length; its items follow."""
    if items not in ((), []) or not (longest is None or (type(longest) is int and 0 <= longest < 2**63)):
        raise MalformedFile("a deque is written empty, with a length or None")
    return deque(maxlen=longest)


def _ordered(items: object = None) -> OrderedDict[Any, Any]:
    """Return an OrderedDict; it is written empty, by Python 2 with a list of its items."""
    if items is None:  # for each tensor there is one
        return OrderedDict()
    pairs = _of(list, items, "OrderedDict")
    keys = [key for key, _ in pairs]
    if any(isinstance(key, (tuple, frozenset)) for key in keys):  # the same keys could be hashed again and again
        raise MalformedFile("an OrderedDict of Python 2 may have only text or numbers as keys")
    Keys().check(keys)
    return OrderedDict(pairs)


def _decimal(text: object) -> decimal.Decimal:
    return decimal.Decimal(_short(text, limits.NUMBER_DIGITS, "Decimal"))


_FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?")


def _fraction(*parts: object) -> fractions.Fraction:
    """Return a Fraction from numerator and denominator, or from text (before Python 3.11) without an exponent."""
    if len(parts) == 1:
        text = _short(*parts, limits.NUMBER_DIGITS, "Fraction")
        if _FRACTION.fullmatch(text):
            return fractions.Fraction(text)
    elif all(type(part) is int and part.bit_length() <= _NUMBER_BITS for part in parts):
        return fractions.Fraction(*parts)  # type: ignore[call-overload, no-any-return]
    raise MalformedFile(f"a Fraction is written with two ints of at most {limits.NUMBER_DIGITS} digits")


_NUMBER_BITS = limits.NUMBER_DIGITS * 10 // 3


def _path(kind: type[pathlib.PurePath]) -> Call:
    def make(*parts: object) -> pathlib.PurePath:
        texts = [_short(part, limits.PATH_LENGTH, "path") for part in parts]
        if sum(map(len, texts)) > limits.PATH_LENGTH:
            raise MalformedFile(f"a path of more than {limits.PATH_LENGTH} characters")
        return kind(*texts)

    return Call(make)


def _torch_version(text: object = "") -> str:
    """Return torch's own text, which compares with versions; plain text in a process without torch."""
    plain = _of(str, text, "TorchVersion")
    torch = sys.modules.get("torch")
    return plain if torch is None else torch.torch_version.TorchVersion(plain)


def _of(kind: type[KindT], value: object, what: str) -> KindT:
    if not isinstance(value, kind):
        raise MalformedFile(f"a {what} is written with a {kind.__name__}, found {shown(value)}")
    return value


def _short(text: object, limit: int, what: str) -> str:
    value = _of(str, text, what)
    if len(value) > limit:
        raise MalformedFile(f"a {what} of {len(value)} characters, at most {limit} are allowed")
    return value


class Keys:
    """The keys of one dict, or the items of one set; it refuses keys that take long to look up.

    Numbers and tuples can be chosen so that all have one hash; then each is compared with all before it. Text cannot,
    because its hash differs in every process. ``spend`` is called with the number of values of each tuple, before it is
    hashed.
    """

    def __init__(self, spend: Callable[[int], None] = lambda values: None) -> None:
        self._spend = spend
        self._first: dict[int, Any] = {}
        self._others: dict[int, list[Any]] = {}

    def check(self, keys: Iterable[Any]) -> None:
        """Raise MalformedFile for a key that takes long to hash, or to compare with keys that were checked before."""
        for key in keys:
            kind = type(key)
            if kind is str or (kind is int and -_OWN_HASH < key < _OWN_HASH) or isinstance(key, Inert):
                continue
            values = _check_nesting(key)
            self._spend(values)
            first = self._first.setdefault(hash(key), key)
            if first is not key and first != key:
                others = self._others.setdefault(hash(key), [])
                if key not in others:
                    others.append(key)
                if len(others) > min(limits.KEYS_OF_ONE_HASH, limits.KEY_VALUES_OF_ONE_HASH // values):
                    raise MalformedFile(
                        f"more than {len(others) - 1} keys of one hash, such as {shown(first)} and {shown(key)}"
                    )


_OWN_HASH = 2**61 - 1
"""From this number on, ints have the hash of smaller ones."""


def _check_nesting(key: Any) -> int:
    """Return the number of values in a key; raise MalformedFile for too many.

    Hashing walks through all tuples in it, on the C stack, and through repeated ones each time.
    """
    if not isinstance(key, (tuple, frozenset)):
        return 1
    values = 0
    nodes = [key]
    while nodes:
        node = nodes.pop()
        values += len(node)
        if values > limits.KEY_VALUES:
            raise MalformedFile(f"a key, or an item of a set, of more than {limits.KEY_VALUES} values")
        nodes.extend(item for item in node if isinstance(item, (tuple, frozenset)))
    return values or 1


def call_builtin(kind: object, args: tuple[Any, ...], spend: Callable[[int], None]) -> Any:
    """Call a builtin type with ``args``, if pickles write it with such arguments; ``spend`` is passed to `Keys`."""
    if not isinstance(kind, type) or kind not in BUILTIN_TYPES:
        raise UnsafePickle(f"its pickle calls {shown(kind)}, which is not a function")
    if kind in (set, frozenset) and len(args) == 1:
        [items] = args
        Keys(spend).check(_of(list, items, kind.__name__))
    elif kind is complex:
        if [type(part) for part in args] != [float, float]:
            raise MalformedFile("a complex is written with two floats")
    elif args:
        raise UnsafePickle(f"its pickle makes a {kind.__name__} of {shown(args[0])}, as plain data is never written")
    return kind(*args)


def set_state(obj: Any, state: Any) -> None:
    """Set the state of an object, for the opcode BUILD; only for types that are written with a state.

    Attributes of dicts are dropped, because they could shadow methods.
    """
    if isinstance(obj, (Inert, TensorReference, uuid.UUID)):
        obj.__setstate__(state)  # type: ignore[union-attr]
    elif isinstance(obj, (Namespace, types.SimpleNamespace)):
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise MalformedFile(f"a {type(obj).__name__} must hold a dict of named attributes")
        vars(obj).update(state)
    elif isinstance(obj, io.BytesIO):
        if not isinstance(state, tuple) or [type(part) for part in state[:2]] != [bytes, int] or any(state[2:]):
            raise MalformedFile("a BytesIO must hold its bytes and a position")
        obj.write(state[0])
        obj.seek(min(max(state[1], 0), len(state[0])))
    elif not isinstance(obj, (OrderedDict, Counter)):
        raise MalformedFile(f"its pickle sets the state of {shown(obj)}, which has none")


def _both(module: str, name: str, value: Any) -> dict[tuple[str, str], Any]:
    """Return a NumPy internal under its names before and since NumPy 2."""
    return {(f"numpy.{core}.{module}", name): value for core in ("core", "_core")}


def _paths() -> dict[tuple[str, str], Any]:
    kinds = {
        # The other system's paths cannot be made concrete on this one.
        "PosixPath": _path(pathlib.PurePosixPath if os.name == "nt" else pathlib.Path),
        "WindowsPath": _path(pathlib.Path if os.name == "nt" else pathlib.PureWindowsPath),
        "PurePosixPath": _path(pathlib.PurePosixPath),
        "PureWindowsPath": _path(pathlib.PureWindowsPath),
    }
    return {(module, name): kind for module in ("pathlib", "pathlib._local") for name, kind in kinds.items()}


BUILTIN_TYPES: tuple[type, ...] = (int, float, str, bool, list, dict, set, tuple, frozenset, complex)
"""Builtin types that a pickle may name: as values, to call them (`call_builtin`), and as a defaultdict's factory."""


def _none_of(kind: type[KindT]) -> Callable[[], KindT]:
    """Return a function that makes an object without state, which follows."""
    return lambda: kind.__new__(kind)


GLOBALS: dict[tuple[str, str], Any] = {
    **{("builtins", kind.__name__): kind for kind in BUILTIN_TYPES},
    ("builtins", "bytes"): Call(_bytes),
    ("builtins", "bytearray"): Call(_bytearray),
    ("builtins", "slice"): Call(slice),
    ("builtins", "range"): Call(range),
    ("_codecs", "encode"): Call(_encode),
    ("argparse", "Namespace"): Call(_none_of(Namespace)),
    ("collections", "defaultdict"): Call(_defaultdict),
    ("collections", "OrderedDict"): Call(_ordered),
    ("collections", "Counter"): Call(_counter),
    ("collections", "deque"): Call(_deque),
    ("_io", "BytesIO"): Call(_none_of(io.BytesIO)),
    ("types", "SimpleNamespace"): Call(_none_of(types.SimpleNamespace)),
    ("datetime", "datetime"): Call(datetime.datetime),
    ("datetime", "date"): Call(datetime.date),
    ("datetime", "time"): Call(datetime.time),
    ("datetime", "timedelta"): Call(datetime.timedelta),
    ("datetime", "timezone"): Call(datetime.timezone),
    ("decimal", "Decimal"): Call(_decimal),
    ("fractions", "Fraction"): Call(_fraction),
    ("uuid", "UUID"): Call(_none_of(uuid.UUID)),
    **_paths(),
    ("numpy", "dtype"): Call(NumpyDtype),
    ("numpy", "ndarray"): Marker(),
    **_both("multiarray", "_reconstruct", Call(NumpyArray)),
    **_both("multiarray", "scalar", Call(numpy_scalar)),
    ("torch", "Tensor"): Marker(),
    ("torch.nn.parameter", "Parameter"): Marker(),
    ("torch.nn.parameter", "Buffer"): Marker(),
    ("torch.torch_version", "TorchVersion"): Call(_torch_version),
}
"""(module, name) -> the object for the unpickler. Tensors and their storages are in `unpickle`."""


_PYTHON_2_NAMES = {"xrange": "range", "long": "int", "unicode": "str"}  # what protocol 2 still writes


def global_of(module: str, name: str) -> Any:
    """Return the object for the unpickler; None for a global that no checkpoint may name.

    Torch's own values need torch, which is imported once a pickle names one.
    """
    if module == "__builtin__":
        return GLOBALS.get(("builtins", _PYTHON_2_NAMES.get(name, name)))
    if (module, name) in GLOBALS or module not in ("torch", "torch.serialization"):
        return GLOBALS.get((module, name))
    from nxd_ckpt.formats.torch_globals import TORCH_GLOBALS

    return TORCH_GLOBALS.get((module, name))
