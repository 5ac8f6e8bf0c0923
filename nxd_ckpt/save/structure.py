"""Structure of a state tree: everything except its values. One plan serves all trees of one structure."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

_VALUES = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
"""Types whose values cannot change."""

_KEYS = frozenset({int, bool, str, bytes, type(None)})
"""Types of keys for which equal means identical, unlike 0.0 and -0.0."""


@dataclass(frozen=True)
class Structure:
    """A tree, decomposed.

    ``nodes`` are its containers with their keys and the types of its leaves, depth first; ``forms`` dtype, shape,
    device and kind of each tensor; ``repeats`` for each the number of the first tensor that is the same object. The
    rest are the ``tensors`` themselves, and ``values``, all others.
    """

    nodes: list[Any]
    forms: list[Any]
    repeats: list[int]
    tensors: list[torch.Tensor]
    values: bytes

    @property
    def likeness(self) -> Any:
        """Equal for trees that differ only in the values of tensors and other leaves. Holds no tensor."""
        return self.nodes, self.forms, self.repeats


def structure_of(tree: Any) -> Structure | None:
    """Return the structure; None if the tree holds objects that could change unnoticed, or one container twice."""
    walk = _Walk()
    try:
        walk.visit(tree)
    except _CannotTell:
        return None
    first: dict[int, int] = {}
    return Structure(
        walk.nodes,
        [(tensor.dtype, tensor.shape, tensor.device, tensor.layout, type(tensor)) for tensor in walk.tensors],
        [first.setdefault(id(tensor), number) for number, tensor in enumerate(walk.tensors)],
        walk.tensors,
        pickle.dumps(walk.values),
    )


class _CannotTell(Exception):
    pass


class _Walk:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.values: list[Any] = []
        self._seen: set[int] = set()

    def visit(self, node: Any) -> None:
        kind = type(node)
        if isinstance(node, torch.Tensor):
            self.nodes.append(torch.Tensor)
            self.tensors.append(node)
        elif kind in _VALUES:
            self.nodes.append(kind)
            self.values.append(node)
        elif kind is dict or kind is OrderedDict:
            self._enter(node)
            if not _KEYS.issuperset(map(type, node)):
                raise _CannotTell
            self.nodes.append((kind, tuple(node), tuple(map(type, node))))
            for child in node.values():
                self.visit(child)
        elif kind is list or kind is tuple:
            if kind is list:
                self._enter(node)
            self.nodes.append((kind, len(node)))
            for child in node:
                self.visit(child)
        else:
            raise _CannotTell

    def _enter(self, container: Any) -> None:
        if id(container) in self._seen:
            raise _CannotTell
        self._seen.add(id(container))
