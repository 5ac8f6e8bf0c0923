"""Names in NxD's LoRA models.

A wrapped layer ``q_proj`` becomes the base's ``q_proj.base_layer`` and the adapter's ``q_proj.lora_A`` (rank, inputs)
and ``q_proj.lora_B`` (outputs, rank).
"""

from __future__ import annotations

BASE_LAYER = ".base_layer"

CONFIG = "lora_config"
"""Key of the configuration in a state dict."""

_MARK = "lora_"
_B = ".lora_B."


def is_adapter(name: str) -> bool:
    """Return whether the name is an adapter's."""
    return _MARK in name


def is_key_or_value(name: str) -> bool:
    """Return whether it is a B of grouped-query attention's keys or values, of which several ranks may have copies."""
    return name.rpartition(".")[0].endswith(_B.rstrip(".")) and name.endswith(("_k", "_v"))


def without_base_layer(name: str) -> str:
    """Return a tensor's name before its layer was wrapped."""
    return name.replace(BASE_LAYER, "")


def base_of(name: str) -> str | None:
    """Return the name of the weight that this ``lora_B`` is added to; None for other names."""
    layer, mark, weight = name.rpartition(_B)
    return f"{layer}{BASE_LAYER}.{weight}" if mark else None
