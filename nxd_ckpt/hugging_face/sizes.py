"""Sizes of a model, from Hugging Face's config.json and from its training. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from nxd_ckpt.core.heads import Hardware, Heads
from nxd_ckpt.core.limits import MODEL_TENSORS
from nxd_ckpt.core.name_patterns import Numbers, Pattern
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


def checked_count(count: int, what: str) -> int:
    """Return ``count``; raise InvalidArgument if no model can have so many tensors."""
    if count > MODEL_TENSORS:
        raise InvalidArgument(f"config.json describes {count} tensors with {what}; at most {MODEL_TENSORS} are allowed")
    return count


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model, for the rules of a mapping.

    Attributes:
        config: Hugging Face's config.json.
        kv_size_multiplier: how often NxD keeps each key-value head.
        hardware: decides the order of those copies.
        keys: keys in config.json that differ from `CONFIG_KEYS`.
        converted: True if NxD's converter wrote the heads, whose order for trn2 differs.
        heads_of: query heads are padded to a multiple of this.
    """

    config: Mapping[str, Any]
    kv_size_multiplier: int = 1
    hardware: Hardware = "trn1"
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    converted: bool = False
    heads_of: int = 1

    def find(self, name: str) -> int | None:
        """Return the size of this name, or of this key; None if config.json does not have it.

        Raises:
            InvalidArgument: the value is no size.
        """
        keys = self.keys.get(name) or CONFIG_KEYS.get(name, (name,))
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

    def stack(self, placeholder: str | None, numbers: Numbers) -> list[Numbers]:
        """Return ``numbers`` with each value of the placeholder, or alone without one. Raises InvalidArgument."""
        if placeholder is None:
            return [numbers]
        return [{**numbers, placeholder: index} for index in range(checked_count(self.get(placeholder), placeholder))]

    def length(self, terms: str) -> int | None:
        """Return a sum of products of sizes and numbers, such as ``2 * heads * head_dim``; None if a size is missing.

        Raises InvalidArgument like `find`.
        """
        products = [[factor.strip() for factor in term.split("*")] for term in terms.split("+")]
        values = [[int(each) if each.isdigit() else self.find(each) for each in factors] for factors in products]
        if any(None in factors for factors in values):
            return None
        return sum(prod(value or 0 for value in factors) for factors in values)

    def attention(self) -> Heads:
        """Return the heads of its attention layers. Raises InvalidArgument for counts that do not divide."""
        counts = (self.get("heads"), self.get("kv_heads"), self.get("head_dim"))
        padded = counts[0] + -counts[0] % self.heads_of
        return Heads(*counts, self.kv_size_multiplier, self.hardware, self.converted, padded)

    def _divided_head_dim(self) -> int | None:
        hidden = self.find("hidden")
        heads = self.find("heads")
        if hidden is None or heads is None:
            return None
        if hidden % heads:
            raise InvalidArgument(f"config.json: hidden_size {hidden} cannot be divided among {heads} heads")
        return hidden // heads


@dataclass(frozen=True)
class LayerKind:
    """The layers for which all of the conditions hold, and the tensors by which they differ from others.

    Attributes:
        start: key in config.json of the first of these layers.
        every: key of a number that divides the layer's number, counted from 1.
        excluded: key of a list of other layers.
        listed: key of a list of exactly these layers, which replaces the conditions above where config.json has it.
        layer_type: entry of the layer in ``layer_types``, which replaces ``every`` where config.json has it.
        option: key that is set in config.json, for all layers or none.
        tensors: beginnings of the names of Hugging Face tensors that only these layers have.
        others: beginnings of the names of those that only other layers have.
    """

    tensors: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    start: str | None = None
    every: str | None = None
    excluded: str | None = None
    listed: str | None = None
    layer_type: str | None = None
    option: str | None = None

    def side(self, pattern: str) -> bool | None:
        """Return True for a tensor of these layers, False for one of other layers, None for one of all."""
        return True if pattern.startswith(self.tensors) else False if pattern.startswith(self.others) else None

    def includes(self, layer: int, sizes: Sizes) -> bool:
        """Return whether this is such a layer. Raises InvalidArgument for conditions that config.json cannot have."""
        if self.option is not None and not sizes.config.get(self.option):
            return False
        listed = None if self.listed is None else _numbers(self.listed, sizes)
        if listed is not None:
            return layer in listed
        if self.layer_type is not None and (self.every is None or sizes.config.get("layer_types") is not None):
            return _type_of(layer, sizes) == self.layer_type
        if self.start is not None and layer < _number(self.start, sizes, 0):
            return False
        if self.every is not None and (layer + 1) % _number(self.every, sizes, 1, least=1):
            return False
        return self.excluded is None or layer not in (_numbers(self.excluded, sizes) or ())

    @property
    def keys(self) -> str:
        """The keys in config.json that decide, for error messages."""
        keys = [self.start, self.every, self.excluded, self.listed, self.option]
        return " and ".join(key for key in [*keys, self.layer_type and "layer_types"] if key)


@dataclass(frozen=True)
class ModelOption:
    """Hugging Face tensors, such as biases, that a model has if config.json sets ``key``, and only then.

    ``default`` is the value where config.json has none.
    """

    key: str
    tensors: tuple[Pattern, ...]
    default: bool = False

    def is_set(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get(self.key, self.default))

    def text(self, config: Mapping[str, Any]) -> str:
        """Return the key and its value, for error messages."""
        return f"{self.key} {config[self.key]!r}" if self.key in config else f"no {self.key}, so {self.default}"


def _number(key: str, sizes: Sizes, default: int, least: int = 0) -> int:
    value: Any = sizes.config.get(key)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise InvalidArgument(f"config.json: {key} must be an integer of at least {least}, found {value!r}")
    return value


def _numbers(key: str, sizes: Sizes) -> list[int] | None:
    value: Any = sizes.config.get(key)
    if value is not None and (not isinstance(value, list) or any(type(each) is not int for each in value)):
        raise InvalidArgument(f"config.json: {key} must be a list of layers' numbers, found {value!r}")
    return None if value is None else list(value)


def _type_of(layer: int, sizes: Sizes) -> str:
    types = sizes.config.get("layer_types")
    layers = sizes.find("layer")
    if not isinstance(types, list) or len(types) != layers:
        raise InvalidArgument(
            f"config.json: layer_types must be a list with an entry for each of {layers} layers, found {types!r}"
        )
    return str(types[layer]) if layer < len(types) else ""
