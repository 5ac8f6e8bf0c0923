"""State trees of live objects, and copies of their containers, so that the tree of a save stays what it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nxd_ckpt.formats.state import State, StateTensor
from nxd_ckpt.formats.strides import Stride, stride_of, with_note
from nxd_ckpt.formats.tensors import Path, iter_tensors, map_tensors
from nxd_ckpt.live.dtensor import is_dtensor, local_of, placed_of, traits_of


@dataclass(frozen=True)
class LiveState:
    """A state ``tree`` of live containers and tensors, which changes as they do.

    ``describe`` describes one tensor, by its path; ``cache_key`` is what that depends on besides the tree. ``stride``
    returns the strides of a tensor that a load would make with others. ``of_rank`` are paths of what this rank alone
    has.
    """

    tree: dict[str, Any]
    describe: Callable[[Path, torch.Tensor], StateTensor]
    cache_key: Any
    stride: Callable[[Path, torch.Tensor], Stride | None]
    of_rank: frozenset[Path] = frozenset()

    def described(self, path: Path, tensor: torch.Tensor) -> StateTensor:
        """Return the description of a tensor, as `State` has it. Raises UnsupportedState as a save does."""
        about = self.describe(path, tensor)
        return about._replace(placed=placed_of(about.name, tensor)) if is_dtensor(tensor) else about

    def frozen(self) -> State:
        """Return the state as it is now."""
        frozen = Frozen(self.tree, self.stride)

        def described() -> dict[Path, StateTensor]:
            leaves = iter_tensors(frozen.tree, torch.Tensor)
            if not frozen.is_placed:
                return {path: self.describe(path, leaf) for path, leaf in leaves}
            return {path: frozen.placed(self.describe(path, frozen.live(leaf)), leaf) for path, leaf in leaves}

        cache_key = self.cache_key, frozen.cache_key()
        return State(frozen.tree, described, cache_key, frozen.is_placed, self.of_rank)


class Frozen:
    """A copy of the containers of ``tree``, which change during and after the copying of tensors.

    (An optimizer's Python ``step`` changes them.) DTensors are replaced by this rank's parts.
    """

    def __init__(self, tree: dict[str, Any], stride: Callable[[Path, torch.Tensor], Stride | None]) -> None:
        # One object for a tensor each time, so that sharing stays visible.
        self._locals: dict[int, torch.Tensor] = {}
        self._aliases: dict[int, torch.Tensor] = {}
        self._dtensors: dict[int, torch.Tensor] = {}
        leaves = ((path, self._local(leaf)) for path, leaf in iter_tensors(tree, torch.Tensor))
        self._strides = {id(leaf): own for path, leaf in leaves if (own := stride(path, leaf)) is not None}
        self.tree: dict[str, Any] = map_tensors(tree, self._freeze, torch.Tensor)

    @property
    def is_placed(self) -> bool:
        """True if there are DTensors in it."""
        return bool(self._dtensors)

    def cache_key(self) -> Any:
        """Return a key that is equal for equal mesh positions of its DTensors and equal noted strides."""
        strides = [stride_of(leaf) for _, leaf in iter_tensors(self.tree, torch.Tensor)] if self._strides else []
        return list(map(traits_of, self._dtensors.values())), strides

    def live(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return the DTensor of which a leaf of the tree is this rank's part; any other leaf unchanged."""
        return self._dtensors.get(id(leaf), leaf)

    def placed(self, about: StateTensor, leaf: torch.Tensor) -> StateTensor:
        """Return the leaf's description, with the position on its mesh if it is of a DTensor.

        Raises UnsupportedState for a DTensor that is not cut into boxes.
        """
        live = self._dtensors.get(id(leaf))
        return about if live is None else about._replace(placed=placed_of(about.name, live, leaf))

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(tensor):
            return tensor
        local = self._locals.get(id(tensor))
        if local is None:
            local = self._locals[id(tensor)] = local_of(tensor)
            self._dtensors[id(local)] = tensor
        return local

    def _freeze(self, tensor: torch.Tensor) -> torch.Tensor:
        local = self._local(tensor)
        stride = self._strides.get(id(local))
        if stride is None:
            return local.detach() if local.requires_grad else local
        alias = self._aliases.get(id(local))
        if alias is None:
            alias = self._aliases[id(local)] = with_note(local, stride)
            if local is not tensor:
                self._dtensors[id(alias)] = tensor
        return alias
