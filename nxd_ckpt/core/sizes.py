"""The sizes of a model, from Hugging Face's config.json and from how it is trained. Pure."""

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
"""Under which keys config.json has a size: the first that is there. A mapping may say otherwise, ``ffn.experts`` being
``experts`` inside of ``ffn``."""


@dataclass(frozen=True)
class Sizes:
    """What a mapping's rules need to know of one model.

    Attributes:
        config: Hugging Face's config.json.
        kv_size_multiplier: how often NxD keeps each key-value head.
        hardware: "trn1" or "trn2": the order of those copies.
        converted: NxD's converter wrote them, in an order of its own for trn2.
        heads_of: query heads are padded to a multiple of this.
        keys: as :data:`CONFIG_KEYS`, where it differs.
    """

    config: Mapping[str, Any]
    kv_size_multiplier: int = 1
    hardware: str = "trn1"
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    converted: bool = False
    heads_of: int = 1

    def find(self, name: str) -> int | None:
        """The size of that name, or None where config.json does not say.

        Raises:
            InvalidArgument: it says something that is no size.
        """
        keys = self.keys.get(name) or CONFIG_KEYS.get(name, ())
        key, value = next(((key, found) for key in keys if (found := self._said(key)) is not None), (None, None))
        if value is None and name == "head_dim":
            return self._divided_head_dim()
        if value is not None and (type(value) is not int or value < 1):
            raise InvalidArgument(f"config.json: {key} must be a positive integer, found {value!r}")
        return value

    def _said(self, key: str) -> Any:
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def key(self, name: str) -> str:
        """Under which keys config.json has a size, for errors."""
        return " or ".join(self.keys.get(name) or CONFIG_KEYS.get(name, (name,)))

    def get(self, name: str) -> int:
        """As :meth:`find`; raises InvalidArgument where config.json does not say."""
        value = self.find(name)
        if value is None:
            raise InvalidArgument(
                f"config.json does not say {self.key(name)}, which the mapping needs; pass that of this model"
            )
        return value

    def attention(self) -> Heads:
        """The heads of its attention layers. Raises InvalidArgument for counts that do not divide."""
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
