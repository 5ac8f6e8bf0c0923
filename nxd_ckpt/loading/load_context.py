"""Facts for a load: the content of a tag, and one rank's live objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.parameter_names import is_adapter
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import OptimizerMismatch
from nxd_ckpt.live.dtensor import refuse_sizes
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.optimizer import open_optimizer
from nxd_ckpt.live.optimizer_state import OptimizerAdapter
from nxd_ckpt.loading.filters import Filter
from nxd_ckpt.loading.options import LoadOptions
from nxd_ckpt.reshard.reshard_context import ReshardContext
from nxd_ckpt.reshard.resharded_state import ReshardedState
from nxd_ckpt.reshard.resharding import checked_partitions, rescaled
from nxd_ckpt.reshard.saved_optimizer import OptimizerNames, is_number
from nxd_ckpt.reshard.target import Target, TargetRank
from nxd_ckpt.tag.opened import OpenTag


def load_context(
    opened: OpenTag,
    topology: Topology,
    live: ModelAdapter | None,
    optimizer: Any,
    options: LoadOptions,
    filtered: Filter,
) -> LoadContext:
    """Return the context for loading the tag ``opened`` on the rank at ``topology``. Reads no tree yet.

    Raises:
        InvalidArgument, UnsupportedState: objects that cannot be loaded.
    """
    # In a store that costs a request per file: there the indexes are trusted if bytes are verified at all.
    opened.opens_all = not options.verifies_first and (opened.storage.renames or options.verify is False)
    opened.keeps_small = True
    adapter = None if optimizer is None else live_optimizer(opened, topology, live, optimizer, options)
    if live is not None and live.is_placed:
        refuse_sizes(topology)
    filtered.know_ties(live)
    if live is not None and adapter is not None and not adapter.is_filled:
        filtered.know_shards()
    partitions = {} if live is None else live.partitions(topology.tp)
    options = replace(options, partitions={**partitions, **checked_partitions(options.partitions, topology.tp)})
    return LoadContext(opened, topology, live, adapter, options, filtered)


def live_optimizer(
    opened: OpenTag, topology: Topology, live: ModelAdapter | None, optimizer: Any, options: LoadOptions
) -> OptimizerAdapter:
    """Return the adapter of ``optimizer``, of the kind that the tag holds where it does not tell itself.

    Raises InvalidArgument, UnsupportedState for objects that cannot be loaded.
    """
    names = options.param_names
    is_dict = isinstance(optimizer, dict)
    is_sharded = opened.parts.optimizer != "plain" and is_dict
    adapter = open_optimizer(optimizer, model=live, param_names=names, zero1_optimizer=is_sharded, topology=topology)
    if adapter.kind == "plain" and not is_dict and _is_of_its_own_cut(opened):
        adapter = open_optimizer(optimizer, model=live, param_names=names, zero1_optimizer=True, topology=topology)
    return adapter


def _is_of_its_own_cut(opened: OpenTag) -> bool:
    """Return whether each rank saved state that only its optimizer knows the cut of: sharded, but no ZeRO-1."""
    if opened.parts.optimizer in (None, "plain"):
        return False
    with opened.guarded():
        return "base_state" not in opened.optimizer_tree(Coordinates())


@dataclass
class LoadContext:
    """A tag, and the live objects of the rank at ``topology``.

    They are loaded by ``options``, except names in ``filter``.
    """

    opened: OpenTag
    topology: Topology
    model: ModelAdapter | None
    optimizer: OptimizerAdapter | None
    options: LoadOptions
    filter: Filter

    @cached_property
    def live_names(self) -> list[str] | None:
        """The optimizer's parameters, None if unknown."""
        return _flat(self.options.param_names) or (None if self.optimizer is None else self.optimizer.parameter_names)

    @cached_property
    def specs(self) -> Mapping[str, ParameterSpec]:
        """The live parameters and buffers; none of a dict that is to be filled."""
        specs = {} if self.model is None else self.model.parameters(self.topology.tp)
        for name, partition in (self.options.partitions or {}).items():
            if name in specs:
                partition.check_shape(f"partitions= of {name}", specs[name].shape)
        return specs

    @cached_property
    def state(self) -> ReshardedState:
        """The tag's state, partitioned like the live objects."""
        manifest = self.opened.manifest
        context = ReshardContext(
            self.opened,
            self.topology,
            partitions=self.options.partitions or {},
            recorded={} if manifest is None else manifest.parameters,
            aliases={} if self.model is None else self.model.tied,
            every_stage=self.layers_moved,
            experts=self.opened.experts(),
            gathered=self._gathered,
        )
        return ReshardedState(context, self.names_as_saved)

    @property
    def _gathered(self) -> dict[str, tuple[int, int]]:
        """Dimension and whole length of live LoRA adapters that ranks hold parts of, unless the tag says the same."""
        if self.opened.weights is not None:
            return {}
        recorded = {} if self.opened.manifest is None else self.opened.manifest.parameters
        lengths = {}
        for name in filter(is_adapter, self.specs):
            spec = self.specs[name]
            saved = recorded.get(name)
            cut = (self.options.partitions or {}).get(name, spec.partition)
            is_told = saved is not None and saved.explicit
            if cut.known and cut.partition_dim is not None and not is_told and not self.filter.ignores_model(name):
                lengths[name] = (cut.partition_dim, cut.global_shape(spec.shape, self.topology.ep)[cut.partition_dim])
        return lengths

    @cached_property
    def names_as_saved(self) -> OptimizerNames:
        """The names of the optimizer's parameters at the save."""
        is_live = self.optimizer is not None and not self.optimizer.is_filled
        by_position = is_live and self.live_names is None
        return OptimizerNames(self.options.saved_param_names, self.live_names, by_position)

    @cached_property
    def target(self) -> TargetRank:
        """The state that a rank of these sizes would have saved, for dicts that are to be filled."""
        live_partitions = self.options.partitions or {}
        sizes = (self.topology.tp, self.opened.topology.tp)
        partitions = {name: rescaled(name, partition, *sizes) for name, partition in live_partitions.items()}
        names = self.options.saved_param_names
        ignores = self.filter.ignores_model
        return TargetRank(self.opened, Target(self.topology, partitions=partitions, saved_names=names, ignores=ignores))

    def held_names(self) -> list[str] | None:
        """Return the parameters and buffers that the live objects hold; None if they accept any."""
        model_names = [] if self.model is None else self.model.names()
        if (self.model is not None and not model_names) or (self.optimizer is not None and self.live_names is None):
            return None
        return list(dict.fromkeys([*model_names, *(self.live_names or ())]))

    def saved_names(self) -> list[str] | None:
        """Return the optimizer's parameters on this rank's stage, from the caller or the tag.

        If the number of stages differs, those of the first stage.
        """
        saved = self.opened.topology
        live = self.topology
        names_by_stage = self.options.saved_param_names
        stage = live.pp_rank if saved.pp == live.pp else 0
        if names_by_stage is not None and len(names_by_stage) == saved.pp:
            return _flat(names_by_stage[stage])
        return self.opened.optimizer_names(live.coordinates if saved.sizes == live.sizes else Coordinates(stage))

    @property
    def is_mesh_job(self) -> bool:
        """True if a mesh job saved the tag, or loads it: then names that this rank lacks may be other ranks'."""
        return self.opened.mesh is not None or (self.model is not None and self.model.is_placed)

    def crosses(self, optimizer: OptimizerAdapter) -> bool:
        """Return whether one side is a plain optimizer and the other ZeRO-1, so that its state is cut again."""
        plain = (self.opened.parts.optimizer == "plain", optimizer.kind == "plain")
        return plain[0] != plain[1] and not optimizer.is_filled

    def same_sizes(self, part: str) -> bool:
        """Return whether this rank's files are simply those of its coordinates."""
        saved = self.opened.topology
        live = self.topology
        sharded = part == "optimizer" and self.opened.parts.optimizer != "plain"
        # Model files do not depend on dp, nor does a plain optimizer; ZeRO-1 shards do.
        same_dp = saved.dp == live.dp or not sharded
        same = (saved.tp, saved.pp, saved.ep) == (live.tp, live.pp, live.ep)
        return same and same_dp and not self.layers_moved

    @cached_property
    def layers_moved(self) -> bool:
        """True if the number of pipeline stages is unchanged, but this one holds layers that another one held.

        Names that no stage held are new, and show nothing.
        """
        saved = self.opened.topology
        live = self.topology
        if saved.pp == 1 or saved.pp != live.pp or self.model is None or not self.opened.parts.model:
            return False
        near = Coordinates(live.pp_rank, live.ep_rank % saved.ep, live.tp_rank % saved.tp)
        saved_here = self.opened.model_tree(near).keys()
        loaded = ({name, *self.model.aliases(name)} for name in self.model.names() if self._is_loaded(name))
        missing = {name for names in loaded if not saved_here & names for name in names}
        others = (replace(near, pp_rank=stage) for stage in range(saved.pp) if missing and stage != live.pp_rank)
        return any(missing & self.opened.model_tree(at).keys() for at in others)

    def _is_loaded(self, name: str) -> bool:
        """Return whether the parameter or its state is to be loaded."""
        left_out = self.filter.ignores_model(name)
        return not (left_out and (self.optimizer is None or self.filter.covers(f"optim/{name}")))

    @cached_property
    def is_recut(self) -> bool:
        """True if this rank holds other boxes of a parameter than the rank of its coordinates saved."""
        context = self.state.context
        return not all(context.is_as_saved(name, context.live_spec(name, spec)) for name, spec in self.specs.items())

    def is_reordered(self, optimizer: OptimizerAdapter) -> bool:
        """Return whether both sides know their parameters' names, and list them in another order."""
        saved = self.saved_names()
        live = optimizer.parameter_names
        if saved is None or live is None or any(map(is_number, [*saved, *live])):
            return False
        aliases = self.state.context.names
        return len(saved) == len(live) and any(name not in aliases(own) for name, own in zip(saved, live, strict=True))

    def is_regrouped(self, optimizer: OptimizerAdapter, tree: Mapping[str, Any]) -> bool:
        """Return whether parameters may match by name that are in other param groups than at the save."""
        saved = self.opened.optimizer_names(self.topology.coordinates)
        if saved is None or optimizer.parameter_names is None:
            return False
        try:
            form = optimizer.form()
        except OptimizerMismatch:
            return False
        # Another kind of optimizer: validation reports it.
        if form is None or (form.kind == "plain") == ("base_state" in tree):
            return False
        return [len(group["params"]) for group in tree["param_groups"]] != list(form.groups)


def _flat(param_names: Sequence[Sequence[str]] | None) -> list[str] | None:
    return None if param_names is None else [name for group in param_names for name in group]
