"""Proof of a load: live objects, captured again as a save captures them, are what the load meant to put there.

Beside values and digests (`nxd_ckpt.loading.comparison`) these are names, ties, strides, and where tensors come from:
the saved tensors that a live one was put together from are its own, and all of it. What a save of the live tensor would
write in the index, its name and its boxes of the global tensor, is compared with what the index says of the tensors
that were read. Neither names nor places of the plan of the load are used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from nxd_ckpt.core.box import Box
from nxd_ckpt.core.findings import Finding
from nxd_ckpt.core.manifest import ParameterSpec, TensorEntry
from nxd_ckpt.core.partition import Piece
from nxd_ckpt.core.topology import Topology
from nxd_ckpt.formats.optimizer_trees import EXPERT_KEYS, MASTER_WEIGHTS, MASTERS, OPTIMIZER_NAME, VALUE, is_rows
from nxd_ckpt.formats.state import StateTensor
from nxd_ckpt.formats.strides import Stride, fitted, stored_stride
from nxd_ckpt.formats.tensors import (
    Assembly,
    Fragment,
    Path,
    TensorStub,
    contiguous_stride,
    form_of,
    itemsize,
    iter_leaves,
    iter_tensors,
    map_tensors,
)
from nxd_ckpt.live.dtensor import PLAIN, local_of
from nxd_ckpt.live.frozen import LiveState
from nxd_ckpt.live.load_hooks import is_users_object
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.named import NamedObjects, state_of
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.optimizer_state import OptimizerAdapter, Slot
from nxd_ckpt.live.plain import name_of_rows
from nxd_ckpt.live.state_names import SECTIONS, entries_beside, is_below, is_in, parameter_sections, state_entries
from nxd_ckpt.live.torch_xla import is_xla
from nxd_ckpt.loading.comparison import Comparison, Digests, digest_at_once, is_at_once, is_dense, recorded_digest
from nxd_ckpt.loading.load_context import LoadContext, live_optimizer
from nxd_ckpt.loading.trees import LoadTrees
from nxd_ckpt.reshard.summary import ABSENT
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import Leaf, LeafReader

_WEIGHT = "the weight"


class Provenance:
    """Provenance of tensors of a tag, whose indexes ``reader`` knows, on a rank of ``topology``.

    ``aliases`` returns all names of a live parameter.
    """

    def __init__(
        self, opened: OpenTag, topology: Topology, reader: LeafReader, aliases: Callable[[str], Collection[str]]
    ) -> None:
        self._opened = opened
        self._topology = topology
        self._reader = reader
        self._aliases = aliases
        self._in_place: dict[tuple[Any, ...], tuple[bool, StateTensor]] = {}
        self._parameters = {} if opened.manifest is None else opened.manifest.parameters

    def fault(self, about: StateTensor, leaf: Leaf) -> str | None:
        """Return why ``leaf`` is not what belongs into the live tensor; None if it is, or nothing is known."""
        if self._opened.manifest is None or self.is_own(about, leaf) or not leaf.numel:
            return None
        if self._is_rounded(about, leaf):
            return "it was put together from rounded values, and the tag has the exact ones"
        fragments = [fragment for fragment in Assembly.of(leaf).fragments if fragment.source.numel]
        entries = [self._entry(fragment.stub) for fragment in fragments]
        for entry in entries:
            if entry is not None and self._is_anothers(about.name, entry.name):
                return f"it was read from {entry.name}"
        pieces = about.pieces(self._topology, leaf.shape)
        if pieces is None or not self._is_of_one_whole(about):
            return None
        covered = 0
        for fragment, entry in zip(fragments, entries, strict=True):
            if entry is None or entry.pieces is None:
                return None
            own = sum(box.numel for box in _rightly_placed(fragment, entry.pieces, pieces))
            read = (piece.local.intersect(fragment.source) for piece in entry.pieces)  # all but padding
            if own != sum(box.numel for box in read if box is not None):
                return f"elements of {entry.name} in {entry.file} are in the wrong place of it"
            covered += own
        whole = sum(piece.local.numel for piece in pieces)
        return None if covered == whole else f"{whole - covered} of its {whole} elements were not read"

    def is_own(self, about: StateTensor, leaf: Any) -> bool:
        """Return whether ``leaf`` is a whole tensor of the tag, by its own name, in its own place: nearly all are."""
        stored = self._reader.entry(leaf) if isinstance(leaf, TensorStub) else None
        if stored is None or not self._is_named(about.name, stored.name):
            return False
        form = stored.dtype, stored.shape, leaf.dtype, leaf.shape, leaf.stride
        key = id(about.placed), id(about.spec), about.shards, about.shard, id(stored.pieces), form  # of many, few
        verdict = self._in_place.get(key)
        if verdict is None:  # ``about`` is kept, so that nothing else gets the ids of what it has
            pieces = about.pieces(self._topology, stored.shape)
            is_there = pieces is None or pieces == stored.pieces
            verdict = self._in_place[key] = is_there and _is_all(leaf, stored), about
        return verdict[0]

    def form(self, name: str, spec: ParameterSpec | None, leaf: Any, live: Any) -> Any:
        """Return all that is compared of a tensor on the host, but its bytes.

        None for a tensor that was not read by its own name, or has other strides than the saved one.
        """
        stored = self._reader.entry(leaf) if isinstance(leaf, TensorStub) else None
        if stored is None or not self._is_named(name, stored.name):
            return None
        if type(live) not in PLAIN or not (live.is_cpu and is_dense(live)) or live.stride() != leaf.stride:
            return None
        there = stored.dtype, stored.shape, id(stored.pieces), leaf.dtype, leaf.shape, leaf.stride
        return live.dtype, live.shape, id(spec), there

    def unread(self, parameters: Collection[str], read: Collection[str]) -> list[str]:
        """Return the global names of the optimizer's state of live ``parameters`` that the tag has, and was not read.

        ``read`` are global names. Master weights are apart: an optimizer may have none.
        """
        known = () if self._opened.is_renamed else read
        left = [entry.name for entry in self._reader.entries() if entry.name not in known]
        rest = [self._live(name) for name in left if not name.startswith("model/")]
        names = {alias: name for name in parameters for alias in self._aliases(name)} if rest else {}
        named = {(names[name], role): f"optim/{names[name]}/{role}" for name, role in rest if name in names}
        return [at for (_, role), at in named.items() if role != _WEIGHT and at not in read]

    def _is_named(self, live: str, saved: str) -> bool:
        return self._live(saved) == _parts_of(live) if self._opened.is_renamed else saved == live

    def _is_rounded(self, about: StateTensor, leaf: Leaf) -> bool:
        """Return whether a weight is made of one with fewer bits, though the tag has its master weights."""
        stubs = [fragment.stub for fragment in Assembly.of(leaf).fragments]
        own, role = _parts_of(about.name)
        if role != _WEIGHT or all(itemsize(stub.dtype) >= itemsize(leaf.dtype) for stub in stubs):
            return False
        masters = {f"optim/{name}/{MASTER_WEIGHTS}" for name in self._aliases(own)}
        return any(entry.dtype == leaf.dtype and entry.name in masters for entry in self._reader.entries())

    def _entry(self, stub: TensorStub) -> TensorEntry | None:
        """Return what the index says of the stub, if the stub is all of it."""
        entry = self._reader.entry(stub)
        return entry if entry is not None and _is_all(stub, entry) else None

    def _is_anothers(self, live: str, saved: str) -> bool:
        """Return whether a tensor has a ``saved`` name that is not the ``live`` one's, which is there too."""
        own, own_role = _parts_of(live)
        other, role = self._live(saved)
        if own.startswith("#") or other.startswith("#") or not (own and other):
            return False
        names = {*self._aliases(own)}
        if role == own_role and (other in names or self._tied(other) & names):
            return False
        # Several tensors in one memory are stored once, under any of their names.
        return any(name in names and each == own_role for name, each in self._stored)

    def _tied(self, name: str) -> set[str]:
        """Return all names that the parameter with this name had when it was saved."""
        tie = self._parameters[name].tie if name in self._parameters else None
        return set() if tie is None else {other for other, spec in self._parameters.items() if spec.tie == tie}

    def _live(self, saved: str) -> tuple[str, str]:
        parameter, role = _parts_of(saved)
        return parameter and self._opened.live_name(parameter), role

    @cached_property
    def _stored(self) -> set[tuple[str, str]]:
        return {self._live(entry.name) for entry in self._reader.entries()}

    def _is_of_one_whole(self, about: StateTensor) -> bool:
        """Return whether both sides know the cut, and cut a tensor of one shape."""
        manifest = self._opened.manifest
        live = about.spec
        if about.placed is not None or manifest is None:
            return True
        names = self._aliases(_parts_of(about.name)[0])
        saved = next((self._parameters[name] for name in names if name in self._parameters), None)
        if saved is None or live is None or not (saved.partition.known and live.partition.known):
            return False
        if any((spec.partition.partition_dim or 0) >= max(len(spec.shape), 1) for spec in (saved, live)):
            return False
        wholes = [
            spec.partition.global_shape(spec.shape, at.ep)
            for spec, at in ((saved, manifest.topology), (live, self._topology))
        ]
        return wholes[0] == wholes[1]


