"""Choice of the adapter for a live model; several models as one whose names begin with theirs; NxD's LoRA models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, TypeVar

import torch

from nxd_ckpt.core.limits import is_text
from nxd_ckpt.core.parameter_names import BASE_LAYER, CONFIG, is_adapter, without_base_layer
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import InvalidArgument, UnsupportedState
from nxd_ckpt.live.load_hooks import has_module_of
from nxd_ckpt.live.model import DictModel, ModelAdapter, ModuleModel
from nxd_ckpt.live.named import by_name, is_model

_ValueT = TypeVar("_ValueT")


class NamedModels(ModelAdapter):
    """The ModelAdapter of several: the weight ``up`` of the model ``critic`` is called ``critic.up``.

    A tensor that two of them share is tied, as within one model.
    """

    def __init__(self, adapters: Mapping[str, ModelAdapter], may_be_meta: bool = False) -> None:
        """Raise UnsupportedState for NxD's LoRA models, whose settings are those of a whole tag."""
        lora = next((name for name, adapter in adapters.items() if isinstance(adapter, LoraAdapter)), None)
        if lora is not None:
            raise UnsupportedState(
                f"model[{lora!r}] is a LoraModel of NxD, which is saved and loaded alone: save it under a directory of "
                "its own, or pass the others' state_dict() in user_content="
            )
        self._adapters = adapters
        self.is_of_rank: bool = any(adapter.is_of_rank for adapter in adapters.values())
        for name, adapter in adapters.items():
            adapter.path = f"model/{name}."
        super().__init__(self._joined(lambda adapter: adapter.live), may_be_meta)

    def _joined(self, values: Callable[[ModelAdapter], Mapping[str, _ValueT]]) -> dict[str, _ValueT]:
        """Return the ``values`` of all models, by their names here."""
        return {
            f"{name}.{own}": value for name, adapter in self._adapters.items() for own, value in values(adapter).items()
        }

    def _renamed(self, names: Callable[[ModelAdapter], Mapping[str, str]]) -> dict[str, str]:
        """Return a mapping of names to names of all models, both by their names here."""
        return {
            f"{name}.{own}": f"{name}.{other}"
            for name, adapter in self._adapters.items()
            for own, other in names(adapter).items()
        }

    def _apart(self, values: Mapping[str, _ValueT]) -> dict[str, dict[str, _ValueT]]:
        """Return ``values`` by model, each by the model's own names; not those of no model."""
        apart: dict[str, dict[str, _ValueT]] = defaultdict(dict)
        for joined, value in values.items():
            name, _, own = joined.partition(".")
            if name in self._adapters:
                apart[name][own] = value
        return apart

    def _at(self, joined: str) -> tuple[ModelAdapter | None, str]:
        """Return the model of a name, None if there is none, and the model's own name."""
        name, _, own = joined.partition(".")
        return self._adapters.get(name), own

    def base_names(self) -> dict[str, str]:
        return self._renamed(lambda adapter: adapter.base_names())

    def former_names(self) -> dict[str, str]:
        return self._renamed(lambda adapter: adapter.former_names())

    def attributed(self, name: str) -> torch.Tensor:
        adapter, own = self._at(name)
        return super().attributed(name) if adapter is None else adapter.attributed(own)

    def broadcast_ranks(self) -> dict[str, tuple[int, ...]]:
        return self._joined(lambda adapter: adapter.broadcast_ranks())

    def layer_cuts(self, tp: int) -> dict[str, Partition | None]:
        return self._joined(lambda adapter: adapter.layer_cuts(tp))

    def parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, adapter in self._adapters.items():
            for parameter, own in adapter.parameter_names().items():
                names.setdefault(parameter, f"{name}.{own}")
        return names

    def owns(self, name: str) -> bool:
        adapter, own = self._at(name)
        return adapter is not None and adapter.owns(own)

    def passes_user_code(self, name: str) -> bool:
        adapter, own = self._at(name)
        return adapter is not None and adapter.passes_user_code(own)

    def takes_any(self, name: str) -> bool:
        adapter, own = self._at(name)
        return adapter is not None and adapter.takes_any(own)

    def require_loadable(self, names: Iterable[str]) -> None:
        for name, own in self._apart(dict.fromkeys(names)).items():
            self._adapters[name].require_loadable(own)

    def load_own(self, values: dict[str, Any], strict: bool) -> None:
        for name, own in self._apart(values).items():
            self._adapters[name].load_own(own, strict)

    def after_load(self, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
        missing_of, unexpected_of = (self._apart(dict.fromkeys(names)) for names in (missing, unexpected))
        for name, adapter in self._adapters.items():
            adapter.after_load(missing_of[name], unexpected_of[name])

    def assign(self, name: str, value: Any) -> None:
        adapter, own = self._at(name)
        if adapter is not None:
            adapter.assign(own, value)

    def on_meta(self) -> dict[int, str]:
        return {
            tensor: f"{name}.{own}"
            for name, adapter in self._adapters.items()
            for tensor, own in adapter.on_meta().items()
        }

    def check_writable(self, name: str) -> None:
        adapter, own = self._at(name)
        if adapter is not None:
            adapter.check_writable(own)


_SCALING = ("lora_rank", "lora_alpha", "use_rslora")
"""Options that determine the factor of adapters."""


def is_lora(model: Any) -> bool:
    """Return whether ``model`` is NxD's ``LoraModel``."""
    return "lora_config" in vars(model) and callable(getattr(model, "get_base_model", None))


class LoraAdapter(ModuleModel):
    """NxD's ``LoraModel`` as its base model, with adapters, under the base model's names.

    Its ``state_dict()`` is not called: it gathers adapters over tensor-parallel ranks on the device, merges weights and
    writes a file, by the options of its configuration. The same options say which tensors a save keeps; each rank keeps
    its own part of them. ``docs/decisions/017-lora.md`` says more.
    """

    def __init__(self, lora: Any, may_be_meta: bool = False) -> None:
        super().__init__(lora.get_base_model(), may_be_meta)
        self._lora = lora
        self._config = lora.lora_config

    def kept(self) -> dict[str, str]:
        if not self._saves_base:
            return {name: name for name in self._trained}
        if not self._merges:
            self._refuse_merged("saving")
            return super().kept()
        self._lora.merge_lora()  # as NxD does; the next forward pass undoes it
        return {without_base_layer(name): name for name in self.live if not is_adapter(name)}

    def notes(self) -> dict[str, Any]:
        if self._merges and self._saves_base and not self._config.save_lora_config_adapter:
            return {}
        return {CONFIG: self._settings}

    def base_names(self) -> dict[str, str]:
        return {name: without_base_layer(name) for name in self.live if BASE_LAYER in name}

    def expected(self, saved: Collection[str]) -> Iterable[str]:
        """Return all names, or, for a tag without the base, those of trained tensors."""
        return self.live if any(name in self.live and name not in self._trained for name in saved) else self._trained

    def missing(self, saved: Collection[str]) -> list[str]:
        self._refuse_merged("loading")
        return super().missing(saved)

    def takes(self, name: str) -> bool:
        return name == CONFIG or super().takes(name)

    def validate(self, saved: Mapping[str, Any]) -> list[str]:
        self._compare(saved.get(CONFIG))
        return super().validate({name: leaf for name, leaf in saved.items() if name != CONFIG})

    @cached_property
    def _trained(self) -> dict[str, Any]:
        """The tensors of ``state_dict()`` without the base: adapters, and others that the configuration trains."""
        modules = tuple(self._config.modules_to_save or ())
        all_biases = self._config.bias == "all"

        def is_trained(name: str, value: Any) -> bool:
            named = is_adapter(name) or any(key in name for key in modules) or (all_biases and "bias" in name)
            return named or (isinstance(value, torch.nn.Parameter) and value.requires_grad)

        return {name: value for name, value in self.live.items() if is_trained(name, value)}

    @property
    def _saves_base(self) -> bool:
        if self._is_stage:  # NxD then saves what local_state_dict() gives
            return True
        return bool(self._config.save_lora_base) and not getattr(self._config, "merge_sharded_lora", False)

    @property
    def _merges(self) -> bool:
        return bool(self._config.merge_lora) and not self._is_stage

    @property
    def _settings(self) -> dict[str, Any]:
        selected = getattr(self._config, "selected_fields_to_save", None)
        settings = selected() if selected is not None else asdict(self._config)
        return {key: list(value) if isinstance(value, set) else value for key, value in settings.items()}

    def _compare(self, saved: Any) -> None:
        """Warn if the saved adapters had another scaling than the live ones."""
        if isinstance(saved, Mapping):
            changed = [key for key in _SCALING if key in saved and saved[key] != getattr(self._config, key, saved[key])]
            for key in changed:
                logger.warning(
                    "the adapters were saved with %s=%s, the live LoraConfig has %s: they will have another effect",
                    key, saved[key], getattr(self._config, key),
                )  # fmt: skip

    def _refuse_merged(self, what: str) -> None:
        if self._lora.is_lora_merged:
            raise UnsupportedState(
                f"model: the LoRA adapters are merged into the base weights, and would count twice after {what}; call "
                "the LoRA model's unmerge_lora() first"
            )


def open_model(model: Any, *, may_be_meta: bool = False) -> ModelAdapter:
    """Return the adapter of ``model`` for one save or one load: a module, an NxD wrapper, or a dict of tensors.

    Or a dict of several modules by name.

    With ``may_be_meta``, for a load that calls `ModelAdapter.materialize`, tensors may be on the meta device. Raises
    InvalidArgument for anything else, and for a key of a state dict that is no name.
    """
    adapter = _opened(model, may_be_meta)
    wrong = [name for name in adapter.live if not isinstance(name, str) or not (name.isascii() or is_text(name))]
    if wrong:
        raise InvalidArgument(
            f"model=: {wrong[0]!r} ({type(wrong[0]).__name__}) cannot be the name of a tensor: the keys of a state "
            "dict must be strings, in whole characters"
        )
    return adapter


def _opened(model: Any, may_be_meta: bool) -> ModelAdapter:
    several = by_name(model, "model")
    if several is not None:
        adapters = {name: open_model(one, may_be_meta=may_be_meta) for name, one in several.items()}
        return NamedModels(adapters, may_be_meta)
    if isinstance(model, dict):
        return DictModel(model, may_be_meta)
    is_one = callable(getattr(model, "state_dict", None)) and (hasattr(model, "modules") or is_model(model))
    if isinstance(model, type) or not is_one:
        kind = f"the class {model.__name__} itself" if isinstance(model, type) else f"a {type(model).__name__}"
        is_list = isinstance(model, (list, tuple)) and bool(model)
        advice = "; pass several by name, model={name: model}" if is_list else ""
        raise InvalidArgument(f"model= must be a torch.nn.Module, an NxD model or a state dict, found {kind}{advice}")
    model = _unwrapped(model)
    if has_module_of(model, "torch.distributed.fsdp.", "FullyShardedDataParallel"):
        raise UnsupportedState(
            "model: it is wrapped by FullyShardedDataParallel (FSDP1), whose flat parameters only that class can take "
            "apart: use fully_shard (FSDP2), which is saved as it is, or pass the result of its state_dict() and "
            "optim_state_dict() under FSDP's state_dict_type, as model= and user_content="
        )
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
