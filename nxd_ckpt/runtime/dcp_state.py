"""A tag as the state dict that torch DCP keeps flat: global tensors and values, each by DCP's name.

An optimizer's ``step`` is a tensor there, as torch's optimizers have it: the Python number that NxD's keep becomes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.adapters.optimizer_state import STEP
from nxd_ckpt.core.dcp_names import SCHEDULER, USER_CONTENT, DcpEntry, DcpNames, Path
from nxd_ckpt.errors import KeyMismatch
from nxd_ckpt.formats.tensors import Assembly, dtype_name
from nxd_ckpt.runtime.opening import OpenTag
from nxd_ckpt.runtime.whole_tag import WholeTag


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the state dict: its dtype (torch's name), whole shape, and the keys that lead to it.

    ``source`` is its name in the tag, or the tensor itself where it is one of few elements that no rank cut.
    """

    dtype: str
    shape: tuple[int, ...]
    path: Path
    source: str | torch.Tensor


class DcpState:
    """The tag ``opened``, put together by ``tag``. Reads trees, no tensor of model or optimizer."""

    def __init__(self, opened: OpenTag, tag: WholeTag, names: DcpNames) -> None:
        self._opened, self._tag, self._names = opened, tag, names

    @cached_property
    def tensors(self) -> dict[str, DcpTensor]:
        """Every tensor whose whole shape is known, by name. Raises KeyMismatch where two have the same name."""
        found: dict[str, DcpTensor] = {}
        for tensor in self._tag.tensors.values():
            if tensor.shape is not None:
                entry = self._names.entry(tensor.name)
                _put(found, entry, DcpTensor(tensor.dtype, tensor.shape, entry.path, tensor.name))
        for entry, value in self._entries:
            if isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                _put(found, entry, DcpTensor(dtype_name(value.dtype), shape, entry.path, value))
        return found

    @cached_property
    def values(self) -> dict[str, tuple[Path, Any]]:
        """What is no tensor, by name, with the keys that lead to it."""
        return {
            entry.name: (entry.path, value) for entry, value in self._entries if not isinstance(value, torch.Tensor)
        }

    @property
    def unknown(self) -> list[str]:
        """Names in the tag of tensors that cannot be put together: how they are cut is not known."""
        return [tensor.name for tensor in self._tag.tensors.values() if tensor.shape is None]

    def leaf(self, name: str) -> Assembly | torch.Tensor:
        """What the tensor is made of. Raises KeyMismatch for an unknown name, and as WholeTag.leaf."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise KeyMismatch(f"{self._opened.where} has no tensor that torch DCP would call {name!r}")
        return Assembly.of(self._tag.leaf(tensor.source)) if isinstance(tensor.source, str) else tensor.source

    @cached_property
    def _entries(self) -> list[tuple[DcpEntry, Any]]:
        """All that is not a tensor of model or optimizer."""
        found = [(self._names.entry(name), _as_torch(name, value)) for name, value in self._tag.values.items()]
        found += self._names.group_entries(self._tag.param_groups)
        if self._opened.parts.scheduler:
            found += _flat((SCHEDULER,), self._opened.scheduler())
        if self._opened.parts.user_content:
            found += _flat((USER_CONTENT,), self._opened.user_content())
        return found


def _as_torch(name: str, value: Any) -> Any:
    """An optimizer's count of steps as torch's optimizers hold it."""
    is_step = name.startswith("optim/") and name.endswith(f"/{STEP}")
    return torch.tensor(float(value)) if is_step and isinstance(value, (int, float)) else value


def _flat(path: Path, value: Any) -> Iterator[tuple[DcpEntry, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flat((*path, key), child)
    else:
        yield DcpEntry.at(path), value


def _put(found: dict[str, DcpTensor], entry: DcpEntry, tensor: DcpTensor) -> None:
    if entry.name in found:
        raise KeyMismatch(
            f"two tensors would be called {entry.name!r} in torch DCP: {found[entry.name].source} and {tensor.source}; "
            "choose other keys for model and optimizer"
        )
    found[entry.name] = tensor
