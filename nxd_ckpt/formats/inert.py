"""The globals that a checkpoint's pickle may name, each as something inert: the allowlist of safe unpickling.

An unpickler *calls* what a pickle names and *sets attributes* of what it made. So nothing is handed to it
by its real name that either could misuse: it gets immutable builtin types, values, and :class:`Call`
objects, which can only be called, check their arguments, and refuse attributes. numpy arrays and dtypes are
rebuilt from checked numbers (their own ``__setstate__`` is C code that trusts its input), as
:class:`StandIn` objects that are replaced once loading is done.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import math
import os
import pathlib
import re
import types
import uuid
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nxd_ckpt.errors import CheckpointError, MalformedFile, UnsafePickle
from nxd_ckpt.formats.tensors import TensorReference

if TYPE_CHECKING:
    import numpy as np


class Sealed:
    """An object whose attributes a pickle cannot set, nor those of its class."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise UnsafePickle("a pickle tries to change a function or class that it names, which no checkpoint does")


class Call(Sealed):
    """A function that a pickle may call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class Marker(Sealed):
    """A class that a pickle may name as an argument, and never call."""

    __slots__ = ()


class _Namespace(Namespace):
    """What ``argparse.Namespace`` is to a pickle: it becomes a real one when its attributes are set."""

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise MalformedFile("a Namespace must hold a dict of named attributes")
        self.__class__ = Namespace  # type: ignore[assignment]
        self.__dict__.update(state)


class StandIn(Sealed):
    """Takes the place of a numpy object until loading is done; ``real()`` is the object itself."""

    __slots__ = ()

    def real(self) -> Any:
        raise NotImplementedError


class _NumpyDtype(StandIn):
    __slots__ = ("_code", "_order")

    _PLAIN = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][0-9]+")

    def __init__(self, code: object, *flags: object) -> None:
        if not isinstance(code, str) or not self._PLAIN.fullmatch(code):
            raise UnsafePickle(
                f"numpy dtype {code!r} is not plain numbers or text (objects, records and dates are refused)"
            )
        self._code, self._order = code, "="

    def __setstate__(self, state: object) -> None:
        """(version, byte order, subarray, names, fields, ...): only the byte order is taken."""
        if not isinstance(state, tuple) or state[1] not in ("<", ">", "|", "=") or any(state[2:5]):
            raise UnsafePickle(f"numpy dtype {self._code!r} carries records or subarrays, which are refused")
        self._order = state[1]

    def real(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = _numpy().dtype(self._order + self._code)
        return dtype


class _NumpyArray(StandIn):
    __slots__ = ("_array",)

    def __init__(self, kind: object, *shape_and_code: object) -> None:
        if not isinstance(kind, Marker):
            raise UnsafePickle("a numpy array of a subclass is refused")
        self._array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: object) -> None:
        """(version, shape, dtype, whether Fortran order, bytes)"""
        _, shape, dtype, fortran, raw = state if isinstance(state, tuple) else ()
        if not isinstance(dtype, _NumpyDtype) or not isinstance(raw, bytes):
            raise UnsafePickle("a numpy array of objects is refused")
        if len(raw) != math.prod(shape) * dtype.real().itemsize:
            raise MalformedFile(f"a numpy array of shape {shape} and {dtype.real()} cannot have {len(raw)} bytes")
        view = _numpy().ndarray(shape, dtype.real(), raw, order="F" if fortran else "C")
        self._array = view.copy(order="K")

    def real(self) -> np.ndarray[Any, Any]:
        if self._array is None:
            raise MalformedFile("a numpy array without contents")
        return self._array


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise CheckpointError("this file holds numpy values: install numpy to read it") from error
    return numpy


def _numpy_scalar(dtype: object, raw: object) -> Any:
    if not isinstance(dtype, _NumpyDtype) or not isinstance(raw, bytes):
        raise UnsafePickle("a numpy scalar that is not a plain number or text is refused")
    if len(raw) != dtype.real().itemsize:
        raise MalformedFile(f"a numpy {dtype.real()} cannot have {len(raw)} bytes")
    return _numpy().frombuffer(raw, dtype.real())[0]


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise MalformedFile(f"bytes are written as latin1 text, found {encoding!r}")
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
    if factory is not None and factory not in BUILTIN_TYPES:
        raise UnsafePickle(f"a defaultdict of {factory!r} is refused: only builtin types")
    return defaultdict(factory)


def _counter(counts: Any = ()) -> Counter[Any]:
    return Counter(dict(counts))


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise MalformedFile(f"{name!r} is not a torch layout")
    return layout


def _dtypes() -> dict[tuple[str, str], Any]:
    return {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _both(module: str, name: str, value: Any) -> dict[tuple[str, str], Any]:
    """numpy's internals under their names before and since numpy 2."""
    return {(f"numpy.{core}.{module}", name): value for core in ("core", "_core")}


