"""A tag as torch DCP's flat state dict: global tensors and values by DCP's names.

Optimizer state that belongs to no parameter has no name in DCP, and is left out. An optimizer's ``step`` is a tensor in
DCP, as in torch's optimizers; NxD's Python number becomes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from nxd_ckpt.core.dcp_names import SCHEDULER, USER_CONTENT, DcpEntry, DcpNames, DcpPart, Path
from nxd_ckpt.errors import KeyMismatch
from nxd_ckpt.formats.optimizer_trees import STEP
from nxd_ckpt.formats.tensors import Assembly, dtype_name, map_tensors, nbytes_of
from nxd_ckpt.reshard.whole_tag import WholeTag
from nxd_ckpt.tag.opened import OpenTag

_PARTS = {DcpPart.MODEL: "model", DcpPart.STATE: "optim", DcpPart.OPTION: "optim", DcpPart.SCHEDULER: SCHEDULER}


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the state dict: its dtype (torch's name), whole shape, and the keys that lead to it.

    ``source`` is its name in the tag, or the tensor itself if it is a small one that no rank cut.
    """

    dtype: str
    shape: tuple[int, ...]
    path: Path
    source: str | torch.Tensor

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


class DcpState:
    """The flat state dict of ``tag``. Reads trees, no tensor of model or optimizer."""

    def __init__(self, tag: WholeTag, names: DcpNames) -> None:
        self.opened: OpenTag = tag.opened
        self._tag = tag
        self._names = names

    @cached_property
    def tensors(self) -> dict[str, DcpTensor]:
        """Tensors whose whole shape is known, by name."""
        return {name: tensor for name, (_, tensor) in self._all.items() if isinstance(tensor, DcpTensor)}

    @cached_property
    def values(self) -> dict[str, tuple[Path, Any]]:
        """Values that are no tensors, by name, with the keys that lead to them."""
        return {name: item for name, item in self._all.items() if not isinstance(item[1], DcpTensor)}

    @property
    def unknown(self) -> list[str]:
        """Names in the tag of tensors that cannot be assembled, because their cut is not known."""
        return [tensor.name for tensor in self._tag.tensors.values() if tensor.shape is None]

    def leaf(self, name: str) -> Assembly | torch.Tensor:
        """Return the assembly of a tensor.

        Raises KeyMismatch for an unknown name, and the errors of `WholeTag.leaf`.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise KeyMismatch(f"{self.opened.where} has no tensor that torch DCP would call {name!r}")
        return Assembly.of(self._tag.leaf(tensor.source)) if isinstance(tensor.source, str) else tensor.source

    def source(self, name: str) -> str:
        """Return the name in the tag of a tensor; of anything else its part."""
        tensor = self.tensors.get(name)
        if tensor is not None and isinstance(tensor.source, str):
            return tensor.source
        path = self.values[name][0] if tensor is None else tensor.path
        return _PARTS.get(self._names.part_of(name, path, tensor is not None), USER_CONTENT)

    @cached_property
    def _all(self) -> dict[str, tuple[Path, Any]]:
        """All entries with paths, tensors as DcpTensor. Raises KeyMismatch if two entries have one name."""
        entries: dict[str, tuple[Path, Any]] = {}
        for entry, value in chain(self._global_tensors(), self._values()):
            if entry.name in entries:
                raise KeyMismatch(
                    f"{self.opened.where}: torch DCP joins keys by dots, so {entries[entry.name][0]} and {entry.path} "
                    f"would both be called {entry.name!r}; choose other keys for model and optimizer, or other names"
                )
            entries[entry.name] = entry.path, value
        return entries

    def _global_tensors(self) -> Iterator[tuple[DcpEntry, DcpTensor]]:
        for tensor in self._tag.tensors.values():
            if tensor.shape is not None and not self._tag.is_general(tensor.name):
                entry = self._names.entry(self._tag.path(tensor.name))
                yield entry, DcpTensor(tensor.dtype, tensor.shape, entry.path, tensor.name)

    def _values(self) -> Iterator[tuple[DcpEntry, Any]]:
        """Yield all entries but tensors of model and optimizer. Tensors inside of them are read."""
        for name, value in self._tag.values.items():
            if self._tag.is_general(name):
                continue
            path = self._tag.path(name)
            yield from _flat(self._names.entry(path).path, _as_torch(path, value))
        groups: Any = map_tensors(self._tag.param_groups, self.opened.read)
        yield from ((entry, _as_entry(entry, value)) for entry, value in self._names.group_entries(groups))
        if self.opened.parts.scheduler:
            yield from _flat((SCHEDULER,), self.opened.scheduler())
        if self.opened.parts.user_content:
            yield from self._content(self.opened.user_content())

    def _content(self, content: Any) -> Iterator[tuple[DcpEntry, Any]]:
        if self._names.content or not isinstance(content, dict):
            yield from _flat((self._names.content or USER_CONTENT,), content)
            return
        for key, value in content.items():
            yield from _flat((key,), value)


def _as_torch(path: Path, value: Any) -> Any:
    """Return an optimizer's count of steps as torch's optimizers hold it: as a tensor."""
    is_step = path[0] == "optim" and path[-1] == STEP
    return torch.tensor(float(value)) if is_step and isinstance(value, (int, float)) else value


def _as_entry(entry: DcpEntry, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return DcpTensor(dtype_name(value.dtype), tuple(value.shape), entry.path, value)
    return value


def _flat(path: Path, value: Any, above: tuple[int, ...] = ()) -> Iterator[tuple[DcpEntry, Any]]:
    """Yield the entries that torch flattens a value to.

    A dict whose keys are 0, 1, ... stays one entry: its paths would be those of a list.
    """
    above = (*above, id(value))
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict) and list(value) != list(range(len(value))):
        items = list(value.items())
    elif isinstance(value, list) and _is_split(value):
        items = list(enumerate(value))
    if not items or any(id(child) in above for _, child in items):  # a container that holds itself is pickled
        entry = DcpEntry(path)
        yield entry, _as_entry(entry, value)
        return
    for key, child in items:
        yield from _flat((*path, key), child, above)


def _is_split(value: list[Any], above: tuple[int, ...] = ()) -> bool:
    """Return whether torch flattens the list: it has a tensor or a dict in it, or in a list in it."""
    above = (*above, id(value))
    lists = (item for item in value if isinstance(item, list) and id(item) not in above)
    has_leaf = any(isinstance(item, (torch.Tensor, dict)) for item in value)
    return has_leaf or any(_is_split(inner, above) for inner in lists)
