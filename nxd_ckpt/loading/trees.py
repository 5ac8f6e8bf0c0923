"""Result of planning a load: the live objects, and the saved trees that fit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nxd_ckpt.core.mesh import Mesh, Placed
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS, MASTER_WEIGHTS, MASTERS
from nxd_ckpt.formats.strides import dense, stride_of, with_stride
from nxd_ckpt.formats.tensors import Assembly, Fragment, Path, TensorStub, iter_tensors, map_tensors
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.optimizer_state import Keeps, OptimizerAdapter, keeps_nothing
from nxd_ckpt.loading.collective_checks import ComparedNames
from nxd_ckpt.loading.rank_state import NO_MESH, RankState
from nxd_ckpt.tag.reading import Leaf


@dataclass
class LoadTrees:
    """Live objects, with the fitting trees to load into them; empty trees are not loaded.

    Attributes:
        names: names of the model to assign.
        is_regrouped: the live param groups are not the saved ones in their order.
        keeps: predicate for state of the optimizer that stays as it is.
        missing, unexpected: names of this rank's model that the tag lacks; names in the tag that no rank's model has.
        left: names of the model that no file of an NxD tag has, and that stay as they are.
        names_by_index: names of the optimizer's parameters by their positions; none if they are unknown.
        parameters: the optimizer's parameters on both sides.
        rank_state: what this rank alone has; the trees have it already.
        model_placed, optimizer_placed: places on a mesh by path; the trees have this rank's parts of these.
    """

    model: ModelAdapter | None = None
    optimizer: OptimizerAdapter | None = None
    model_tree: Mapping[str, Any] = field(default_factory=dict)
    optimizer_tree: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    is_regrouped: bool = False
    keeps: Keeps = keeps_nothing
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    left: Sequence[str] = ()
    names_by_index: Sequence[str] = ()
    parameters: ComparedNames = field(default_factory=ComparedNames)
    model_placed: Mapping[Path, Placed] = field(default_factory=dict)
    optimizer_placed: Mapping[Path, Placed] = field(default_factory=dict)
    rank_state: RankState = field(default_factory=RankState)

    @property
    def continues_optimizer(self) -> bool:
        """True if a live optimizer continues from the saved state; a dict is only filled."""
        return bool(self.optimizer_tree) and self.optimizer is not None and not self.optimizer.is_filled

    def take_own(self) -> None:
        """Put what this rank alone has into the trees. Raises IncompatibleState if it does not fit, or another mesh."""
        own = self.rank_state
        if own.values:
            own.refuse_others(self._meshes)
            self.model_tree = own.put_into("model", self.model_tree, None, self.model_placed)
            names = self.names_by_index
            placed = self.optimizer_placed
            self.optimizer_tree = own.put_into("optimizer", self.optimizer_tree, names, placed)

    @property
    def _meshes(self) -> set[Mesh]:
        meshes = {placed.layout.mesh for placed in self.model_placed.values()}
        if self.model_tree and not meshes:
            meshes.add(NO_MESH)
        return meshes | {placed.layout.mesh for placed in self.optimizer_placed.values()}

    def refuse_stale_shards(self) -> None:
        """Raise OptimizerMismatch if the optimizer would copy weights that the model's load does not provide."""
        if self.model is None or self.optimizer is None or not (self.names and self.optimizer_tree):
            return
        for name, parameter in self.optimizer.followed(self.optimizer_tree):
            if not self.model.may_hold(parameter):
                raise OptimizerMismatch(
                    f"optimizer: its shards are cut from its parameters, and the dict passed as model= does not hold "
                    f"{name!r}: it would continue from the old weights. Pass the model itself, or load the model first "
                    "and the optimizer with model=None in a second call; or save with save_master_weights=True"
                )

    def leaves(self) -> Iterator[tuple[str, Leaf]]:
        """Yield everything that will be read, by its global name."""
        for name in self.names:
            value = self.model_tree[name]
            if isinstance(value, (TensorStub, Assembly)):
                yield f"model/{name}", value
                continue
            for path, leaf in iter_tensors(value):  # extra state may hold tensors inside
                yield "/".join(map(str, ("model", name, *path))), leaf
        for path, leaf in iter_tensors(self.optimizer_tree):
            yield self._optimizer_name(path), leaf

    @cached_property
    def seen_by_users(self) -> set[str]:
        """Names of the model that user code, which a load calls, may give another value than was saved."""
        return set() if self.model is None else set(filter(self.model.passes_user_code, self.names))

    def is_verbatim(self, leaf: Leaf, name: str) -> bool:
        """Return whether the leaf of this global name is put into host memory as it is, and seen by no user code."""
        if not name.startswith("model/"):
            return self._is_optimizer_verbatim and leaf.numel > 1
        own = name.removeprefix("model/")
        return own in self._on_host and own not in self.seen_by_users

    @cached_property
    def _on_host(self) -> set[str]:
        return set() if self.model is None else set(filter(self.model.is_on_host, self.names))

    @cached_property
    def _is_optimizer_verbatim(self) -> bool:
        optimizer = self.optimizer
        is_on_host = self.model is not None and len(self._on_host) == len(self.names)
        return is_on_host and optimizer is not None and not optimizer.passes_user_code

    def replicated_leaves(self) -> Iterator[tuple[str, Leaf]]:
        """Return the leaves that replicas of this rank may read, too, in the order of reading.

        Data-parallel replicas read all of the model, and of a plain optimizer; ranks of a mesh what is placed on it.
        """
        plain = self.optimizer is not None and self.optimizer.kind == "plain"
        placed = {id(leaf) for _, leaf, _ in self.placed_leaves()}
        own = self._own_leaves
        common = (item for item in self.leaves() if id(item[1]) not in own)
        return (item for item in common if plain or item[0].startswith("model/") or id(item[1]) in placed)

    @property
    def _own_leaves(self) -> set[int]:
        return {id(leaf) for _, leaf in iter_tensors(self.rank_state.values)}

    def placed_leaves(self) -> Iterator[tuple[str, Leaf, Placed]]:
        """Yield the leaves that are loaded into DTensors, with their places on meshes."""
        own = self._own_leaves
        for tree, placed in ((self.model_tree, self.model_placed), (self.optimizer_tree, self.optimizer_placed)):
            leaves = iter_tensors(tree) if placed else ()
            common = ((path, leaf) for path, leaf in leaves if path in placed and id(leaf) not in own)
            yield from ((self.name_by_leaf[id(leaf)], leaf, placed[path]) for path, leaf in common)

    @cached_property
    def name_by_leaf(self) -> Mapping[int, str]:
        """The global name of each leaf, by its id."""
        return {id(leaf): name for name, leaf in self.leaves()}

    def state_before(self) -> Iterator[str]:
        """Yield the global names of what the live objects hold before the load."""
        yield from () if self.model is None else (f"model/{name}" for name in self.model.names())
        yield from () if self.optimizer is None else self.optimizer.entries()

    def _optimizer_name(self, path: Path) -> str:
        names = None if self.optimizer is None else self.optimizer.parameter_names
        owned = len(path) > 1 and path[0] in ("state", "base_state", MASTERS) and isinstance(path[1], int)
        # With experts apart, their indices count from an offset of their own.
        if names is None or not owned or EXPERT_KEYS[0] in self.optimizer_tree or path[1] >= len(names):
            return "optim/" + ".".join(map(str, path))
        return "/".join(map(str, ("optim", names[path[1]], *(path[2:] or (MASTER_WEIGHTS,)))))


