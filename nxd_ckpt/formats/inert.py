"""Inert objects that a pickle gets instead of functions and classes: it can call them, but not change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nxd_ckpt.errors import UnsafePickle


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
