"""What NxD's LoRA models call things. Pure.

A wrapped layer ``q_proj`` is the base's ``q_proj.base_layer`` and the adapter's ``q_proj.lora_A`` (rank, inputs) and
``q_proj.lora_B`` (outputs, rank).
"""

from __future__ import annotations

BASE_LAYER = ".base_layer"

CONFIG = "lora_config"
"""The key of a state dict under which the configuration is."""

_MARK = "lora_"
_B = ".lora_B."


def is_adapter(name: str) -> bool:
    """Whether it is of an adapter."""
    return _MARK in name


def is_key_or_value(name: str) -> bool:
    """True for a B of a grouped-query attention's keys or values, of which several ranks may keep copies."""
    return name.rpartition(".")[0].endswith(_B.rstrip(".")) and name.endswith(("_k", "_v"))


def without_base_layer(name: str) -> str:
    """What a tensor was called before its layer was wrapped."""
    return name.replace(BASE_LAYER, "")


def base_of(name: str) -> str | None:
    """The weight that the ``lora_B`` of this name is added to; None of other names."""
    layer, found, weight = name.rpartition(_B)
    return f"{layer}{BASE_LAYER}.{weight}" if found else None
