"""Arguments as people have them, and the plain values that they mean.

argparse, YAML, OmegaConf, NumPy and torch give 1 or "true" for True, "8" and ``numpy.int64(8)`` for 8, lists for
tuples, mappings of their own for dicts. A value that plainly means one of the annotated type becomes it, any other is
refused: what is kept, compared between ranks or written to a file is plain Python.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from nxd_ckpt.core.limits import shown
from nxd_ckpt.errors import InvalidArgument

_SPELLED = {
    **dict.fromkeys(("true", "yes", "y", "t", "on", "1"), True),
    **dict.fromkeys(("false", "no", "n", "f", "off", "0"), False),
}
_DESCRIBED = {
    bool: ('True or False (1, 0, "yes", "no", "true", "false", "on" and "off" count, too)', "booleans"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    dict: ("a dict", "dicts"),
    list: ("a list", "lists"),
    NoneType: ("None", "None"),
}

_REFUSALS = (TypeError, ValueError, LookupError, OverflowError, AttributeError)


class Kind(NamedTuple):
    """Metadata of an annotated type that has values of other spellings, or not all values.

    Attributes:
        expected: its values, for messages.
        read: returns the plain value; raises ValueError or TypeError.
        secret: no message shows the value.
    """

    expected: str
    read: Callable[[Any], Any]
    secret: bool = False


def plain_value(hint: Any, value: Any, name: str, default: Any = None) -> Any:
    """Return the value of the type ``hint`` that the argument ``name`` means; for None, if it means none, the default.

    Raises InvalidArgument.
    """
    try:
        return read(hint, value)
    except _REFUSALS:
        if value is None:
            with suppress(*_REFUSALS):
                return read(hint, default)
        found = f"a {type(value).__name__}"
        if not _is_secret(hint):
            found = reprlib.repr(value) if isinstance(value, (dict, list, tuple)) else shown(scalar(value))
        raise InvalidArgument(f"{name} must be {described(hint)}, found {found}") from None


def read(hint: Any, value: Any) -> Any:
    """Return the plain value. Raises ValueError, TypeError, LookupError or OverflowError for one that means none."""
    return _reader_of(hint)(value)


def scalar(value: Any) -> Any:
    """Return the Python value of a NumPy scalar or a tensor without dimensions; anything else unchanged."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        try:
            return value.item()
        except Exception:  # on the meta device, for example, it has no value
            return value
    return value


def whole_number(value: Any) -> int:
    """Return an int. Raises ValueError or TypeError unless ``value`` is a whole number, or its digits."""
    if type(value) is int:
        return value
    value = scalar(value)
    if isinstance(value, (bool, Enum)):
        raise TypeError
    if isinstance(value, (float, Decimal)) and value != int(value):
        raise ValueError
    if not isinstance(value, (Integral, float, Decimal, str)):
        raise TypeError
    return int(value)


def number(value: Any) -> float:
    """Return a float. Raises ValueError or TypeError unless ``value`` is a real number, or its digits."""
    value = scalar(value)
    if isinstance(value, (bool, Enum)) or not isinstance(value, (Real, Decimal, str)):
        raise TypeError
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats
        return math.inf if str(value)[0] != "-" else -math.inf


def plain_mapping(value: Any) -> dict[Any, Any]:
    """Return a mapping as nested dicts and lists, in place of OmegaConf's. Raises TypeError for anything else."""
    if not isinstance(value, Mapping):
        raise TypeError
    return {key: _plain_containers(each) for key, each in value.items()}


def _plain_containers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_mapping(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, tuple)):
        return list(map(_plain_containers, value))
    return scalar(value)


