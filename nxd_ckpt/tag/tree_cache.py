"""Trees of a tag that are used again soon, such as those of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from nxd_ckpt.formats.tensors import Assembly, TensorStub, iter_tensors
from nxd_ckpt.layouts.files import MissingTensor

Tree = dict[str, Any]

_LIMIT = 2**16
"""Maximum number of tensors in all cached trees: about 40 MB."""


class TreeCache:
    """The trees that were used last, of `_LIMIT` tensors together, or a single larger one.

    A view that uses many trees for each of its tensors holds them itself: they may be more than the cache keeps.
    """

    def __init__(self) -> None:
        self._count = 0
        self._trees: dict[Hashable, tuple[dict[str, Any], int]] = {}  # in order of last use

    def get(self, key: Hashable, read: Callable[[], Tree]) -> Tree:
        """Return the tree of that key; ``read`` makes it if it is not cached. It is shared: nobody may change it."""
        cached = self._trees.pop(key, None)
        if cached is None:
            tree = read()
            cached = tree, sum(1 for _ in iter_tensors(tree, (TensorStub, Assembly, MissingTensor)))
            self._count += cached[1]
        self._trees[key] = cached
        while self._count > _LIMIT and len(self._trees) > 1:
            self._count -= self._trees.pop(next(iter(self._trees)))[1]
        return cached[0]