def _is_all(stub: TensorStub, entry: TensorEntry) -> bool:
    is_alike = (entry.dtype, entry.shape) == (stub.dtype, stub.shape)
    return is_alike and stub.stride == contiguous_stride(stub.shape)


def _rightly_placed(fragment: Fragment, saved: Sequence[Piece], live: Sequence[Piece]) -> Iterator[Box]:
    """Yield the boxes of the fragment's source whose elements are the same elements of the global tensor as live."""
    source = fragment.source
    target = fragment.target
    for piece in saved:
        inside = piece.local.intersect(source)
        if inside is None:
            continue
        there = inside.shifted(source.offset).moved(target.offset)
        for own in live:
            common = there.intersect(own.local)
            if common is None:
                continue
            back = common.shifted(target.offset).moved(source.offset)
            if _moved(back, piece) == _moved(common, own):
                yield back


def _moved(part: Box, piece: Piece) -> Box:
    """Return the place in the global tensor of ``part``, a box of the local one inside ``piece``."""
    return part.shifted(piece.local.offset).moved(piece.box.offset)


def _parts_of(name: str) -> tuple[str, str]:
    """Return the parameter of a global name, "" if there is none, and what of it the tensor is."""
    part, _, rest = name.partition("/")
    if part == "model":
        return rest, _WEIGHT
    if part != "optim":  # a rank's own value, apart from the state of all
        return "", rest
    parameter, _, entry = rest.rpartition("/")
    return parameter, _WEIGHT if entry == MASTER_WEIGHTS else entry


