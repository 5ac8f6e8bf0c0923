"""Several models by name, such as a generator and a discriminator, as one model whose names begin with theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from nxd_ckpt.core.partition import Partition
from nxd_ckpt.errors import UnsupportedState
from nxd_ckpt.live.lora import LoraAdapter
from nxd_ckpt.live.model import ModelAdapter

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

    def partitions(self, tp: int) -> dict[str, Partition]:
        return self._joined(lambda adapter: adapter.partitions(tp))

    def base_names(self) -> dict[str, str]:
        return self._renamed(lambda adapter: adapter.base_names())

    def former_names(self) -> dict[str, str]:
        return self._renamed(lambda adapter: adapter.former_names())

    def attributed(self, name: str) -> torch.Tensor:
        adapter, own = self._at(name)
        return super().attributed(name) if adapter is None else adapter.attributed(own)

    def shared_heads(self, tp: int) -> dict[str, Partition | None]:
        return self._joined(lambda adapter: adapter.shared_heads(tp))

    def parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, adapter in self._adapters.items():
            for parameter, own in adapter.parameter_names().items():
                names.setdefault(parameter, f"{name}.{own}")
        return names

    def validate(
        self, saved: Mapping[str, Any], strict: bool, ignores: Callable[[str], bool] | None = None
    ) -> list[str]:
        names = super().validate(saved, strict, ignores)
        missing, unexpected = (self._apart(dict.fromkeys(names)) for names in self.incompatible)
        for name, adapter in self._adapters.items():
            adapter.incompatible = list(missing[name]), list(unexpected[name])
        return names

    def owns(self, name: str) -> bool:
        adapter, own = self._at(name)
        return adapter is not None and adapter.owns(own)

    def takes_any(self, name: str) -> bool:
        adapter, own = self._at(name)
        return adapter is not None and adapter.takes_any(own)

    def require_loadable(self, names: Iterable[str]) -> None:
        for name, own in self._apart(dict.fromkeys(names)).items():
            self._adapters[name].require_loadable(own)

    def load_own(self, values: dict[str, Any], strict: bool) -> None:
        for name, own in self._apart(values).items():
            self._adapters[name].load_own(own, strict)

    def after_load(self) -> None:
        for adapter in self._adapters.values():
            adapter.after_load()

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
