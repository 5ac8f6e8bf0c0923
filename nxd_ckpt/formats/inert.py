"""Inert objects that a pickle gets instead of functions and classes: it can call them, but not change them.

NumPy's arrays, scalars and dtypes are rebuilt from checked numbers, because NumPy trusts its input.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from nxd_ckpt.core.limits import check_form, shown
from nxd_ckpt.errors import CheckpointError, MalformedFile, UnsafePickle

if TYPE_CHECKING:
    import numpy as np


class Inert:
    """An object whose attributes, and class attributes, a pickle cannot set."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise UnsafePickle("a pickle tries to change a function or class that it names, which no checkpoint does")


class Call(Inert):
    """A function that a pickle may call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class Marker(Inert):
    """A class that a pickle may name as an argument, and never call."""

    __slots__ = ()


class StandIn(Inert):
    """A placeholder for a NumPy object until its state is set; ``real()`` is the object itself from then on."""

    __slots__ = ()

    def real(self) -> Any:
        raise NotImplementedError


class NumpyDtype(StandIn):
    """A dtype of plain numbers or text."""

    __slots__ = ("_code", "_order")

    _PLAIN = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][0-9]+")

    def __init__(self, code: object, *flags: object) -> None:
        if not isinstance(code, str) or not self._PLAIN.fullmatch(code):
            raise UnsafePickle(
                f"numpy dtype {shown(code)} is not plain numbers or text (objects, records and dates are refused)"
            )
        self._code = code
        self._order = "="

    def __setstate__(self, state: object) -> None:
        """Take the byte order from (version, byte order, subarray, names, fields, ...)."""
        if not isinstance(state, tuple) or state[1] not in ("<", ">", "|", "=") or any(state[2:5]):
            raise UnsafePickle(f"numpy dtype {self._code!r} carries records or subarrays, which are refused")
        self._order = state[1]

    def real(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = _numpy().dtype(self._order + self._code)
        return dtype


class NumpyArray(StandIn):
    """An array of plain numbers or text."""

    __slots__ = ("_array",)

    def __init__(self, kind: object, *shape_and_code: object) -> None:
        if not isinstance(kind, Marker):
            raise UnsafePickle("a numpy array of a subclass is refused")
        self._array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: object) -> None:
        """Set the contents from (version, shape, dtype, True for Fortran order, bytes)."""
        _, shape, dtype, fortran, raw = state if isinstance(state, tuple) else ()
        numpy = _numpy()
        if not isinstance(dtype, numpy.dtype) or not isinstance(raw, bytes):
            raise UnsafePickle("a numpy array of objects is refused")
        sizes = check_form(shape, dtype.itemsize, "a numpy array")
        if len(raw) != prod(sizes) * dtype.itemsize:
            raise MalformedFile(f"a numpy array of shape {shown(sizes)} and {dtype} cannot have {len(raw)} bytes")
        view = numpy.ndarray(sizes, dtype, raw, order="F" if fortran else "C")
        self._array = view.copy(order="K")

    def real(self) -> np.ndarray[Any, Any]:
        if self._array is None:
            raise MalformedFile("a numpy array without contents")
        return self._array


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise CheckpointError("this file holds numpy values; install numpy to read it") from error
    return numpy


def numpy_scalar(dtype: object, raw: object) -> Any:
    numpy = _numpy()
    if not isinstance(dtype, numpy.dtype) or not isinstance(raw, bytes):
        raise UnsafePickle("a numpy scalar that is not a plain number or text is refused")
    if len(raw) != dtype.itemsize:
        raise MalformedFile(f"a numpy {dtype} cannot have {len(raw)} bytes")
    return numpy.frombuffer(raw, dtype)[0]
