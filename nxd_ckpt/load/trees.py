"""What a load puts where: the live objects, and the saved trees that fit them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.formats.tensors import Assembly, Path, TensorStub, iter_leaves, iter_tensors
from nxd_ckpt.live.dtensor import Placed
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.optimizer import OptimizerAdapter
from nxd_ckpt.live.optimizer_dict import DictOptimizer
from nxd_ckpt.live.optimizer_state import Keeps, keeps_nothing
from nxd_ckpt.live.state import MASTER_WEIGHTS
from nxd_ckpt.live.zero1 import EXPERT_KEYS, MASTERS
from nxd_ckpt.reshard.plain_values import ABSENT
from nxd_ckpt.tag.reading import Leaf


@dataclass
class LoadTrees:
    """Live objects, with the trees that they are to be loaded from and fit; empty where not wanted.

    ``names`` are those of the model that are to be assigned. ``is_regrouped`` says that the live param groups are not
    the saved ones in their order, ``keeps`` what of the optimizer stays as it is. ``unmatched`` says, where the model
    has names to be loaded and the tag not one of them, what there is on both sides. ``strangers`` are the global names
    that the tag has and this rank of a mesh job does not: it may be another one that holds them. The trees have this
    rank's parts of what ``model_placed`` and ``optimizer_placed`` say, by path, to lie on a mesh.
    """

    model: ModelAdapter | None = None
    optimizer: OptimizerAdapter | None = None
    model_tree: Mapping[str, Any] = field(default_factory=dict)
    optimizer_tree: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    is_regrouped: bool = False
    keeps: Keeps = keeps_nothing
    unmatched: str | None = None
    strangers: list[str] = field(default_factory=list)
    model_placed: Mapping[Path, Placed] = field(default_factory=dict)
    optimizer_placed: Mapping[Path, Placed] = field(default_factory=dict)

    @property
    def continues_optimizer(self) -> bool:
        """Whether a live optimizer goes on from what was saved; a dict simply gets it."""
        return bool(self.optimizer_tree) and not isinstance(self.optimizer, DictOptimizer)

    def refuse_strangers(self) -> None:
        """Raise OptimizerMismatch where the optimizer would copy weights that the model's load does not bring."""
        if self.model is None or self.optimizer is None or not (self.names and self.optimizer_tree):
            return
        for name, parameter in self.optimizer.followed(self.optimizer_tree):
            if not self.model.may_hold(parameter):
                raise OptimizerMismatch(
                    f"optimizer: its shards are cut from its parameters, and the dict given as the model does not hold "
                    f"{name!r}: it would go on from the old weights. Pass the model itself, or load the model first "
                    "and the optimizer with model=None in a second call; or save with save_master_weights=True"
                )

    def leaves(self) -> Iterator[tuple[str, Leaf]]:
        """Everything that will be read, by its global name."""
        for name in self.names:
            value = self.model_tree[name]
            if isinstance(value, (TensorStub, Assembly)):
                yield f"model/{name}", value
                continue
            for path, leaf in iter_tensors(value):  # extra state may hold tensors inside
                yield "/".join(map(str, ("model", name, *path))), leaf
        for path, leaf in iter_tensors(self.optimizer_tree):
            yield self._optimizer_name(path), leaf

    def replicated_leaves(self) -> Iterator[tuple[str, Leaf]]:
        """Those that all data-parallel replicas of this rank read: of the model, and of a plain optimizer."""
        plain = self.optimizer is not None and self.optimizer.kind == "plain"
        return ((name, leaf) for name, leaf in self.leaves() if plain or name.startswith("model/"))

    def placed_leaves(self) -> Iterator[tuple[str, Leaf, Placed]]:
        """Those that are put into DTensors, and how these lie on their meshes."""
        for tree, placed in ((self.model_tree, self.model_placed), (self.optimizer_tree, self.optimizer_placed)):
            found = iter_tensors(tree) if placed else ()
            yield from ((self.name_by_leaf[id(leaf)], leaf, placed[path]) for path, leaf in found if path in placed)

    @cached_property
    def name_by_leaf(self) -> Mapping[int, str]:
        """The global name of each leaf, by its id."""
        return {id(leaf): name for name, leaf in self.leaves()}

    def beside(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
        """Everything that will be loaded, tensor or not, beside what live state trees have in its place, or ABSENT.

        With the kind of finding (core.findings) that a difference is, and its global name.
        """
        live = dict(iter_leaves(model))
        for name in self.names:
            for path, leaf in iter_leaves(self.model_tree[name]):
                yield "weights", "/".join(map(str, ("model", name, *path))), leaf, live.get((name, *path), ABSENT)
        live = dict(iter_leaves(optimizer))
        has_masters = any(MASTERS in path for path in live)
        for path, leaf in iter_leaves(self.optimizer_tree) if self.optimizer_tree else ():
            if MASTERS in path and not has_masters:
                continue  # they are loaded, but an optimizer that does not save them does not tell them
            kind = "groups" if path[0] == "param_groups" else "weights" if path[0] == MASTERS else "moments"
            yield kind, self._optimizer_name(path), leaf, live.get(path, ABSENT)

    def _optimizer_name(self, path: Path) -> str:
        names = None if self.optimizer is None else self.optimizer.parameter_names
        owned = len(path) > 1 and path[0] in ("state", "base_state", MASTERS) and isinstance(path[1], int)
        # With experts apart, their indices count from an offset of their own.
        if names is None or not owned or EXPERT_KEYS[0] in self.optimizer_tree or path[1] >= len(names):
            return "optim/" + ".".join(map(str, path))
        return "/".join(map(str, ("optim", names[path[1]], *(path[2:] or (MASTER_WEIGHTS,)))))
