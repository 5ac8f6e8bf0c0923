"""What a pickle gets in place of functions and classes: objects that it can call but not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nxd_ckpt.errors import UnsafePickle


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


class StandIn(Sealed):
    """Takes the place of a numpy object until its state is set; ``real()`` is the object itself, then and always."""

    __slots__ = ()

    def real(self) -> Any:
        raise NotImplementedError
