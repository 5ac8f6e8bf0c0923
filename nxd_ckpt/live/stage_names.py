"""Names of a pipeline stage: the whole model's, which a save uses, and those inside the stage's modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def names_in_stage(live: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Map names in ``live``, which are the whole model's, to names in ``own``, the state dict of the stage's modules.

    They come in the same order; otherwise parameters and buffers are identified as objects, and extra state is left
    out.
    """
    pairs = list(zip(live, own, strict=False))
    is_tensor = {name for name, value in live.items() if isinstance(value, torch.Tensor)}
    if len(live) == len(own) and all(live[name] is own[inner] for name, inner in pairs if name in is_tensor):
        return dict(pairs)
    places = {id(value): inner for inner, value in own.items()}
    return {name: places[id(live[name])] for name in live if name in is_tensor and id(live[name]) in places}


def name_in_stage(name: str, inner_names: Mapping[str, str]) -> str:
    """Return the name inside the modules of a name of the whole model that is not live, by its module's names."""
    prefix, inner_name = "", name
    for live, inner in inner_names.items():
        outer_parts, inner_parts = live.split("."), inner.split(".")
        while outer_parts and inner_parts and outer_parts[-1] == inner_parts[-1]:
            outer_parts.pop()
            inner_parts.pop()
        outer = ".".join([*outer_parts, ""])
        if name.startswith(outer) and len(outer) > len(prefix):
            prefix, inner_name = outer, ".".join([*inner_parts, name.removeprefix(outer)])
    return inner_name
