"""What a load puts where: the live objects, and the saved trees that fit them.

On the sizes that a tag was saved on, its files are the trees. On others, or where the optimizer's parameters are in
another order, the trees are put together by name (:mod:`nxd_ckpt.runtime.crossing`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nxd_ckpt.adapters.model import ModelAdapter, open_model
from nxd_ckpt.adapters.optimizer import OptimizerAdapter, open_optimizer
from nxd_ckpt.adapters.optimizer_dict import DictOptimizer
from nxd_ckpt.adapters.optimizer_state import Keeps, keeps_nothing
from nxd_ckpt.adapters.state import MASTER_WEIGHTS
from nxd_ckpt.adapters.state_names import PARAM_GROUPS, without
from nxd_ckpt.adapters.zero1 import EXPERT_KEYS, MASTERS
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.partition import Partition
from nxd_ckpt.core.renaming import NOT_LIVE
from nxd_ckpt.core.resharding import check_partitions, rescaled
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import OptimizerMismatch, PartNotFound
from nxd_ckpt.formats.tensors import Assembly, Path, TensorStub, iter_tensors
from nxd_ckpt.layout.files import MissingTensor
from nxd_ckpt.runtime.crossing import Crossing
from nxd_ckpt.runtime.filters import Filter
from nxd_ckpt.runtime.load_options import LoadOptions
from nxd_ckpt.runtime.opening import OpenTag
from nxd_ckpt.runtime.reading import Leaf
from nxd_ckpt.runtime.resharded_model import ReshardedModel
from nxd_ckpt.runtime.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.runtime.target import Target, TargetModel, TargetOptimizer

logger = logging.getLogger("nxd_ckpt")


@dataclass
class LoadTrees:
    """Live objects, with the trees that they are to be loaded from and fit; empty where not wanted.

    ``names`` are those of the model that are to be assigned. ``is_regrouped`` says that the live param groups are not
    the saved ones in their order, ``keeps`` what of the optimizer stays as it is.
    """

    model: ModelAdapter | None = None
    optimizer: OptimizerAdapter | None = None
    model_tree: Mapping[str, Any] = field(default_factory=dict)
    optimizer_tree: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    is_regrouped: bool = False
    keeps: Keeps = keeps_nothing

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

    @cached_property
    def name_by_leaf(self) -> Mapping[int, str]:
        """The global name of each leaf, by its id."""
        return {id(leaf): name for name, leaf in self.leaves()}

    def _optimizer_name(self, path: Path) -> str:
        names = None if self.optimizer is None else self.optimizer.parameter_names
        owned = path[0] in ("state", "base_state", MASTERS) and isinstance(path[1], int)
        # With experts apart, their indices count from an offset of their own.
        if names is None or not owned or EXPERT_KEYS[0] in self.optimizer_tree or path[1] >= len(names):
            return "optim/" + ".".join(map(str, path))
        return "/".join(map(str, ("optim", names[path[1]], *(path[2:] or (MASTER_WEIGHTS,)))))


def open_source(
    opened: OpenTag, topology: Topology, model: Any, optimizer: Any, options: LoadOptions, filtered: Filter
) -> Source:
    """The tag ``opened``, of which the rank at ``topology`` loads, and the live objects. Reads no tree yet.

    Raises:
        InvalidArgument, UnsupportedState: no objects that could be loaded.
    """
    # In a store that would be requests for every file: there the indexes' word is taken where bytes are proved at all.
    opened.opens_all = not options.verifies_first and (opened.storage.renames or options.verify is False)
    live = None if model is None else open_model(model)
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
    return Source(opened, topology, live, adapter, options, filtered)


class Source:
    """One tag for the live objects of one rank."""

    def __init__(
        self,
        opened: OpenTag,
        topology: Topology,
        model: ModelAdapter | None,
        optimizer: OptimizerAdapter | None,
        options: LoadOptions,
        filtered: Filter,
    ) -> None:
        self._opened, self._topology, self._options, self._filter = opened, topology, options, filtered
        self._model, self._optimizer = model, optimizer
        self.is_regrouped = False
        self._live_names = _flat(options.param_names) or (None if optimizer is None else optimizer.parameter_names)

    def live_names(self) -> list[str] | None:
        """The parameters and buffers that the live objects hold; None where they take what there is."""
        held = [] if self._model is None else self._model.names()
        if (self._model is not None and not held) or (self._optimizer is not None and self._live_names is None):
            return None
        return list(dict.fromkeys([*held, *(self._live_names or ())]))

    def names(self) -> Iterator[str]:
        """The global names of all that the tag holds of model and optimizer, and of what is live."""
        held = [] if self._model is None else self._model.names()
        saved = ReshardedModel(self._crossing).stages().values() if self._opened.parts.model else ()
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
        yield from (path for path in (f"optim/{name}" for name in self._live_names or ()) if path not in known)

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
            trees.names = model.validate(trees.model_tree, self._options.strict_names, filtered.ignores_model)
        if optimizer is not None and not filtered.covers("optim"):
            self._refuse_positions(optimizer)
            trees.optimizer_tree = self._filtered(self._optimizer_tree(optimizer), optimizer)
            optimizer.validate(trees.optimizer_tree)
        trees.is_regrouped = self.is_regrouped
        trees.keeps = filtered.keeps(trees.names)
        return trees

    def _refuse_positions(self, optimizer: OptimizerAdapter) -> None:
        """Raise OptimizerMismatch where filters go by names, and only positions tell the optimizer's parameters."""
        if isinstance(optimizer, DictOptimizer):  # filled with what the tag has, and as it has it
            return
        mapping, live = self._filter.renaming.key_mapping, self._live_names
        if live is None:
            held = [] if self._model is None else self._model.names()
            copies = optimizer.kind == "zero1" and any(map(self._filter.ignores_model, held))
            if mapping or copies:
                why = "where key_mapping= has their state" if mapping else "whose weights are left out"
                raise OptimizerMismatch(
                    f"optimizer: the names of its parameters are not known, and so not {why}; pass the live model "
                    "itself, or param_names="
                )
        elif self._saved_names() is None and any(saved in live for name, saved in mapping.items() if name != saved):
            raise OptimizerMismatch(
                f"optimizer: {self._opened.where} does not say which parameters its entries belong to, and their "
                "positions do not tell where key_mapping= exchanges live names; pass saved_param_names="
            )

    def _saved_names(self) -> list[str] | None:
        """The optimizer's parameters on this rank's stage (the first where stages are others), as the caller or the tag
        tells."""
        saved, live, given = self._opened.topology, self._topology, self._options.saved_param_names
        stage = live.pp_rank if saved.pp == live.pp else 0
        if given is not None and len(given) == saved.pp:
            return _flat(given[stage])
        return self._opened.optimizer_names(live.coordinates if saved.sizes == live.sizes else Coordinates(stage))

    def _filtered(self, tree: dict[str, Any], optimizer: OptimizerAdapter) -> dict[str, Any]:
        """An optimizer's tree without what is left out."""
        if not self._filter.is_selective:
            return tree
        return without(tree, self._names_by_index(optimizer), self._filter.ignores, self._filter.covers)

    def _names_by_index(self, optimizer: OptimizerAdapter) -> Sequence[str]:
        """What globs go by: a dict has the names of the tag, if none of its own; live parameters "#0", "#1", ..."""
        if self._live_names is not None:
            return self._live_names
        is_dict = isinstance(optimizer, DictOptimizer)
        return (is_dict and self._opened.optimizer_names(self._topology.coordinates)) or ()

    def _model_tree(self, model: ModelAdapter) -> dict[str, Any]:
        ignores = self._filter.ignores_model
        if self._specs:  # else a dict to be filled
            check_partitions(self._options.partitions or {}, self._specs, self._topology)
        if self._same_sizes("model") and not self._is_recut:
            tree = self._opened.model_tree(self._topology.coordinates)
            tree = {name: leaf for name, leaf in tree.items() if not ignores(name)}
        elif not model.names():  # a dict to be filled
            target = TargetModel(self._opened, self._target)
            masters = self._opened.parts.master_weights
            tree = target.tree(TargetOptimizer(self._opened, self._target, target) if masters else None)
        else:
            wanted = [name for name in model.names() if not ignores(name)]
            specs = {name: self._specs[name] for name in wanted if name in self._specs}
            tree = ReshardedModel(self._crossing).tree(specs, wanted, ignores)
        if not model.names():
            tree = {name: leaf for name, leaf in tree.items() if not name.startswith(NOT_LIVE)}
        return self._completed(tree)

    def _optimizer_tree(self, optimizer: OptimizerAdapter) -> dict[str, Any]:
        if self._same_sizes("optimizer") and not self._is_recut and not self._is_reordered(optimizer):
            tree = self._opened.optimizer_tree(self._topology.coordinates, self._live_names)
            if not self._is_regrouped(optimizer, tree):
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

    def _same_sizes(self, part: str) -> bool:
        """Whether this rank's files are simply those of its coordinates."""
        saved, live = self._opened.topology, self._topology
        sharded = part == "optimizer" and self._opened.parts.optimizer != "plain"
        # Model files do not depend on dp, nor does a plain optimizer; ZeRO-1 shards do.
        same_dp = saved.dp == live.dp or not sharded
        same = (saved.tp, saved.pp, saved.ep) == (live.tp, live.pp, live.ep)
        return same and same_dp and not self._is_restaged

    @cached_property
    def _is_restaged(self) -> bool:
        """Whether there are as many pipeline stages as before, but this one holds what another one held.

        What no stage held is new, and says nothing of the stages.
        """
        saved, live = self._opened.topology, self._topology
        if saved.pp == 1 or saved.pp != live.pp or self._model is None or not self._opened.parts.model:
            return False
        near = Coordinates(live.pp_rank, live.ep_rank % saved.ep, live.tp_rank % saved.tp)
        held = self._opened.model_tree(near).keys()
        wanted = ({name, *self._model.aliases(name)} for name in self._model.names() if self._is_wanted(name))
        missing = {name for names in wanted if not held & names for name in names}
        others = (replace(near, pp_rank=stage) for stage in range(saved.pp) if missing and stage != live.pp_rank)
        return any(missing & self._opened.model_tree(at).keys() for at in others)

    def _is_wanted(self, name: str) -> bool:
        """Whether the parameter or its state is to be loaded."""
        left_out = self._filter.ignores_model(name)
        return not (left_out and (self._optimizer is None or self._filter.covers(f"optim/{name}")))

    @cached_property
    def _is_recut(self) -> bool:
        """Whether a parameter was saved as cut in one known way, and is cut in another one of the same whole.

        With another whole the attributes of one side are wrong, and this rank's own files are right.
        """
        for name, spec in self._specs.items():
            recorded, live = self._crossing.recorded.get(name), self._crossing.live_spec(name, spec)
            if recorded is None or recorded.partition == live.partition:
                continue
            sides = [side for side in (recorded, live) if side.partition.known]
            wholes = {side.partition.global_shape(side.shape, self._topology.ep) for side in sides}
            cuts = {side.partition for side in sides if not side.partition.replicated_over_tp}
            if len(cuts) == 2 and len(wholes) == 1:
                return True
        return False

    def _is_reordered(self, optimizer: OptimizerAdapter) -> bool:
        """Whether both sides know their parameters' names, and list them in another order."""
        saved, live = self._saved_names(), optimizer.parameter_names
        if saved is None or live is None or any(name.startswith("#") for name in [*saved, *live]):
            return False
        aliases = self._crossing.names
        return len(saved) == len(live) and any(one not in aliases(two) for one, two in zip(saved, live, strict=True))

    def _is_regrouped(self, optimizer: OptimizerAdapter, tree: Mapping[str, Any]) -> bool:
        """Whether names on both sides could match parameters that are in other param groups than they were."""
        saved = self._opened.optimizer_names(self._topology.coordinates)
        if saved is None or optimizer.parameter_names is None:
            return False
        try:
            form = optimizer.form()
        except OptimizerMismatch:
            return False
        # Of another kind: validating it says so.
        if form is None or (form.kind == "plain") == ("base_state" in tree):
            return False
        return [len(group["params"]) for group in tree["param_groups"]] != list(form.groups)

    def _refuse_unused(self, saved: Sequence[str], live: Sequence[str]) -> None:
        """Raise OptimizerMismatch for a parameter of this model whose saved state would be left behind."""
        names = self._crossing.names
        used = {alias for name in live for alias in names(name)}
        all_here = self._crossing.holds_all
        unused = [name for name in saved if name not in used and (all_here or name in self._specs)]
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
        if lost and self._options.strict_names:
            raise PartNotFound(
                f"{where}: no file holds {', '.join(lost[:5])} ({len(lost)} tensors; {tree[lost[0]].file} is missing) "
                "and no master weights stand for them. Pass the live model and optimizer, or param_names=, so that "
                "master weights can be matched by name; strict=False leaves those tensors as they are"
            )
        if lost:
            logger.warning("%s: not restored, no file holds them: %s", where, ", ".join(lost))
        return {name: found.get(name, leaf) for name, leaf in tree.items() if name not in lost}

    def _master_weight(self, name: str, missing: MissingTensor) -> Assembly | None:
        spec = self._specs.get(name)
        if missing.dtype is None or (spec is None and missing.shape is None):
            return None
        if spec is None:
            spec = ParameterSpec(missing.dtype, missing.shape or (), Partition(known=False))
        wanted = ParameterSpec(missing.dtype, spec.shape, spec.partition)
        return self._optimizer_source.entry(name, MASTER_WEIGHTS, wanted)

    @cached_property
    def _crossing(self) -> Crossing:
        manifest = self._opened.manifest
        return Crossing(
            self._opened,
            self._topology,
            partitions=self._options.partitions or {},
            recorded={} if manifest is None else manifest.parameters,
            aliases={} if self._model is None else {name: self._model.aliases(name) for name in self._specs},
            every_stage=self._is_restaged,
        )

    @cached_property
    def _optimizer_source(self) -> ReshardedOptimizer:
        return self._optimizer_source_of(by_position=self._optimizer is not None and self._live_names is None)

    def _optimizer_source_of(self, *, by_position: bool) -> ReshardedOptimizer:
        return ReshardedOptimizer(
            self._crossing,
            saved_names=self._options.saved_param_names,
            live_names=self._live_names,
            by_position=by_position,
        )

    @cached_property
    def _specs(self) -> Mapping[str, ParameterSpec]:
        return {} if self._model is None else self._model.parameters(self._topology.tp)

    @property
    def _target(self) -> Target:
        given, sizes = self._options.partitions or {}, (self._topology.tp, self._opened.topology.tp)
        partitions = {name: rescaled(name, partition, *sizes) for name, partition in given.items()}
        names, ignores = self._options.saved_param_names, self._filter.ignores_model
        return Target(self._topology, partitions=partitions, saved_names=names, ignores=ignores)


def _flat(param_names: Sequence[Sequence[str]] | None) -> list[str] | None:
    return None if param_names is None else [name for group in param_names for name in group]
