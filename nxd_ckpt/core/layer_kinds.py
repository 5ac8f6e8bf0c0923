"""Kinds of layers in one model, by config.json: which of them have experts, which attend in another way. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nxd_ckpt.core.sizes import Sizes
from nxd_ckpt.errors import InvalidArgument


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
    types, layers = sizes.config.get("layer_types"), sizes.find("layer")
    if not isinstance(types, list) or len(types) != layers:
        raise InvalidArgument(
            f"config.json: layer_types must be a list with an entry for each of {layers} layers, found {types!r}"
        )
    return str(types[layer]) if layer < len(types) else ""