_NOT_OPTIONS = ("params", "param_names", OPTIMIZER_NAME)


class Proof(Comparison):
    """Comparison of live objects with what a load meant, by ``trees`` and the state of a scheduler.

    ``before`` are the names of state that the live objects had before the load.
    """

    def __init__(
        self,
        context: LoadContext,
        trees: LoadTrees,
        reader: LeafReader,
        digest: Digests,
        *,
        scheduler: Any,
        before: Collection[str],
        **how: Any,
    ) -> None:
        super().__init__(reader, digest, **how)
        self._context = context
        self._trees = trees
        self._scheduler = scheduler
        self._before = before

    def run(
        self, model: Any, optimizer: Any, scheduler: Any, content: tuple[Any, Any]
    ) -> list[Finding]:
        """Return the differences: problems, and doubts where user code that the load called may explain them.

        ``content`` is what was saved of the rank's content, and the dict that was filled with it.
        """
        self._sees_scheduler = is_users(scheduler)
        live = None
        is_same = False
        with self.capturing("model"):
            live = None if model is None else open_model(model)
            before = self._trees.model
            is_same = live is not None and before is not None and live.is_as(before)
            self._compare_model(live, is_same)
        with self.capturing("optimizer"):
            context = self._context
            if optimizer is not None:
                opened = context.optimizer  # the names that it has are those of the model's tensors
                if opened is None or not (is_same and opened.is_still(optimizer)):
                    opened = live_optimizer(context.opened, context.topology, live, optimizer, context.options)
                self._compare_optimizer(opened, opened.live_state())
        with self.capturing("scheduler"):
            self._compare_scheduler(scheduler, state_of(scheduler))
        saved, filled = content
        meant = self._context.filter.pruned("rank_content", saved)
        if meant:
            self.compare("parts", "rank_content", meant, filled, False)
        return self.finish()

    def _compare_model(self, live: ModelAdapter | None, is_same: bool) -> None:
        """Compare the model; ``is_same``: its tensors are those of before the load."""
        trees = self._trees
        if live is None or not trees.names or trees.model is None:
            return
        before = trees.model
        values = live.live
        known = before if is_same else live  # what follows from the tensors is known then
        # Of tensors that this load made, all in a dict, no cuts are known.
        is_filled = not any(is_in("model", name) for name in self._before)
        specs = self._context.specs if is_same or is_filled else live.parameters(self._context.topology.tp)
        cuts = self._context.options.partitions or {}
        specs = {**specs, **{name: replace(specs[name], partition=cuts[name]) for name in specs.keys() & cuts}}
        placed = live.placed([name for name in trees.names if name in values])
        provenance = Provenance(self._context.opened, self._context.topology, self._reader, known.aliases)
        seen_by_users = trees.seen_by_users
        # Forms of tensors that are in their place, and whether these are small: of others, only the bytes are compared.
        forms: dict[Any, bool] = {}
        for name in trees.names:
            leaf = trees.model_tree[name]
            value = values.get(name, ABSENT)
            by_user = name in seen_by_users
            if by_user and value is ABSENT:
                continue  # under what name its module keeps it, only the module knows
            what = f"model/{name}"
            if not (is_same or is_filled) and name in before.live and before.aliases(name) != live.aliases(name):
                message = f"it was one tensor with {before.aliases(name)}, and is one with {live.aliases(name)} now"
                self.find("ties", what, message, by_user)
            form = provenance.form(what, specs.get(name), leaf, value)
            is_small = forms.get(form)
            if is_small and digest_at_once(value) == leaf.storage.crc32:
                continue  # as nearly all
            if is_small is False:
                self.compare_bytes("weights", what, leaf, value, by_user)
            elif not isinstance(leaf, (TensorStub, Assembly)):
                self.compare("weights", what, leaf, value, by_user)
            elif self.compare_tensors("weights", what, leaf, value, by_user):
                about = StateTensor(what, specs.get(name), placed=placed.get((name,)))
                fault = provenance.fault(about, leaf)
                if fault is not None:
                    self.find("weights", what, fault, by_user)
                elif form is not None and provenance.is_own(about, leaf):
                    forms[form] = is_at_once(value)
            if what not in self._before and isinstance(value, torch.Tensor):  # this load made it, and chose its strides
                self._compare_stride(what, leaf, value)
        left = {*trees.missing, *trees.left}
        for name in known.missing(trees.names) if values.keys() - set(trees.names) else ():
            if name not in left and not self._context.filter.ignores_model(name) and not known.passes_user_code(name):
                self.find("weights", f"model/{name}", "the live model has it, and nothing was loaded into it", False)

    def _compare_optimizer(self, optimizer: OptimizerAdapter, state: LiveState) -> None:
        saved = self._trees.optimizer_tree
        by_user = optimizer.passes_user_code
        if saved and not optimizer.is_filled:
            saved = _as_live(saved, state.tree)
            state = replace(state, tree=_with_rows(state.tree, saved))
        if saved:
            self._compare_entries(optimizer, state, saved, by_user)
        if self._trees.names or saved:
            self._compare_shards(optimizer, state, saved, by_user)

    def _compare_entries(
        self, optimizer: OptimizerAdapter, state: LiveState, tree: dict[str, Any], by_user: bool
    ) -> None:
        names = self._trees.names_by_index
        is_dict = optimizer.is_filled
        aliases = (lambda name: [name]) if self._trees.model is None else self._trees.model.aliases
        provenance = Provenance(self._context.opened, self._context.topology, self._reader, aliases)
        read = set[str]()
        for path, name, saved in state_entries(tree, names):
            read.add(name)
            if path[0] == MASTERS and MASTERS not in state.tree:
                continue
            kind = "weights" if path[0] == MASTERS else "moments"
            for inner, leaf, now in self.compare(kind, name, saved, _at(state.tree, path), by_user):
                if isinstance(now, torch.Tensor):
                    at = (*path, *inner)
                    about = state.described(at, now)
                    fault = self._other_kind(leaf, about) or provenance.fault(about, leaf)
                    if fault is not None:
                        self.find(kind, about.name, fault, by_user)
                    if name not in self._before:
                        self._compare_stride(name, leaf, now, None if is_dict else state.stride(at, now), not is_dict)
        self._compare_options(tree, state.tree, by_user)
        for path, name in entries_beside(state.tree, tree, names):
            is_known = path[0] == MASTERS or path[2:] == (VALUE,) or self._trees.keeps(name)
            if not is_known and not (path[0] not in tree and by_user):
                self.find("moments", name, "the live optimizer has it, and the tag does not", by_user)
        if not is_dict:
            for name in provenance.unread([name for name in names if not name.startswith("#")], read):
                if not (self._context.filter.ignores(name) or is_below(name, self._trees.rank_state.values)):
                    self.find("moments", name, "the tag has it, and it was not loaded", by_user)

    def _other_kind(self, leaf: Leaf, about: StateTensor) -> str | None:
        """Return the fault of a plain tensor in place of a DTensor, or the reverse; None if there is none."""
        expected = id(leaf) in self._placed
        if expected == (about.placed is not None) or is_rows(about.name):
            return None
        kinds = ("a DTensor", "a plain tensor") if expected else ("a plain tensor", "a DTensor")
        return "expected {}, found {}".format(*kinds)

    @cached_property
    def _placed(self) -> set[int]:
        """The leaves of the optimizer that are loaded into DTensors, by their ids."""
        placed = self._trees.optimizer_placed
        leaves = iter_tensors(self._trees.optimizer_tree) if placed else ()
        return {id(leaf) for path, leaf in leaves if path in placed}

    def _compare_options(self, tree: Mapping[str, Any], live: Mapping[str, Any], by_user: bool) -> None:
        """Compare the options of param groups, and what a state dict has beside them and the state."""
        for number, options in enumerate(tree.get("param_groups", ())):
            # With experts apart, a group has one half for these and one for the others: an empty one has no meaning.
            is_compared = options["params"] or EXPERT_KEYS[0] not in tree
            for option, value in options.items():
                if is_compared and option not in _NOT_OPTIONS:
                    now = _at(live, ("param_groups", number, option))
                    name = f"optim/param_groups.{number}.{option}"
                    self.compare("groups", name, value, now, by_user or self._sees_scheduler)
        others, now = ({key: own[key] for key in own.keys() - {"param_groups", *SECTIONS}} for own in (tree, live))
        values = dict(iter_leaves(now))
        for path, leaf in iter_leaves(others):
            if path in values:  # those of its own may be left alone
                self.compare("moments", "optim/" + ".".join(map(str, path)), leaf, values[path], by_user)

    def _compare_shards(
        self, optimizer: OptimizerAdapter, state: LiveState, saved: Mapping[str, Any], by_user: bool
    ) -> None:
        """Compare ZeRO-1's shards with the master weights that were loaded, or with the loaded parameters."""
        loaded = saved.get(MASTERS, {})
        for index, slot in optimizer.shards(state.tree).items():
            name = slot.global_name(MASTER_WEIGHTS)
            if index in loaded:
                if MASTERS not in state.tree:
                    self.compare("weights", name, loaded[index], slot.key, by_user)
            elif self._trees.keeps(name):
                continue
            elif self.compare_shard(slot, by_user) and saved and self._has_exact(slot):
                self.find("weights", name, "it is cut from the rounded parameter; the tag has it exact", by_user)
        context = self._context
        if saved and self._trees.model is None and context.opened.parts.model and context.same_sizes("model"):
            self._compare_cut(optimizer.shards(saved), loaded)

    def _compare_cut(self, shards: Mapping[Any, Slot], loaded: Mapping[Any, Any]) -> None:
        """Compare the parameters that shards were cut from with the tag's, in a load that leaves them as they are."""
        names = self._context.live_names or self._context.saved_names() or ()
        slots = zip(names, shards.items(), strict=False)
        kept = self._trees.keeps
        ignored = self._context.filter.ignores_model
        cut = {
            name: slot
            for name, (index, slot) in slots
            if not (index in loaded or ignored(name) or kept(slot.global_name(MASTER_WEIGHTS)))
        }
        specs = {name: slot.spec for name, slot in cut.items() if slot.spec is not None}
        for name, leaf in self._context.state.model.tree(specs, specs).items():
            parameter = cut[name].parameter
            # One that was cast on purpose cannot be loaded later, either; and nothing is read for this.
            if recorded_digest(leaf) is not None and form_of(leaf) == form_of(parameter):
                what = f"model/{name}, of which ZeRO-1's shard was cut (load the model first, or with the optimizer)"
                self.compare("weights", what, leaf, parameter, False)

    def _has_exact(self, slot: Slot) -> bool:
        """Return whether the load has the values of a shard, as master weights or as weights that were rounded."""
        model = self._trees.model
        if self._context.filter.ignores(slot.global_name(MASTER_WEIGHTS)):
            return False  # then the rounded ones are meant
        names = [slot.name] if model is None else model.aliases(slot.name)
        weights = [self._trees.model_tree.get(name) for name in names]
        stubs = [each.stub for leaf in weights if isinstance(leaf, Assembly) for each in leaf.fragments]
        dtype = slot.master_dtype
        is_rounded = any(leaf is not None and form_of(leaf)[0] != dtype for leaf in weights)
        return is_rounded and (
            any(stub.dtype == dtype for stub in stubs)
            or any(f"optim/{name}/{MASTER_WEIGHTS}" == entry.name for entry in self._reader.entries() for name in names)
        )

    def _compare_scheduler(self, scheduler: Any, state: Any) -> None:
        if scheduler is None or self._scheduler is None:
            return
        objects = scheduler.items() if isinstance(scheduler, NamedObjects) else ()
        by_users = {name for name, one in objects if is_users(one)}
        now = dict(iter_leaves(state))
        for path, leaf in iter_leaves(self._scheduler):
            by_user = path[1] in by_users if objects and len(path) > 1 else self._sees_scheduler
            name = "/".join(map(str, ("scheduler", *path)))
            self.compare("scheduler", name, leaf, now.get(path, ABSENT), by_user)

    def _compare_stride(
        self, name: str, leaf: Any, now: torch.Tensor, noted: Stride | None = None, of_parameter: bool = False
    ) -> None:
        """Compare strides: those that were noted, which a save would note again, or those of the parameter."""
        if not of_parameter and type(leaf) is TensorStub and leaf.stride == now.stride() and noted is None:
            return  # as nearly all
        if not isinstance(leaf, (TensorStub, Assembly)) or is_xla(now) or is_rows(name) or not leaf.numel:
            return
        saved = stored_stride(leaf)
        found = local_of(now).stride()
        if of_parameter and (saved is None or saved.as_parameter):
            expected = "those of its parameter"
            is_equal = noted is None or noted.as_parameter
        else:
            steps = contiguous_stride(leaf.shape) if saved is None else fitted(saved.steps, leaf.shape)
            expected = str(steps)
            is_equal = steps == found
        if not is_equal:
            self.find("moments", name, f"expected strides {expected}, as it was saved, found {found}", False)


