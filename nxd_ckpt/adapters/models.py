"""Models: which adapter a live one needs."""

from __future__ import annotations

from typing import Any

import torch

from nxd_ckpt.adapters.lora import LoraAdapter, is_lora
from nxd_ckpt.adapters.model import DictModel, ModelAdapter, ModuleModel
from nxd_ckpt.errors import InvalidArgument


def open_model(model: Any, *, may_be_meta: bool = False) -> ModelAdapter:
    """The adapter of ``model``: a module, an NxD wrapper, or a dict of tensors. For one save or one load.

    With ``may_be_meta``, for a load that calls :meth:`ModelAdapter.materialize`, tensors may be on the meta device.
    Raises InvalidArgument for anything else.
    """
    if isinstance(model, dict):
        return DictModel(model, may_be_meta)
    if not callable(getattr(model, "state_dict", None)):
        raise InvalidArgument(
            f"model must be a torch.nn.Module, an NxD model or a state dict, found {type(model).__name__}"
        )
    model = _unwrapped(model)
    return LoraAdapter(model, may_be_meta) if is_lora(model) else ModuleModel(model, may_be_meta)


def _unwrapped(model: Any) -> Any:
    """What NxD's wrappers (``NxDModel``, the Lightning module around it) hand their ``state_dict()`` on to."""
    while isinstance(model, torch.nn.Module) and "nxd_config" in vars(model):
        if type(model).state_dict is torch.nn.Module.state_dict:
            break  # its names begin with that of the attribute
        inner = model._modules.get("module") or model._modules.get("model")
        if inner is None:
            break
        model = inner
    return model
