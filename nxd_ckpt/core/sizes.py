"""Sizes of a model, from Hugging Face's config.json and from its training. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_ckpt.core.heads import Heads
from nxd_ckpt.errors import InvalidArgument

CONFIG_KEYS: Mapping[str, tuple[str, ...]] = {
    "layer": ("num_hidden_layers",),
    "expert": ("num_local_experts", "num_experts"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim",),
    "hidden": ("hidden_size",),
    "vocab": ("vocab_size",),
}
"""Keys of each size in config.json; the first one that is there counts.

A mapping may have other keys; ``ffn.experts`` is ``experts`` inside of ``ffn``.
"""


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model, for the rules of a mapping.

    Attributes:
        config: Hugging Face's config.json.
        kv_size_multiplier: how often NxD keeps each key-value head.
        hardware: "trn1" or "trn2", which decides the order of those copies.
        keys: keys in config.json that differ from `CONFIG_KEYS`.
        converted: True if NxD's converter wrote the heads, whose order for trn2 differs.
        heads_of: query heads are padded to a multiple of this.
    """

    config: Mapping[str, Any]
    kv_size_multiplier: int = 1
    hardware: str = "trn1"
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    converted: bool = False
    heads_of: int = 1

    def find(self, name: str) -> int | None:
        """Return the size of this name, or None if config.json does not have it.

        Raises:
            InvalidArgument: the value is no size.
        """
        keys = self.keys.get(name) or CONFIG_KEYS.get(name, ())
        values = ((key, self._config_value(key)) for key in keys)
        key, value = next((pair for pair in values if pair[1] is not None), (None, None))
        if value is None and name == "head_dim":
            return self._divided_head_dim()
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidArgument(f"config.json: {key} must be a positive integer, found {value!r}")
        return value

    def _config_value(self, key: str) -> Any:
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def key(self, name: str) -> str:
        """Return the keys of a size in config.json, for error messages."""
        return " or ".join(self.keys.get(name) or CONFIG_KEYS.get(name, (name,)))

    def get(self, name: str) -> int:
        """Return the size of this name. Raises InvalidArgument if config.json does not have it."""
        value = self.find(name)
        if value is None:
            raise InvalidArgument(
                f"config.json has no {self.key(name)}, which the mapping needs; pass the config.json of this model"
            )
        return value

    def attention(self) -> Heads:
        """Return the heads of its attention layers. Raises InvalidArgument for counts that do not divide."""
        counts = (self.get("heads"), self.get("kv_heads"), self.get("head_dim"))
        padded = counts[0] + -counts[0] % self.heads_of
        return Heads(*counts, self.kv_size_multiplier, self.hardware, self.converted, padded)

    def _divided_head_dim(self) -> int | None:
        hidden, heads = self.find("hidden"), self.find("heads")
        if hidden is None or heads is None:
            return None
        if hidden % heads:
            raise InvalidArgument(f"config.json: hidden_size {hidden} cannot be divided among {heads} heads")
        return hidden // heads
