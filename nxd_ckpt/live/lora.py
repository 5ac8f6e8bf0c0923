"""NxD's LoRA models: a frozen base, whose wrapped layers are called ".base_layer", and adapters.

``LoraModel.state_dict()`` is not called: it gathers adapters over tensor-parallel ranks on the device, merges weights
and writes a file, by the options of its configuration. The same options say which tensors a save keeps; each rank keeps
its own part of them. ``docs/decisions/017-lora.md`` says more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.live.model import ModuleModel
from nxd_ckpt.live.model_names import BASE_LAYER, CONFIG, base_of, is_adapter, without_base_layer
from nxd_ckpt.live.parameters import spec_of

logger = logging.getLogger("nxd_ckpt")

_SCALING = ("lora_rank", "lora_alpha", "use_rslora")
"""Options that determine the factor of adapters."""


def is_lora(model: Any) -> bool:
    """Return whether ``model`` is NxD's ``LoraModel``."""
    return "lora_config" in vars(model) and callable(getattr(model, "get_base_model", None))


class LoraAdapter(ModuleModel):
    """A ``LoraModel`` as its base model, with adapters, under the base model's names."""

    def __init__(self, lora: Any, may_be_meta: bool = False) -> None:
        super().__init__(lora.get_base_model(), may_be_meta)
        self._lora, self._config = lora, lora.lora_config

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

    def partitions(self, tp: int) -> dict[str, Partition]:
        """Cuts of parameters whose own attributes are wrong: an adapter's B is cut as its base layer.

        The output of B is added to that of the base layer on each rank. B's own attributes have no stride.
        """
        cuts = super().partitions(tp)
        for name, base in self._bases.items():
            spec = spec_of(base, tp)
            if spec.partition.partition_dim == 0 and spec.partition != spec_of(self.live[name], tp).partition:
                cuts[name] = spec.partition
        return cuts

    def base_names(self) -> dict[str, str]:
        return {name: without_base_layer(name) for name in self.live if BASE_LAYER in name}

    def expected(self, saved: Mapping[str, Any]) -> Iterable[str]:
        """Return all names, or, for a tag without the base, those of trained tensors."""
        return self.live if any(name in self.live and name not in self._trained for name in saved) else self._trained

    def validate(
        self, saved: Mapping[str, Any], strict: bool, ignores: Callable[[str], bool] | None = None
    ) -> list[str]:
        self._refuse_merged("loading")
        self._compare(saved.get(CONFIG))
        return super().validate({name: leaf for name, leaf in saved.items() if name != CONFIG}, strict, ignores)

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
    def _bases(self) -> dict[str, torch.Tensor]:
        """The weight of the base layer that each B is added to, by B's name."""
        bases = {name: self._tensors.get(base_of(name) or "") for name in self._tensors}
        return {name: base for name, base in bases.items() if base is not None}

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
