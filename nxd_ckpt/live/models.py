"""Choice of the adapter for a live model."""

from __future__ import annotations

from typing import Any

import torch

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.live.lora import LoraAdapter, is_lora
from nxd_ckpt.live.model import DictModel, ModelAdapter, ModuleModel
from nxd_ckpt.live.named import by_name
from nxd_ckpt.live.named_models import NamedModels


def open_model(model: Any, *, may_be_meta: bool = False) -> ModelAdapter:
    """Return the adapter of ``model`` for one save or one load: a module, an NxD wrapper, or a dict of tensors.

    Or a dict of several modules by name.

    With ``may_be_meta``, for a load that calls `ModelAdapter.materialize`, tensors may be on the meta device. Raises
    InvalidArgument for anything else.
    """
    several = by_name(model, "model")
    if several is not None:
        adapters = {name: open_model(one, may_be_meta=may_be_meta) for name, one in several.items()}
        return NamedModels(adapters, may_be_meta)
    if isinstance(model, dict):
        return DictModel(model, may_be_meta)
    if isinstance(model, type) or not callable(getattr(model, "state_dict", None)):
        kind = f"the class {model.__name__} itself" if isinstance(model, type) else f"a {type(model).__name__}"
        is_list = isinstance(model, (list, tuple)) and bool(model)
        advice = "; pass several by name, model={name: model}" if is_list else ""
        raise InvalidArgument(f"model= must be a torch.nn.Module, an NxD model or a state dict, found {kind}{advice}")
    if hasattr(model, "param_groups"):
        raise InvalidArgument(f"model= is an optimizer ({type(model).__name__}): pass it as optimizer=")
    model = _unwrapped(model)
    return LoraAdapter(model, may_be_meta) if is_lora(model) else ModuleModel(model, may_be_meta)


def _unwrapped(model: Any) -> Any:
    """Return the model to which NxD's wrappers (``NxDModel``, its Lightning module) delegate ``state_dict()``."""
    while isinstance(model, torch.nn.Module) and "nxd_config" in vars(model):
        if type(model).state_dict is torch.nn.Module.state_dict:
            break  # its names begin with that of the attribute
        inner = model._modules.get("module") or model._modules.get("model")
        if inner is None:
            break
        model = inner
    return model