def _paths() -> dict[tuple[str, str], Any]:
    kinds = {
        # The other system's paths cannot be made concrete on this one.
        "PosixPath": Call(pathlib.PurePosixPath if os.name == "nt" else pathlib.Path),
        "WindowsPath": Call(pathlib.Path if os.name == "nt" else pathlib.PureWindowsPath),
        "PurePosixPath": Call(pathlib.PurePosixPath),
        "PureWindowsPath": Call(pathlib.PureWindowsPath),
    }
    return {(module, name): kind for module in ("pathlib", "pathlib._local") for name, kind in kinds.items()}


BUILTIN_TYPES: tuple[type, ...] = (int, float, str, bool, list, dict, set, tuple, frozenset, complex)
"""Builtin types that a pickle may name: as values, to be called, and as a defaultdict's factory."""

GLOBALS: dict[tuple[str, str], Any] = {
    **{("builtins", kind.__name__): kind for kind in BUILTIN_TYPES},
    ("builtins", "bytes"): Call(_bytes),
    ("builtins", "bytearray"): Call(_bytearray),
    ("builtins", "slice"): Call(slice),
    ("builtins", "range"): Call(range),
    ("_codecs", "encode"): Call(_encode),
    ("argparse", "Namespace"): _Namespace,
    ("collections", "defaultdict"): Call(_defaultdict),
    ("datetime", "datetime"): Call(datetime.datetime),
    ("datetime", "date"): Call(datetime.date),
    ("datetime", "time"): Call(datetime.time),
    ("datetime", "timedelta"): Call(datetime.timedelta),
    ("datetime", "timezone"): Call(datetime.timezone),
    ("decimal", "Decimal"): Call(decimal.Decimal),
    ("fractions", "Fraction"): Call(fractions.Fraction),
    ("uuid", "UUID"): uuid.UUID,  # made by __new__; its own __setstate__ seals the class
    **_paths(),
    ("numpy", "dtype"): Call(_NumpyDtype),
    ("numpy", "ndarray"): Marker(),
    **_both("multiarray", "_reconstruct", Call(_NumpyArray)),
    **_both("multiarray", "scalar", Call(_numpy_scalar)),
    **_dtypes(),
    ("torch", "Size"): Call(torch.Size),
    ("torch", "device"): Call(torch.device),
    ("torch", "Tensor"): Marker(),
    ("torch.nn.parameter", "Parameter"): Marker(),
    ("torch.nn.parameter", "Buffer"): Marker(),
    ("torch.serialization", "_get_layout"): Call(_layout),
    ("torch.torch_version", "TorchVersion"): str,
    ("torch_xla.utils.serialization", "TensorReference"): TensorReference,
}
"""(module, name) -> what the unpickler gets. Tensors and their storages are :mod:`.unpickle`'s own."""

ATTRIBUTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): _counter,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
}
"""The same for objects whose ``__dict__`` a pickle can fill: the unpickler looks through them once loaded."""
