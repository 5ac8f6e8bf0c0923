"""Names of a live model's parameters where they are not the saved ones: SimpleFSDP, pipeline stages, NxD's LoRA.

SimpleFSDP's parameters are DTensors, and a parametrization gathers each when the forward pass asks for it. TorchTitan's
puts properties into modules' classes, which changes no name. With ``torch.nn.utils.parametrize`` the parameter
``up.weight`` is called ``up.parametrizations.weight.original``, although its values are those of ``up.weight``.

In NxD's LoRA models a wrapped layer ``q_proj`` becomes the base's ``q_proj.base_layer`` and the adapter's
``q_proj.lora_A`` (rank, inputs) and ``q_proj.lora_B`` (outputs, rank).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nxd_ckpt.live.dtensor import is_dtensor

_ORIGINAL, _PARAMETRIZATIONS = "original", ".parametrizations."


def gathered_names(model: Any) -> dict[str, str]:
    """Map names of parameters behind parametrizations that only gather them to the names of the gathered ones.

    A parametrization that computes other values, such as spectral norm, keeps its names. One that only gathers holds no
    tensor of its own, knows the device mesh that it gathers over, and its parameter is a DTensor.
    """
    library: Any = sys.modules.get("torch.nn.utils.parametrize")
    if library is None or not isinstance(model, torch.nn.Module):
        return {}
    return {
        f"{name}.{_ORIGINAL}": _gathered(name)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, library.ParametrizationList) and _only_gathers(module)
    }


def _gathered(name: str) -> str:
    """``up.parametrizations.weight`` -> ``up.weight``."""
    owner, _, parameter = f".{name}".rpartition(_PARAMETRIZATIONS)
    return f"{owner}.{parameter}".lstrip(".")


def _only_gathers(parametrizations: Any) -> bool:
    tensors = dict(parametrizations.named_parameters()).keys() | dict(parametrizations.named_buffers()).keys()
    return (
        tensors == {_ORIGINAL}
        and is_dtensor(parametrizations.original)
        and all(any(map(_is_mesh, vars(module).values())) for module in parametrizations)
    )


def _is_mesh(value: Any) -> bool:
    library: Any = sys.modules.get("torch.distributed.device_mesh")
    return library is not None and isinstance(value, library.DeviceMesh)


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
    prefix = ""
    inner_name = name
    for live, inner in inner_names.items():
        outer_parts = live.split(".")
        inner_parts = inner.split(".")
        while outer_parts and inner_parts and outer_parts[-1] == inner_parts[-1]:
            outer_parts.pop()
            inner_parts.pop()
        outer = ".".join([*outer_parts, ""])
        if name.startswith(outer) and len(outer) > len(prefix):
            prefix = outer
            inner_name = ".".join([*inner_parts, name.removeprefix(outer)])
    return inner_name


def replicated(model: Any) -> list[str]:
    """Return the name prefixes of modules that torch's data parallelism wraps, inner ones first."""
    if not isinstance(model, torch.nn.Module):
        return []
    kinds = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    return sorted((f"{name}." if name else "" for name in names), key=len, reverse=True)


def without_replication(name: str, prefixes: Iterable[str]) -> str:
    """Return the name without the wrapper's own name behind any of the ``prefixes``."""
    for prefix in prefixes:
        if name.startswith(f"{prefix}module."):
            name = prefix + name.removeprefix(f"{prefix}module.")
    return name
