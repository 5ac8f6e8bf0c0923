"""The trees of a tag that were read last, so that ranks which are planned one after the other parse none anew."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from nxd_ckpt.formats.tensors import Assembly, TensorStub, iter_tensors
from nxd_ckpt.tag.files import MissingTensor

Tree = dict[str, Any]

_LIMIT = 2**16
"""Tensors in all the trees that are kept: about 40 MB of what is known of them."""


class TreeCache:
    """The trees that were asked for last, of ``limit`` tensors together, or a single larger one.

    A view that asks many trees for each of its tensors holds them itself: they may be more than are kept here.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit, self._count = limit, 0
        self._trees: dict[Hashable, tuple[dict[str, Any], int]] = {}  # the one that was asked for last comes last

    def get(self, key: Hashable, read: Callable[[], Tree]) -> Tree:
        """The tree of that key, which ``read`` makes where it is not kept. It is shared: nobody may change it."""
        kept = self._trees.pop(key, None)
        if kept is None:
            tree = read()
            kept = tree, sum(1 for _ in iter_tensors(tree, (TensorStub, Assembly, MissingTensor)))
            self._count += kept[1]
        self._trees[key] = kept
        while self._count > self._limit and len(self._trees) > 1:
            self._count -= self._trees.pop(next(iter(self._trees)))[1]
        return kept[0]
