"""A tensor subclass such as low-bit optimizers keep: float32 values as bytes and one scale."""

from __future__ import annotations

from typing import Any

import torch


class Coded(torch.Tensor):
    """``codes`` times ``scale``, of a ``kind``. Arithmetic gives plain tensors."""

    codes: torch.Tensor
    scale: torch.Tensor
    kind: str

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, kind: str = "linear") -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale, made.kind = codes, scale, kind
        return made

    def __init__(self, *args: Any) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.kind, torch.float32, {"levels": 256})

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"], context[0])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.view.default):
            return cls(args[0].codes.clone(), args[0].scale.clone(), args[0].kind)
        values = [one.codes.float() * one.scale if isinstance(one, Coded) else one for one in args]
        return func(*values, **(kwargs or {}))


class Doubled(torch.Tensor):
    """Twice what it is made of, which is a :class:`Coded`."""

    single: torch.Tensor

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> Doubled:
        made: Doubled = torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32, device=half.device)
        made.single = half
        return made

    def __init__(self, *args: Any) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["single"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Doubled:
        return cls(inner["single"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*[one.single * 2 if isinstance(one, Doubled) else one for one in args], **(kwargs or {}))


def coded(count: int = 4, kind: str = "linear", start: int = 1) -> Coded:
    return Coded(torch.arange(start, start + count, dtype=torch.uint8), torch.tensor(0.5), kind)


def blank(count: int = 4, kind: str = "linear") -> Coded:
    return Coded(torch.zeros(count, dtype=torch.uint8), torch.tensor(0.0), kind)