def described(hint: Any, number: int = 0) -> str:
    """Return the values of a type in words, as one or as several."""
    origin = get_origin(hint) or hint
    args = get_args(hint)
    if origin is Annotated:
        return str(args[1].expected)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(described(each, number) for each in args))
    if origin is Literal:
        return f"one of {', '.join(args)}" if len(args) > 1 else repr(args[0])
    if origin in _DESCRIBED:
        return _DESCRIBED[origin][number]
    if hasattr(origin, "__fspath__"):
        return ("a path", "paths")[number]
    if origin is Mapping:
        return f"{('a dict', 'dicts')[number]} of {described(args[1], 1)} by name"
    if origin is Callable:
        return ("a function", "functions")[number]
    if args:
        return f"{('a list', 'lists')[number]} of {described(args[0], 1)}"
    return str(getattr(hint, "__name__", "a value" if number == 0 else "values"))


def _is_secret(hint: Any) -> bool:
    args = get_args(hint)
    return any(_is_secret(each) for each in args) or any(isinstance(each, Kind) and each.secret for each in args)


@cache
def _reader_of(hint: Any) -> Callable[[Any], Any]:
    """Return the function that reads values of this type."""
    origin = get_origin(hint) or hint
    args = get_args(hint)
    if origin is Annotated:
        return args[1].read  # type: ignore[no-any-return]
    if origin in (Union, UnionType):
        return partial(_first, args)
    if origin is Literal:
        return partial(_one_of, args)
    if origin in _READERS:
        return _READERS[origin]
    if origin is Mapping:
        return partial(_by_name, *args)
    if origin in (Sequence, tuple, Collection, Iterable):
        return partial(_several, origin, args[0])
    if origin is Callable:
        return partial(_checked, callable)
    if hasattr(origin, "__fspath__"):  # those of os.scandir(b"...") are bytes, which no text can be joined to
        return partial(_checked, lambda value: isinstance(value, origin) and isinstance(value.__fspath__(), str))
    is_ours = str(getattr(origin, "__module__", "")).startswith("nxd_ckpt")
    if isinstance(origin, type) and (is_ours or origin in _DESCRIBED):
        return partial(_checked, lambda value: isinstance(value, origin))
    return lambda value: value  # Any; and classes of other libraries, of which there may be stand-ins


def _first(hints: Sequence[Any], value: Any) -> Any:
    if value is None and NoneType in hints:
        return None
    for hint in hints:
        with suppress(*_REFUSALS):
            return read(hint, value)
    raise TypeError


def _one_of(values: Sequence[Any], value: Any) -> Any:
    return values[values.index(_text(value) if isinstance(value, str) else str(scalar(value)))]


def _by_name(key_hint: Any, hint: Any, value: Any) -> Any:
    _checked(lambda value: isinstance(value, Mapping), value)
    return {read(key_hint, key): read(hint, each) for key, each in value.items()}


def _several(kind: Any, hint: Any, value: Any) -> Any:
    """Return a tuple of plain values. A set stays one where order does not count, and an iterator what it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return tuple(read(hint, each) for each in value)
    if isinstance(value, (set, frozenset)) and kind in (Collection, Iterable):
        return {read(hint, each) for each in value}
    return _checked(lambda value: kind is Iterable and isinstance(value, Iterable), value)


def _checked(is_one: Callable[[Any], bool], value: Any) -> Any:
    if not is_one(value):
        raise TypeError
    return value


def _boolean(value: Any) -> bool:
    if type(value) is bool:
        return value
    value = scalar(value)
    if isinstance(value, str):
        return _SPELLED[value.strip().lower()]
    return bool(_checked(lambda value: type(value) in (bool, int, float) and value in (0, 1), value))


def _text(value: Any) -> str:
    return value if type(value) is str else str.__str__(scalar(value))  # raises TypeError for what is no string


def _nothing(value: Any) -> None:
    _checked(lambda value: value is None or value.strip().lower() in ("none", "null"), value)


_READERS: dict[Any, Callable[[Any], Any]] = {
    bool: _boolean,
    int: whole_number,
    float: number,
    str: _text,
    NoneType: _nothing,
}


def at_least_1(value: int) -> int:
    """Return ``value``. Raises ValueError if it is smaller than 1."""
    if value < 1:
        raise ValueError
    return value


Count = Annotated[int, Kind("a whole number of at least 1", lambda value: at_least_1(whole_number(value)))]
"""A number of something that there must be."""
