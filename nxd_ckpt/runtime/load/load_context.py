"""The tag that a load reads, seen from one rank's live objects: which trees of it fit them.

On the sizes that a tag was saved on, its files are the trees. On others, or where the optimizer's parameters are in
another order, the trees are put together by name (:mod:`nxd_ckpt.runtime.views.reshard_context`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from nxd_ckpt.adapters.model import ModelAdapter
from nxd_ckpt.adapters.optimizer import OptimizerAdapter, open_optimizer
from nxd_ckpt.adapters.optimizer_dict import DictOptimizer
from nxd_ckpt.adapters.state import MASTER_WEIGHTS
from nxd_ckpt.adapters.state_names import PARAM_GROUPS, without
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.renaming import NOT_LIVE
from nxd_ckpt.core.resharding import check_partitions, rescaled
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.errors import OptimizerMismatch, PartNotFound
from nxd_ckpt.formats.tensors import Assembly
from nxd_ckpt.layout.files import MissingTensor
from nxd_ckpt.runtime.load.filters import Filter
from nxd_ckpt.runtime.load.options import LoadOptions
from nxd_ckpt.runtime.load.sides import Sides
from nxd_ckpt.runtime.load.trees import LoadTrees
from nxd_ckpt.runtime.tag.opening import OpenTag
from nxd_ckpt.runtime.views.resharded_model import ReshardedModel
from nxd_ckpt.runtime.views.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.runtime.views.target import Target, TargetModel, TargetOptimizer

logger = logging.getLogger("nxd_ckpt")


def open_source(
    opened: OpenTag,
    topology: Topology,
    live: ModelAdapter | None,
    optimizer: Any,
    options: LoadOptions,
    filtered: Filter,
) -> Source:
    """The tag ``opened``, of which the rank at ``topology`` loads, and the live objects. Reads no tree yet.

    Raises:
        InvalidArgument, UnsupportedState: no objects that could be loaded.
    """
    # In a store that would be requests for every file: there the indexes' word is taken if bytes are verified at all.
    opened.opens_all = not options.verifies_first and (opened.storage.renames or options.verify is False)
    adapter = None
    if optimizer is not None:
        adapter = open_optimizer(
            optimizer,
            model=live,
            param_names=options.param_names,
            zero1_optimizer=opened.parts.optimizer != "plain",
            topology=topology,
        )
    filtered.know_ties(live)
    if live is not None and adapter is not None and not isinstance(adapter, DictOptimizer):
        filtered.know_shards()
    known = {} if live is None else live.partitions(topology.tp)
    options = replace(options, partitions={**known, **(options.partitions or {})})
    return Source(Sides(opened, topology, live, adapter, options, filtered))


class Source:
    """One tag for the live objects of one rank."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._opened, self._topology, self._options, self._filter = (
            sides.opened, sides.topology, sides.options, sides.filter
        )
        self._model, self._optimizer = sides.model, sides.optimizer
        self.is_regrouped = False
        self._left_alone: frozenset[str] = frozenset()

    def live_names(self) -> list[str] | None:
        """The parameters and buffers that the live objects hold; None where they take what there is."""
        return self._sides.held_names()

    def names(self) -> Iterator[str]:
        """The global names of all that the tag holds of model and optimizer, and of what is live."""
        held = [] if self._model is None else self._model.names()
        saved = ReshardedModel(self._sides.context).stages().values() if self._opened.parts.model else ()
        yield from (f"model/{name}" for names in (held, *saved) for name in names)
        if self._opened.parts.optimizer is None and self._optimizer is None:
            return
        yield PARAM_GROUPS
        if isinstance(self._optimizer, DictOptimizer):
            self._optimizer.know_names(self._names_by_index(self._optimizer))
        live = () if self._optimizer is None else self._optimizer.entries()
        entries = [*live, *self._saved_entries()]
        yield from entries
        known = {entry.rpartition("/")[0] for entry in entries}
        yield from (path for path in (f"optim/{name}" for name in self._sides.live_names or ()) if path not in known)

    def _saved_entries(self) -> Iterator[str]:
        if self._opened.parts.optimizer is None or self._filter.covers("optim"):
            return
        try:
            source = self._optimizer_source
            if isinstance(self._optimizer, DictOptimizer):
                source = self._optimizer_source_of(by_position=False)
            yield from source.entries()
        except OptimizerMismatch:  # which parameters they are is not known; if that matters, the load says so
            return

    def trees(self) -> LoadTrees:
        """What to load. Reads trees, and no tensor.

        Raises:
            IncompatibleState: the tag and the live objects do not fit.
            PartNotFound: a tensor is in no file.
        """
        model, optimizer, filtered = self._model, self._optimizer, self._filter
        trees = LoadTrees(model, optimizer)
        if model is not None and not filtered.covers("model"):
            trees.model_tree = self._model_tree(model)
            trees.names = model.validate(trees.model_tree, self._options.strict_names, self._leaves_alone)
            trees.unmatched = None if trees.names else self._unmatched(model, trees.model_tree)
        if optimizer is not None and not filtered.covers("optim"):
            self._refuse_positions(optimizer)
            tree = self._optimizer_tree(optimizer)
            self._refuse_bare_groups(tree, optimizer)
            trees.optimizer_tree = self._filtered(tree, optimizer)
            optimizer.validate(trees.optimizer_tree)
        trees.refuse_strangers()
        trees.is_regrouped = self.is_regrouped
        trees.keeps = filtered.keeps(trees.names)
        return trees

    def _unmatched(self, model: ModelAdapter, tree: dict[str, Any]) -> str | None:
        """What a model is called whose names are to be loaded, none of which the tag has."""
        live = [name for name in model.expected(tree) if not self._filter.ignores_model(name)]
        saved = [name.removeprefix(NOT_LIVE) for name in sorted(self._opened.model_names())]
        if not live:
            return None
        return f"{self._opened.where} holds {listed(saved, live)}; the model has {listed(live, saved)}"

    def _refuse_bare_groups(self, tree: dict[str, Any], optimizer: OptimizerAdapter) -> None:
        """Raise OptimizerMismatch for param groups whose options were left out of the save, unless they are now too."""
        names = iter(self._names_by_index(optimizer))
        for number, group in enumerate(tree["param_groups"]):
            own = [name for _, name in zip(group["params"], names, strict=False)]
            left_out = self._filter.ignores(PARAM_GROUPS) or all(self._filter.covers(f"optim/{name}") for name in own)
            if group["params"] and len(group) == 1 and not left_out and not isinstance(optimizer, DictOptimizer):
                raise OptimizerMismatch(
                    f"optimizer: {self._opened.where} was saved without the options (lr, ...) of param group {number}; "
                    f"ignore_keys=[{PARAM_GROUPS!r}] keeps the live ones"
                )

    def _refuse_positions(self, optimizer: OptimizerAdapter) -> None:
        """Raise OptimizerMismatch where filters go by names, and only positions tell the optimizer's parameters."""
        if isinstance(optimizer, DictOptimizer):  # filled with what the tag has, and as it has it
            return
        mapping, live = self._filter.renaming.key_mapping, self._sides.live_names
        if live is None:
            held = [] if self._model is None else self._model.names()
            copies = optimizer.kind == "zero1" and any(map(self._filter.ignores_model, held))
            if mapping or copies:
                why = "where key_mapping= has their state" if mapping else "whose weights are left out"
                raise OptimizerMismatch(
                    f"optimizer: the names of its parameters are not known, and so not {why}; pass the live model "
                    "itself, or param_names="
                )
            return
        exchanges = any(saved in live for name, saved in mapping.items() if name != saved)
        if exchanges and self._sides.saved_names() is None:
            raise OptimizerMismatch(
                f"optimizer: {self._opened.where} does not say which parameters its entries belong to, and their "
                "positions do not tell where key_mapping= exchanges live names; pass saved_param_names="
            )

    def _filtered(self, tree: dict[str, Any], optimizer: OptimizerAdapter) -> dict[str, Any]:
        """An optimizer's tree without what is left out."""
        if not self._filter.is_selective:
            return tree
        return without(tree, self._names_by_index(optimizer), self._filter.ignores, self._filter.covers)

    def _names_by_index(self, optimizer: OptimizerAdapter) -> Sequence[str]:
        """What globs go by: a dict has the names of the tag, if none of its own; live parameters "#0", "#1", ..."""
        if self._sides.live_names is not None:
            return self._sides.live_names
        is_dict = isinstance(optimizer, DictOptimizer)
        return (is_dict and self._opened.optimizer_names(self._topology.coordinates)) or ()

    def _model_tree(self, model: ModelAdapter) -> dict[str, Any]:
        ignores = self._filter.ignores_model
        if self._sides.specs:  # else a dict to be filled
            check_partitions(self._options.partitions or {}, self._sides.specs, self._topology)
        if self._sides.same_sizes("model") and not self._sides.is_recut:
            tree = self._opened.model_tree(self._topology.coordinates)
            tree = {name: leaf for name, leaf in tree.items() if not ignores(name)}
        elif not model.names():  # a dict to be filled
            target = TargetModel(self._opened, self._target)
            masters = self._opened.parts.master_weights
            tree = target.tree(TargetOptimizer(self._opened, self._target, target) if masters else None)
        else:
            wanted = [name for name in model.names() if not ignores(name)]
            specs = {name: self._sides.specs[name] for name in wanted if name in self._sides.specs}
            tree = ReshardedModel(self._sides.context).tree(specs, wanted, ignores)
        if not model.names():
            tree = {name: leaf for name, leaf in tree.items() if not name.startswith(NOT_LIVE)}
        return self._completed(tree)

    def _optimizer_tree(self, optimizer: OptimizerAdapter) -> dict[str, Any]:
        if self._sides.same_sizes("optimizer") and not self._sides.is_recut and not self._sides.is_reordered(optimizer):
            tree = self._opened.optimizer_tree(self._topology.coordinates, self._sides.live_names)
            if not self._sides.is_regrouped(optimizer, tree):
                return tree
        form = optimizer.form()
        if form is None:
            model = TargetModel(self._opened, self._target) if self._opened.parts.model else None
            return TargetOptimizer(self._opened, self._target, model).tree()
        plain = (self._opened.parts.optimizer == "plain", form.kind == "plain")
        if plain[0] != plain[1]:
            kinds = ["plain" if one else "ZeRO-1" for one in plain]
            raise OptimizerMismatch(
                f"optimizer: {self._opened.where} holds the state of a {kinds[0]} optimizer, the live one is "
                f"{kinds[1]}; build the optimizer as when it was saved, or load with optimizer=None"
            )
        source, filtered = self._optimizer_source, self._filter
        tree = source.tree(form, filtered.ignores, filtered.covers)
        self.is_regrouped = source.group_order(form, filtered.covers) != list(range(len(source.groups())))
        self._refuse_unused(source.names(), [slot.name for slot in form.slots])
        return tree

    def _refuse_unused(self, saved: Sequence[str], live: Sequence[str]) -> None:
        """Raise OptimizerMismatch for a parameter of this model whose saved state would be left behind."""
        names = self._sides.context.names
        used = {alias for name in live for alias in names(name)}
        all_here = self._sides.context.holds_all
        unused = [name for name in saved if name not in used and (all_here or name in self._sides.specs)]
        unused = [name for name in unused if not (name.startswith(NOT_LIVE) or self._filter.covers(f"optim/{name}"))]
        if unused:
            raise OptimizerMismatch(
                f"optimizer: {self._opened.where} has state for {', '.join(unused[:5])} ({len(unused)} parameters), "
                "which the live optimizer does not hold; build param_groups as when it was saved (with the same frozen "
                "parameters)"
            )

    def _completed(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The tree, with weights that were left out taken from the optimizer's master weights."""
        missing = [name for name, leaf in tree.items() if isinstance(leaf, MissingTensor)]
        if not missing:
            return tree
        parts, where = self._opened.parts, self._opened.where
        if parts.lower_precision_weights or not parts.master_weights:
            raise PartNotFound(
                f"{where}: {tree[missing[0]].file} (model, {missing[0]}) is missing, with {len(missing) - 1} more: the "
                "tag lost files since it was saved; load another one"
            )
        found = {name: leaf for name in missing if (leaf := self._master_weight(name, tree[name])) is not None}
        lost = [name for name in missing if name not in found]
        if lost and self._options.strict_names and not self._knows_masters:
            raise PartNotFound(
                f"{where}: no file holds {', '.join(lost[:5])} ({len(lost)} tensors; {tree[lost[0]].file} is missing) "
                "and no master weights stand for them. Pass the live model and optimizer, or param_names=, so that "
                "master weights can be matched by name; strict=False leaves those tensors as they are"
            )
        if lost and self._topology.dp_rank == self._topology.tp_rank == 0:
            logger.warning(
                "%s: left as they are, since NxD saved no frozen parameters and buffers beside master weights: %s",
                where,
                ", ".join(lost),
            )
        self._left_alone = frozenset(lost)
        return {name: found.get(name, leaf) for name, leaf in tree.items() if name not in lost}

    @property
    def _knows_masters(self) -> bool:
        """Whether it is known which live names all the master weights belong to: then no others were trained."""
        known = not any(name.startswith("#") for name in self._optimizer_source.names())
        return known and self._model is not None and bool(self._model.names())

    def _leaves_alone(self, name: str) -> bool:
        return name in self._left_alone or self._filter.ignores_model(name)

    def _master_weight(self, name: str, missing: MissingTensor) -> Assembly | None:
        spec = self._sides.specs.get(name)
        if missing.dtype is None or (spec is None and missing.shape is None):
            return None
        if spec is None:
            spec = ParameterSpec(missing.dtype, missing.shape or (), Partition(known=False))
        wanted = ParameterSpec(missing.dtype, spec.shape, spec.partition)
        return self._optimizer_source.entry(name, MASTER_WEIGHTS, wanted)

    @cached_property
    def _optimizer_source(self) -> ReshardedOptimizer:
        return self._optimizer_source_of(by_position=self._optimizer is not None and self._sides.live_names is None)

    def _optimizer_source_of(self, *, by_position: bool) -> ReshardedOptimizer:
        return ReshardedOptimizer(
            self._sides.context,
            saved_names=self._options.saved_param_names,
            live_names=self._sides.live_names,
            by_position=by_position,
        )

    @property
    def _target(self) -> Target:
        given, sizes = self._options.partitions or {}, (self._topology.tp, self._opened.topology.tp)
        partitions = {name: rescaled(name, partition, *sizes) for name, partition in given.items()}
        names, ignores = self._options.saved_param_names, self._filter.ignores_model
        return Target(self._topology, partitions=partitions, saved_names=names, ignores=ignores)
