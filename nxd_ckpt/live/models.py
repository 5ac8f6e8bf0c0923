"""Choice of the adapter for a live model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nxd_ckpt.errors import InvalidArgument
from nxd_ckpt.live.lora import LoraAdapter, is_lora
from nxd_ckpt.live.model import DictModel, ModelAdapter, ModuleModel


def open_model(model: Any, *, may_be_meta: bool = False) -> ModelAdapter:
    """Return the adapter of ``model`` (a module, an NxD wrapper, or a dict of tensors) for one save or one load.

    With ``may_be_meta``, for a load that calls `ModelAdapter.materialize`, tensors may be on the meta device. Raises
    InvalidArgument for anything else.
    """
    if isinstance(model, dict):
        _refuse_live_objects(model)
        return DictModel(model, may_be_meta)
    if isinstance(model, type) or not callable(getattr(model, "state_dict", None)):
        kind = f"the class {model.__name__} itself" if isinstance(model, type) else f"a {type(model).__name__}"
        several = isinstance(model, (list, tuple)) and bool(model)
        advice = "; pass several models as one, torch.nn.ModuleList(models) or torch.nn.ModuleDict" if several else ""
        raise InvalidArgument(f"model= must be a torch.nn.Module, an NxD model or a state dict, found {kind}{advice}")
    if hasattr(model, "param_groups"):
        raise InvalidArgument(f"model= is an optimizer ({type(model).__name__}): pass it as optimizer=")
    model = _unwrapped(model)
    return LoraAdapter(model, may_be_meta) if is_lora(model) else ModuleModel(model, may_be_meta)


def _refuse_live_objects(state: Mapping[Any, Any]) -> None:
    """Raise InvalidArgument for a dict of modules, optimizers and the like, such as torch's "app state"."""
    live = {name: value for name, value in state.items() if callable(getattr(value, "load_state_dict", None))}
    if live:
        kinds = ", ".join(f"{name!r}: {type(value).__name__}" for name, value in list(live.items())[:4])
        raise InvalidArgument(
            f"model= is a dict of live objects ({kinds}), expected a module or its state_dict(): pass them as model=, "
            "optimizer= and scheduler=, several models as one torch.nn.ModuleDict, and anything else by its "
            "state_dict() in user_content="
        )


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