def is_users(scheduler: Any) -> bool:
    """Return whether the state of a scheduler, or of one in a list or of several by name, is set by user code."""
    if isinstance(scheduler, NamedObjects):
        return any(map(is_users, scheduler.values()))
    if isinstance(scheduler, (list, tuple)):
        return any(map(is_users, scheduler))
    return scheduler is not None and is_users_object(scheduler)


def _at(tree: Any, path: Path) -> Any:
    """Return what is at the path of a state dict; `ABSENT` if nothing is."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key, ABSENT)
        else:
            tree = tree[key] if isinstance(tree, list) and key < len(tree) else ABSENT
    return tree


def _with_rows(live: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``live`` state dict with the rows that older tags have in place of a rank's own plain tensors."""
    state = {}
    for index, entries in saved.get("state", {}).items():
        rows = [entry for entry in entries if is_rows(entry)] if isinstance(entries, dict) else []
        if rows:
            now = state[index] = dict(live["state"].get(index, {}))
            for entry in rows:
                own = now.pop(name_of_rows(entry), ABSENT)
                now[entry] = map_tensors(own, lambda tensor: tensor.unsqueeze(0), torch.Tensor)
    return {**live, "state": {**live["state"], **state}} if state else live


def _as_live(tree: dict[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with the indices that its parameters have in the ``live`` one."""
    if all(key in tree and key in live for key in EXPERT_KEYS):
        offsets = {"base_state": "ep_base_state_offset", "shape_info": "ep_shape_info_offset"}
        moved = {key: live[key] for key in EXPERT_KEYS}
        for section in parameter_sections(tree):
            first = offsets.get(section, "ep_shape_info_offset")
            by = live[first] - tree[first]
            moved[section] = {at + by if at >= tree[first] else at: entries for at, entries in tree[section].items()}
        return {**tree, **moved}
    indices = [index for group in tree["param_groups"] for index in group["params"]]
    if "base_state" in tree or indices == list(range(len(indices))):
        return tree
    place = {index: number for number, index in enumerate(indices)}
    return {**tree, "state": {place.get(index, index): entries for index, entries in tree.get("state", {}).items()}}
