"""SimpleFSDP: parameters are DTensors, and a parametrization gathers each when the forward pass asks for it.

TorchTitan's puts properties into modules' classes, which changes no name. With ``torch.nn.utils.parametrize`` the
parameter ``up.weight`` is called ``up.parametrizations.weight.original``, although its values are those of
``up.weight``.
"""

from __future__ import annotations

import sys
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
