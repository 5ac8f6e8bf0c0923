"""PEFT's files for the adapters of a tag: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from nxd_ckpt.core import document
from nxd_ckpt.core.topology import Coordinates
from nxd_ckpt.errors import PartNotFound, UnsupportedState
from nxd_ckpt.hugging_face.adapter_mapping import PREFIX
from nxd_ckpt.live.lora_names import CONFIG, is_adapter
from nxd_ckpt.output.model_files import ModelFile
from nxd_ckpt.tag.foreign.recognise import ADAPTER_SHARDS
from nxd_ckpt.tag.opened import OpenTag

ADAPTER_MODEL = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_PEFT_TYPE = "peft_type"
_AS_IN_NXD = ("lora_alpha", "lora_dropout", "bias", "use_rslora")


def settings_of(opened: OpenTag) -> Mapping[str, Any] | None:
    """Return NxD's ``LoraConfig`` of the adapters in the tag, or PEFT's config beside optimum-neuron's adapter tag.

    None for a tag without adapters. Raises PartNotFound for adapters without either: their factor is not known.
    """
    if not opened.parts.model or not any(map(is_adapter, opened.model_names())):
        return None
    for stage in range(opened.topology.pp):
        config = opened.model_tree(Coordinates(stage)).get(CONFIG)
        if isinstance(config, Mapping):
            return config
    # Beside other tags it may belong to any adapter.
    if opened.tag == ADAPTER_SHARDS and opened.storage.is_file(_ADAPTER_CONFIG):
        return _peft_config(opened)
    raise PartNotFound(
        f"{opened.where} holds LoRA adapters, but not the factor that they are multiplied by: neuronx_distributed "
        f"keeps it only in tags with save_lora_config_adapter=True, optimum-neuron in {_ADAPTER_CONFIG} beside the "
        "shards; restore that file, or load this tag into the live model, and save that with nxd_ckpt"
    )


def _peft_config(opened: OpenTag) -> Mapping[str, Any]:
    where = f"{opened.storage.url}/{_ADAPTER_CONFIG}"
    config = document.small(opened.storage.read(_ADAPTER_CONFIG), where)
    if config.get(_PEFT_TYPE) != "LORA":
        raise UnsupportedState(f"{where} has {_PEFT_TYPE}={config.get(_PEFT_TYPE)!r}; only LORA adapters are supported")
    return config


def adapter_config(settings: Mapping[str, Any], names: Iterable[str], base_model: Any) -> ModelFile:
    """Return PEFT's adapter_config.json, for adapters with these ``names`` in its file."""
    if _PEFT_TYPE in settings:  # already PEFT's config
        return ModelFile(_ADAPTER_CONFIG, _as_file(settings))
    names = [name.removeprefix(PREFIX) for name in names]
    layers = dict.fromkeys(name.partition(".lora_")[0] for name in names if is_adapter(name))
    others = dict.fromkeys(
        name.rpartition(".")[0] for name in names if not is_adapter(name) and not name.endswith(".bias")
    )
    config = {
        _PEFT_TYPE: "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": settings.get("lora_rank", settings.get("r")),
        **{key: settings[key] for key in _AS_IN_NXD if key in settings},
        "target_modules": list(layers),
        "modules_to_save": list(others) or None,
    }
    return ModelFile(_ADAPTER_CONFIG, _as_file(config))


def _as_file(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=2).encode() + b"\n"