def local_part(leaf: Leaf, placed: Placed) -> Leaf:
    """Return this rank's part of the tensor ``leaf``; dense, in the recorded order of dimensions."""
    part = part_of(leaf, placed.pieces, placed.local_shape)
    stride = stride_of(leaf)
    return part if stride is None else with_stride(part, stride._replace(steps=dense(stride.steps, part.shape)))


def part_of(leaf: Leaf, pieces: Sequence[Piece], shape: tuple[int, ...]) -> Leaf:
    """Return the tensor of ``shape`` that consists of ``pieces`` of ``leaf``; zero elsewhere."""
    fragments: list[Fragment] = []
    for piece in pieces:
        if isinstance(leaf, TensorStub) and piece.local.size == leaf.shape:
            return leaf
        inside = Assembly.of(leaf).within(piece.box).fragments
        fragments += (fragment.moved(piece.local.offset) for fragment in inside)
    if len(fragments) == 1 and fragments[0].is_whole(leaf.dtype, shape):
        return fragments[0].stub  # on the mesh of the save each part is a whole saved tensor
    return Assembly(leaf.dtype, shape, tuple(fragments))


def local_tree(tree: dict[Any, Any], placed: Mapping[Path, Placed]) -> dict[Any, Any]:
    """Return ``tree`` with this rank's part of each leaf that is ``placed``, by its path."""
    if not placed:
        return tree
    by_leaf = {id(leaf): placed[path] for path, leaf in iter_tensors(tree) if path in placed}
    cut: dict[Any, Any] = map_tensors(
        tree, lambda leaf: local_part(leaf, by_leaf[id(leaf)]) if id(leaf) in by_leaf else leaf
    )
    return cut
