"""Planning of a load: the trees of a tag that fit the live objects of a rank.

The model comes by name (`nxd_ckpt.reshard.resharded_state`): where this rank holds the boxes that were saved, a leaf
is the saved tensor itself. The optimizer comes by name on other sizes, and if its parameters are in another order. On
the sizes of the save its tree is the saved one, which needs no names.

A job that trains rounded weights beside master weights may load weights that were saved in full precision: the master
weights take the saved values, bit for bit, and the model takes their rounding. A model in full precision may take saved
master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.manifest import ParameterSpec
from nxd_ckpt.core.name_patterns import NOT_LIVE, PARAM_GROUPS
from nxd_ckpt.core.partition import Piece, zero1_pieces, zero1_shape
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import IncompatibleState, OptimizerMismatch, PartLost, PartNotFound
from nxd_ckpt.formats.optimizer_trees import MASTER_WEIGHTS, MASTERS, OPTIMIZER_NAME
from nxd_ckpt.formats.state import OptimizerForm, OptimizerSlot
from nxd_ckpt.formats.tensors import Assembly, TensorStub, form_of, is_tensor
from nxd_ckpt.layouts.files import MissingTensor
from nxd_ckpt.layouts.payload import refuse_numbers
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.optimizer import check_class
from nxd_ckpt.live.optimizer_state import OptimizerAdapter
from nxd_ckpt.live.state_names import without
from nxd_ckpt.loading.collective_checks import ComparedNames
from nxd_ckpt.loading.load_context import LoadContext
from nxd_ckpt.loading.mapped_weights import MappedWeights
from nxd_ckpt.loading.parts import require_kinds
from nxd_ckpt.loading.rank_state import rank_state
from nxd_ckpt.loading.trees import LoadTrees, local_tree, part_of
from nxd_ckpt.reshard.resharded_optimizer import ReshardedOptimizer
from nxd_ckpt.reshard.resharding import check_partitions
from nxd_ckpt.reshard.saved_optimizer import is_number
from nxd_ckpt.tag.reading import Leaf, LeafReader
from nxd_ckpt.tag.side_by_side import are_equal


@dataclass(frozen=True)
class ExactWeights:
    """Full-precision weights for master weights, partitioned like this rank's parameters.

    ``by_name`` has them by their names in the model, of which tied ones have several; ``by_slot`` by slots of the
    optimizer.
    """

    by_name: Mapping[str, Leaf]
    by_slot: Sequence[tuple[int, OptimizerSlot, Leaf]]

    def rounded(self, tree: Mapping[str, Any], live: Mapping[str, ParameterSpec]) -> dict[str, Any]:
        """Return the model's tree with these weights in the dtype of the ``live`` ones."""
        cast = {name: Assembly.of(leaf).cast(live[name].dtype) for name, leaf in self.by_name.items()}
        return {**tree, **cast}

    def put_into(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return a ZeRO-1 optimizer's tree with this rank's shards of these; saved master weights stay."""
        shards = {number: _shard_of(leaf, slot) for number, slot, leaf in self.by_slot}
        return {**tree, MASTERS: {**shards, **tree.get(MASTERS, {})}} if shards else tree


def of_other_dtype(tree: Mapping[str, Any], live: Mapping[str, ParameterSpec]) -> dict[str, Leaf]:
    """Return the tensors of a model's tree that were saved in another dtype than this rank's ``live`` ones have."""
    tensors = ((name, leaf) for name, leaf in tree.items() if name in live and is_tensor(leaf))
    return {name: leaf for name, leaf in tensors if form_of(leaf)[0] != live[name].dtype}


def exact_weights(
    saved: Mapping[str, Leaf],
    form: OptimizerForm,
    aliases: Callable[[str], Sequence[str]],
    ignores: Callable[[str], bool],
) -> ExactWeights:
    """Return the ``saved`` weights for which an optimizer of that ``form`` has master weights of their dtype.

    ``aliases`` gives all names of a parameter; ``ignores`` selects master weights, by global name, that are not loaded.
    """
    by_name: dict[str, Leaf] = {}
    by_slot = []
    for number, slot in enumerate(form.slots):
        weights = {name: saved[name] for name in aliases(slot.name) if name in saved}
        fits = weights and all(form_of(leaf) == (slot.master_dtype, slot.spec.shape) for leaf in weights.values())
        if fits and not ignores(f"optim/{slot.name}/{MASTER_WEIGHTS}"):
            by_name |= weights
            by_slot.append((number, slot, next(iter(weights.values()))))
    return ExactWeights(by_name, by_slot)


def _shard_of(leaf: Leaf, slot: OptimizerSlot) -> Leaf:
    whole = Box.whole(leaf.shape)
    pieces = zero1_pieces([Piece(whole, whole)], leaf.shape, slot.shards, slot.shard)
    return part_of(leaf, pieces, zero1_shape(leaf.shape, slot.shards))


class LoadPlanner:
    """Planner of one rank's load of the tag of ``context``.

    ``is_alone``: no other rank says which names of the tag it holds.
    """

    def __init__(self, context: LoadContext, is_alone: bool = False, scheduler: Any = None) -> None:
        self._scheduler = scheduler
        self._is_alone = is_alone
        self._parameters = ComparedNames()
        self._context = context
        self._opened = context.opened
        self._topology = context.topology
        self._options = context.options
        self._filter = context.filter
        self._model = context.model
        self._optimizer = context.optimizer
        self._is_regrouped = False
        self._group_order: list[list[int]] | None = None
        self._left: Sequence[str] = ()
        self._exact = ExactWeights({}, ())
        if self._filter and self._model is not None and self._opened.parts.model:
            saved = self._context.state.model.values
            aliases = self._model.aliases
            tied = {name: leaf for name, leaf in saved.items() if name in self._model.tied}
            pairs = unequal_ties(tied, aliases, self._opened.reader)
            self._filter.know_apart({name for pair in pairs for name in pair})

    def names(self) -> Iterator[str]:
        """Yield the global names of the tag's model and optimizer, and of the live ones."""
        live_model = [] if self._model is None else self._model.names()
        saved = self._context.state.model.names.values()
        yield from (f"model/{name}" for names in (live_model, *saved) for name in names)
        if self._opened.parts.optimizer is None and self._optimizer is None:
            return
        yield PARAM_GROUPS
        if self._optimizer is not None:
            self._optimizer.know_names(self._names_by_index(self._optimizer))
        live = () if self._optimizer is None else self._optimizer.entries()
        entries = [*live, *self._saved_entries()]
        yield from entries
        listed_parameters = {entry.rpartition("/")[0] for entry in entries}
        yield from (
            path
            for path in (f"optim/{name}" for name in self._context.live_names or ())
            if path not in listed_parameters
        )

    def _saved_entries(self) -> Iterator[str]:
        state = self._context.state
        if self._opened.parts.optimizer is None or self._filter.covers("optim"):
            return
        try:
            source = state.optimizer
            if self._optimizer is not None and self._optimizer.is_filled:
                source = state.optimizer_by(replace(self._context.names_as_saved, by_position=False))
            yield from source.entries()
        except OptimizerMismatch:  # the parameters are unknown; if that matters, the load reports it
            return

    def compared_names(self) -> ComparedNames:
        """Return the names of the model, here and in the tag; none of a model that takes anything, or is left out."""
        model = self._model
        chosen = self._filter.of_model
        if model is None or self._filter.covers("model") or not model.names():
            return ComparedNames()
        if isinstance(self._opened, MappedWeights):
            names = self._opened.compared_names(chosen)
            return replace(names, unknown=[]) if self._is_alone else names
        saved = chosen(self._context.state.model.stages)
        taken = [name for name in saved if model.takes(name)]
        live = chosen(model.names())
        return ComparedNames(
            present=list(dict.fromkeys([*live, *taken])),
            missing=[*chosen(model.missing(saved))],
            unknown=[] if self._sees_names_of_others else [name for name in saved if not model.takes(name)],
            matches=bool(taken),
        )

    @property
    def _sees_names_of_others(self) -> bool:
        """True if names in the tag may belong to other ranks, and none of these can be asked."""
        return self._is_alone and (self._context.is_mesh_job or not self._context.state.context.holds_all)

    def trees(self) -> LoadTrees:
        """Return the trees to load. Reads trees, and no tensor.

        Raises:
            IncompatibleState: the tag and the live objects do not fit.
            PartNotFound: a tensor is in no file.
        """
        model = self._model
        optimizer = self._optimizer
        filtered = self._filter
        trees = LoadTrees(model, optimizer)
        objects = {"model": model, "optimizer": optimizer, "scheduler": self._scheduler}
        parts = [part for part, live in objects.items() if live is not None]
        trees.rank_state = rank_state(self._opened, self._topology, filtered, parts)
        if model is not None and not filtered.covers("model"):
            trees.model_tree = self._rounded(model, self._own_part(model, self._model_tree(model)))
            require_kinds(model.live, trees.model_tree, self._opened.where, self._opened.refused)
            trees.names = model.validate(trees.model_tree)
            if isinstance(self._opened, MappedWeights):
                trees.model_tree = self._opened.leaves(trees.names, filtered.ignores_model)
            trees.model_placed = model.placed(trees.names)
            trees.model_tree = local_tree(trees.model_tree, trees.model_placed)
        if optimizer is not None and not filtered.covers("optim"):
            self._refuse_positions(optimizer)
            tree = self._optimizer_tree(optimizer)
            if self._group_order is not None:
                trees.rank_state = trees.rank_state.regrouped(self._group_order)
            self._refuse_bare_groups(tree, optimizer)
            if optimizer.stepping is not None:
                whole = {} if self._filter.is_selective else tree.get("base_state", tree.get("state", {}))
                check_class(optimizer.stepping, tree["param_groups"], whole)
            trees.optimizer_tree = self._exact.put_into(self._filtered(tree, optimizer))
            trees.names_by_index = self._names_by_index(optimizer)
            optimizer.validate(trees.rank_state.put_into("optimizer", trees.optimizer_tree, trees.names_by_index))
            trees.optimizer_placed = optimizer.placed(trees.optimizer_tree, self._plain_entries())
            trees.optimizer_tree = local_tree(trees.optimizer_tree, trees.optimizer_placed)
        trees.take_own()
        if model is not None:
            tied = {name: trees.model_tree[name] for name in trees.names if name in model.tied}
            refuse_unequal_ties(self._opened.where, tied, model.aliases, self._opened.reader)
            if isinstance(self._opened, MappedWeights):
                trees.names = self._opened.without_ties(trees.names)
        trees.refuse_stale_shards()
        trees.is_regrouped = self._is_regrouped
        trees.parameters = self._parameters
        trees.left = self._left
        trees.keeps = filtered.keeps(trees.names)
        return trees

    def _rounded(self, model: ModelAdapter, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with the weights for master weights (``_exact``) rounded to the live dtypes."""
        if self._optimizer is None:
            return tree
        differing = of_other_dtype(tree, self._context.specs)
        if not differing:
            return tree
        try:
            form = self._optimizer.form()
        except OptimizerMismatch:  # its form is unknown
            return tree
        if form is not None:
            self._exact = exact_weights(differing, form, model.aliases, self._filter.ignores)
        return self._exact.rounded(tree, self._context.specs)

    def _own_part(self, model: ModelAdapter, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with master weights in place of rounded weights, if the live ones have their dtype.

        This is for a mesh, and for a plain optimizer that takes ZeRO-1's state.
        """
        optimizer = self._optimizer
        becomes_plain = optimizer is not None and optimizer.kind == "plain" and self._context.crosses(optimizer)
        if not self._opened.parts.master_weights or not (model.is_placed or becomes_plain):
            return tree
        return {
            name: self._master(name, leaf, widens=becomes_plain) if is_tensor(leaf) else leaf
            for name, leaf in tree.items()
        }

    def _master(self, name: str, leaf: Any, *, widens: bool) -> Any:
        """Return the weight; if its dtype is not the live one, its master weight, if that has the live dtype.

        If it ``widens``, a frozen weight, which has no master weight, becomes float32, with the same value.
        """
        spec = self._context.specs.get(name)
        if spec is None or spec.dtype == form_of(leaf)[0]:
            return leaf
        master = self._context.state.optimizer.value(name, MASTER_WEIGHTS, spec)
        if is_tensor(master) and form_of(master)[0] == spec.dtype:
            return master
        is_wider = (form_of(leaf)[0], spec.dtype) in (("bfloat16", "float32"), ("float16", "float32"))
        return Assembly.of(leaf).cast(spec.dtype) if widens and is_wider else leaf

    def _refuse_bare_groups(self, tree: dict[str, Any], optimizer: OptimizerAdapter) -> None:
        """Raise OptimizerMismatch for param groups whose options were left out of the save, unless they are now too."""
        names = iter(self._names_by_index(optimizer))
        for number, group in enumerate(tree["param_groups"]):
            own = [name for _, name in zip(group["params"], names, strict=False)]
            left_out = self._filter.ignores(PARAM_GROUPS) or all(self._filter.covers(f"optim/{name}") for name in own)
            if group["params"] and len(group) == 1 and not left_out and not optimizer.is_filled:
                raise OptimizerMismatch(
                    f"optimizer: {self._opened.where} was saved without the options (lr, ...) of param group {number}; "
                    f"ignore_keys=[{PARAM_GROUPS!r}] keeps the live ones"
                )

    def _refuse_positions(self, optimizer: OptimizerAdapter) -> None:
        """Raise OptimizerMismatch if filters use names, but only positions identify the optimizer's parameters."""
        if optimizer.is_filled:
            return
        mapping = self._filter.renaming.key_mapping
        live = self._context.live_names
        if live is None:
            live_model = [] if self._model is None else self._model.names()
            copies = optimizer.kind == "zero1" and any(map(self._filter.ignores_model, live_model))
            if mapping or copies:
                why = "key_mapping= needs them" if mapping else "they decide whose weights are left out"
                raise OptimizerMismatch(
                    f"optimizer: the names of its parameters are not known, but {why}; pass the live model itself, or "
                    "param_names="
                )
            return
        exchanges = any(saved in live for name, saved in mapping.items() if name != saved)
        if exchanges and self._context.saved_names() is None:
            raise OptimizerMismatch(
                f"optimizer: {self._opened.where} does not record which parameters its entries belong to, and their "
                "positions are ambiguous because key_mapping= exchanges live names; pass saved_param_names="
            )

    def _plain_entries(self) -> set[str]:
        opened = self._opened
        entries = () if opened.mesh is None else opened.mesh.plain_entries()
        return {f"optim/{opened.live_name(parameter)}/{entry}" for parameter, entry in entries}

    def _filtered(self, tree: dict[str, Any], optimizer: OptimizerAdapter) -> dict[str, Any]:
        """Return an optimizer's tree without the state that is left out."""
        if not self._filter.is_selective:
            return tree
        return without(tree, self._names_by_index(optimizer), self._filter.ignores, self._filter.covers)

    def _names_by_index(self, optimizer: OptimizerAdapter) -> Sequence[str]:
        """Return the names that globs match.

        The live ones; for a dict the tag's, if any; else none, which stands for "#0", "#1".
        """
        if self._context.live_names is not None:
            return self._context.live_names
        return (optimizer.is_filled and self._opened.optimizer_names(self._topology.coordinates)) or ()

    def _model_tree(self, model: ModelAdapter) -> dict[str, Any]:
        chosen = self._filter.of_model
        if self._context.specs:  # else a dict to be filled
            check_partitions(self._options.partitions or {}, self._context.specs, self._topology)
        takes_all = not model.names()  # a dict to be filled
        if takes_all and not self._context.same_sizes("model"):
            tree = self._context.target.model_tree()
        else:
            source = self._context.state.model
            loaded = [name for name in chosen(source.stages) if takes_all or model.takes(name)]
            specs = {name: self._context.specs[name] for name in loaded if name in self._context.specs}
            tree = source.tree(specs, loaded)
        if takes_all:
            tree = {name: leaf for name, leaf in tree.items() if not name.startswith(NOT_LIVE)}
        return self._completed(tree)

    def _optimizer_tree(self, optimizer: OptimizerAdapter) -> dict[str, Any]:
        context = self._context
        same = context.same_sizes("optimizer") and not context.is_recut and not context.crosses(optimizer)
        if same and not context.is_reordered(optimizer):
            tree = self._opened.optimizer_tree(self._topology.coordinates, context.live_names)
            if not context.is_regrouped(optimizer, tree):
                if self._opened.manifest is None:
                    refuse_numbers(tree, context.live_names, self._opened.where)
                return tree
        form = optimizer.form()
        if form is None:
            return context.target.optimizer_tree()
        source = context.state.optimizer
        filtered = self._filter
        if context.crosses(optimizer):
            self._refuse_crossing(form, source)
        live = [slot.name for slot in form.slots]
        self._parameters = self._compared_parameters(source, live)
        fresh = {f"optim/{name}" for name in self._parameters.missing}

        def covers(name: str) -> bool:
            return name in fresh or filtered.covers(name)

        tree = source.tree(form, filtered.ignores, covers)
        groups = source.group_order(form, covers)
        order = [saved[0] for saved in groups]
        self._group_order = [*groups, *([number] for number in range(len(order), len(form.groups)))]
        for number, (group, options) in enumerate(zip(tree["param_groups"], form.options, strict=False)):
            names = [live[index] for index in group["params"]] if form.ordinary is None else []
            if names and fresh.issuperset(f"optim/{name}" for name in names):
                group.update(options)
                self._group_order[number] = []
        mesh = self._opened.mesh
        stage_only = mesh is not None and mesh.takes_own  # then other stages' groups come after its own
        self._is_regrouped = order != list(range(len(order) if stage_only else len(source.groups)))
        self._refuse_joined(form, order)
        return tree

    def _refuse_crossing(self, form: OptimizerForm, source: ReshardedOptimizer) -> None:
        """Raise OptimizerMismatch if a plain optimizer cannot go on from ZeRO-1's state, or the reverse."""
        where = self._opened.where
        kinds = ("ZeRO-1", "plain") if form.kind == "plain" else ("plain", "ZeRO-1")
        if self._context.live_names is None or any(map(is_number, source.slots)):
            raise OptimizerMismatch(
                f"optimizer: {where} holds the state of a {kinds[0]} optimizer, the live one is {kinds[1]}. One takes "
                "the other's state by the names of their parameters, which are not known: pass the live model too, or "
                "param_names=; if the tag does not record them, saved_param_names="
            )
        for slot in form.slots if form.kind == "plain" else ():
            saved = source.slot(slot.name, slot.spec)
            shaped = [leaf for leaf in (saved.state if saved else {}).values() if is_tensor(leaf) and form_of(leaf)[1]]
            dtypes = {form_of(leaf)[0] for leaf in shaped}
            if dtypes and slot.spec.dtype not in dtypes:
                dtype = sorted(dtypes)[0]
                raise OptimizerMismatch(
                    f"optimizer: {where} holds {dtype} state of a ZeRO-1 optimizer for {slot.name!r}, and the live "
                    f"optimizer steps on {slot.spec.dtype} parameters, without master weights. Cast the model, such as "
                    f"model.to(torch.{dtype}): it takes the master weights, if they were saved"
                )

    def _compared_parameters(self, source: ReshardedOptimizer, live: Sequence[str]) -> ComparedNames:
        """Return the names of the optimizer's parameters, here and in the tag. Under strict none may be missing."""
        context = self._context.state.context
        covers = self._filter.covers
        own = {alias for name in live for alias in context.names(name)}
        unknown = [name for name in source.slots if name not in own and not covers(f"optim/{name}")]
        unknown = [name for name in unknown if not name.startswith(NOT_LIVE)]
        if self._sees_names_of_others:
            unknown = [name for name in unknown if name in self._context.specs and not self._context.is_mesh_job]
        missing = [name for name in live if not source.has(name) and not covers(f"optim/{name}")]
        return ComparedNames(sorted(own), [] if self._options.strict else missing, unknown, bool(live))

    def _refuse_joined(self, form: OptimizerForm, order: Sequence[int]) -> None:
        """Raise OptimizerMismatch if live param groups with different options were one group at the save.

        Its options would become those of all: for example an unintended weight decay of biases.
        """
        if self._filter.ignores(PARAM_GROUPS):
            return
        for number, options in enumerate(form.options[: len(order)]):
            first = order.index(order[number])
            first_options = form.options[first]
            keys = options.keys() - {OPTIMIZER_NAME}
            differ = sorted(key for key in keys if repr(options[key]) != repr(first_options.get(key)))
            if differ:
                raise OptimizerMismatch(
                    f"optimizer: the live param groups {first} and {number} were one group in {self._opened.where}. "
                    f"They differ now in {differ[0]} ({first_options.get(differ[0])!r} and {options[differ[0]]!r}), "
                    "which a load would undo; build the groups as when it was saved, or keep all live options, lr too, "
                    f"with ignore_keys=[{PARAM_GROUPS!r}]: weights and state are loaded either way"
                )

    def _completed(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the tree with weights that were left out taken from the optimizer's master weights."""
        missing = [name for name, leaf in tree.items() if isinstance(leaf, MissingTensor)]
        if not missing:
            return tree
        parts = self._opened.parts
        where = self._opened.where
        if parts.lower_precision_weights or not parts.master_weights:
            raise PartLost(
                f"{where}: {tree[missing[0]].file} (model, {missing[0]}) is missing, with {len(missing) - 1} more: the "
                "tag lost files since it was saved"
            )
        specs = self._context.specs
        weight = self._context.state.weight
        weights = {name: weight(name, tree[name], specs.get(name)) for name in missing}
        lost = [name for name, leaf in weights.items() if isinstance(leaf, MissingTensor)]
        if lost and self._options.strict_names and not self._matches_all_masters:
            raise PartNotFound(
                f"{where}: no file holds {', '.join(lost[:5])} ({len(lost)} tensors; {tree[lost[0]].file} is missing) "
                "and no master weights replace them. Pass the live model and optimizer, or param_names=, so that "
                "master weights can be matched by name; strict=False leaves those tensors as they are"
            )
        if lost and self._topology.dp_rank == self._topology.tp_rank == 0:
            logger.warning(
                "%s: left as they are, because NxD saves no frozen parameters and buffers beside master weights: %s",
                where,
                ", ".join(lost),
            )
        self._left = lost
        return {name: weights.get(name, leaf) for name, leaf in tree.items() if name not in lost}

    @property
    def _matches_all_masters(self) -> bool:
        """True if the live names of all master weights are known: then no others were trained."""
        are_named = not any(map(is_number, self._context.state.optimizer.slots))
        return are_named and self._model is not None and bool(self._model.names())


def refuse_unequal_ties(
    where: str,
    tree: Mapping[str, object],
    aliases: Callable[[str], Sequence[str]],
    reader: Callable[[], AbstractContextManager[LeafReader]],
) -> None:
    """Check that the tensors of ``tree`` under the names of one live tensor (``aliases``) are equal.

    Raises:
        IncompatibleState: two tensors differ, of which a load would drop one.
    """
    for first, name in unequal_ties(tree, aliases, reader):
        raise IncompatibleState(
            f"{where} holds different values for model/{first} and model/{name}, which are one tied tensor in the live "
            f"model; build the model without that tie, or choose one: ignore_keys=['model/{name}'] loads model/{first}"
            f", ignore_keys=['model/{first}'] the other one"
        )


def unequal_ties(
    tree: Mapping[str, object],
    aliases: Callable[[str], Sequence[str]],
    reader: Callable[[], AbstractContextManager[LeafReader]],
) -> Iterator[tuple[str, str]]:
    """Yield pairs of tied names under which ``tree`` has different tensors (`are_equal`)."""
    for name, leaf in tree.items():
        names = aliases(name)
        if len(names) < 2:
            continue
        first = next((alias for alias in names if alias in tree), name)
        first_leaf = tree[first]
        if first == name or not isinstance(leaf, (TensorStub, Assembly)):
            continue
        if isinstance(first_leaf, (TensorStub, Assembly)) and not are_equal(first_leaf, leaf, name, reader):
            yield first, name
