"""Torch's own values that a checkpoint's pickle may name: dtypes, sizes, devices, layouts. See `safe_globals`."""

from __future__ import annotations

from typing import Any

import torch

from nxd_ckpt.core.limits import check_sizes, shown
from nxd_ckpt.errors import MalformedFile
from nxd_ckpt.formats.inert import Call


def _size(sizes: object = ()) -> torch.Size:
    return torch.Size(check_sizes(sizes, "a torch.Size"))


def _device(*about: object) -> torch.device:
    if not about or [type(part) for part in about] != [str, int][: len(about)]:
        raise MalformedFile("a torch.device is written with its name and index")
    return torch.device(*about)  # type: ignore[call-overload, no-any-return]


def _layout(name: object) -> torch.layout:
    layout = _LAYOUTS.get(name) if isinstance(name, str) else None
    if layout is None:
        raise MalformedFile(f"{shown(name)} is not a torch layout")
    return layout


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


TORCH_GLOBALS: dict[tuple[str, str], Any] = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): Call(_size),
    ("torch", "device"): Call(_device),
    ("torch.serialization", "_get_layout"): Call(_layout),
}
"""(module, name) -> the object for the unpickler."""
