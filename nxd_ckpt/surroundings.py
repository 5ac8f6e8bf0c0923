"""Surroundings of our functions, which they leave for a while: modes of torch that a script set, and Python's garbage.

Our functions run without the modes of a script's thread, and the script's own code with them.
A default device, autocast, inference mode and FakeTensorMode change what torch's functions return to code that knows
nothing of them. Modes belong to threads, so that the threads that we start have none. The default dtype belongs to the
process: nothing of ours depends on it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


_function_modes: ContextVar[Sequence[Any]] = ContextVar("_function_modes", default=())
"""Modes of the caller, the outer ones first."""

_is_fake: ContextVar[bool] = ContextVar("_is_fake", default=False)


@contextmanager
def neutral() -> Iterator[None]:
    """Context without the caller's modes, for what this package does itself."""
    torch = sys.modules.get("torch")
    with ExitStack() as contexts:
        if torch is not None and hasattr(torch, "overrides"):  # else it is being imported
            if torch._C._len_torch_function_stack():  # a default device, or a mode of the script's own
                contexts.enter_context(_without_function_modes(torch))
            if torch.is_inference_mode_enabled():  # tensors that are made in it cannot be trained with
                contexts.enter_context(torch.inference_mode(False))
            if torch._C._is_any_autocast_enabled():
                for device in filter(torch.is_autocast_enabled, _autocast_devices(torch)):
                    contexts.enter_context(torch.autocast(device, enabled=False))
            dispatch = torch.utils._python_dispatch
            if any(type(mode).__name__ == "FakeTensorMode" for mode in dispatch._get_current_dispatch_mode_stack()):
                contexts.callback(_is_fake.reset, _is_fake.set(True))
                contexts.enter_context(dispatch._disable_current_modes())
        yield


@contextmanager
def as_called() -> Iterator[None]:
    """Context within `neutral`, for code of the script that we call: its default device is there again."""
    modes = _function_modes.get()
    if not modes:
        yield
        return
    torch: Any = sys.modules["torch"]
    _push(torch, modes)
    try:
        yield
    finally:
        _function_modes.set(_popped(torch))


def is_fake() -> bool:
    """Return whether the caller is in a FakeTensorMode, in which tensors have no values."""
    return _is_fake.get()


def untraced(function: FunctionT) -> FunctionT:
    """Return the function for callers that torch.compile traces: it runs as it is, between two graphs."""
    disabled: list[Callable[..., Any]] = []

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
            if disable is None:  # nothing is compiled in this process yet
                return function(*args, **kwargs)
            disabled.append(disable(function))
        return disabled[0](*args, **kwargs)

    return cast("FunctionT", called)


@contextmanager
def _without_function_modes(torch: Any) -> Iterator[None]:
    token = _function_modes.set(_popped(torch))
    try:
        yield
    finally:
        _push(torch, _function_modes.get())
        _function_modes.reset(token)


def _popped(torch: Any) -> list[Any]:
    """Remove this thread's modes; return them, the outer ones first."""
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]


def _push(torch: Any, modes: Sequence[Any]) -> None:
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _autocast_devices(torch: Any) -> list[str]:
    own = torch._C._get_privateuse1_backend_name()
    return list(dict.fromkeys(("cpu", "cuda", "xpu", "xla", "mps", "hpu", own)))


_pauses: list[None] = []
"""An entry for each thread that paused the collection, and will resume it."""


class gc_paused:
    """Context in which garbage collection is paused.

    Walking all objects again and again while thousands of new ones are made, none of them garbage, takes longer than
    making them. A child that is forked meanwhile collects its own (see `effects`).
    """

    __slots__ = ("_pauses",)

    def __enter__(self) -> None:
        self._pauses = gc.isenabled()
        if self._pauses:
            _pauses.append(None)
            gc.disable()

    def __exit__(self, *error: object) -> None:
        if self._pauses:
            _pauses.pop()
            gc.enable()


def collect_in_child() -> None:
    """Start the collection again in a forked child, which has no thread that paused it."""
    if _pauses:
        gc.enable()
