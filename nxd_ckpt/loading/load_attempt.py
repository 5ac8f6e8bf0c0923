"""A load of one tag in its phases: names that fit the live objects, trees that fit, verified bytes, applied ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nxd_ckpt import effects
from nxd_ckpt.core import names
from nxd_ckpt.core.findings import Finding
from nxd_ckpt.core.name_patterns import NOT_LIVE, Renaming
from nxd_ckpt.core.parameter_names import names_without_wrappers, plain_names
from nxd_ckpt.core.suggestions import listed
from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.effects import logger
from nxd_ckpt.errors import CorruptCheckpoint, KeyMismatch, OptimizerMismatch
from nxd_ckpt.formats.tensors import Assembly, form_of, nbytes_of
from nxd_ckpt.hugging_face.mapping import ModelMapping
from nxd_ckpt.live import torch_xla
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.named_models import open_model
from nxd_ckpt.live.state_names import is_in, parameter_sections
from nxd_ckpt.loading.collective_checks import ComparedNames, Unmatched, judge_model, judge_optimizer
from nxd_ckpt.loading.comparison import Witness, is_proved, judge
from nxd_ckpt.loading.filters import Filter
from nxd_ckpt.loading.load_context import LoadContext, load_context
from nxd_ckpt.loading.load_planner import LoadPlanner
from nxd_ckpt.loading.mapped_weights import MappedWeights
from nxd_ckpt.loading.options import LoadRequest
from nxd_ckpt.loading.overwriting import fill_model, overwriting, refuse_lost_elements
from nxd_ckpt.loading.parts import (
    check_scheduler,
    demand,
    keeps_rates,
    lacks_scheduled_rates,
    load_scheduler,
    own_content,
    part_names,
    refuse_forgotten,
    require_taken,
    warn_of_forgotten,
    warn_of_other_shares,
    with_scheduled_rates,
)
from nxd_ckpt.loading.proof import Proof
from nxd_ckpt.loading.shared_reads import SharedReads, delivery_of, open_shared_reads
from nxd_ckpt.loading.shares import ReplicaShares, agree_on_shares
from nxd_ckpt.loading.trees import LoadTrees
from nxd_ckpt.options.execution import SavedNames
from nxd_ckpt.storage.base import Storage
from nxd_ckpt.storage.cached import CachedStorage
from nxd_ckpt.storage.progress import Counter, is_watched, report, watched
from nxd_ckpt.surroundings import gc_paused
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.per_rank import OwnState
from nxd_ckpt.tag.reading import Leaf, LeafReader


def open_cache(storage: Storage, tag: str, work_dir: str | os.PathLike[str] | None) -> CachedStorage:
    """Return ``storage`` with local copies of the files of ``tag``, in its present version; see `CachedStorage`."""
    return CachedStorage(storage, tag, _version(storage, tag), work_dir)


def download(
    cache: CachedStorage, opened: OpenTag, leaves: Iterable[Leaf], *, reports_progress: bool, progress: bool
) -> None:
    """Fetch the files that ``leaves`` are read from; the rank with ``reports_progress`` shows it for all.

    Raises OSError.
    """
    files = {fragment.stub.file for leaf in leaves for fragment in Assembly.of(leaf).fragments}
    keys = {f"{opened.tag}/{file}".lstrip("/") for file in files}
    shown = reports_progress and progress and is_watched()
    total = sum(cache.size(key) for key in keys) if shown else 0
    counter = Counter()
    started = effects.monotonic()
    with watched("download", total, lambda: counter.nbytes, shown):
        nbytes = cache.fetch(keys, counter.add)
    if reports_progress:
        report("downloaded", opened.where, nbytes, started)


def _version(storage: Storage, tag: str) -> bytes:
    """Return bytes that differ when another save takes the tag's name: our manifest, or the times of NxD's files."""
    entries = [entry.name for entry in storage.list(tag) if not entry.is_dir]
    prefix = f"{tag}/" if tag else ""
    if names.MANIFEST in entries:
        return storage.read(f"{prefix}{names.MANIFEST}")
    return repr([(name, storage.time(f"{prefix}{name}")) for name in entries]).encode()


class RenamedTag(OpenTag):
    """The tag ``opened``, as if it had been saved with the live names of ``renaming``.

    Its model has only the renamed parameters. The optimizer's parameters are all there, since their positions count.
    """

    is_renamed = True

    def __init__(self, opened: OpenTag, renaming: Renaming) -> None:
        manifest = opened.manifest
        if manifest is not None:
            items = manifest.parameters.items()
            parameters = {renaming.live(name): spec for name, spec in items if renaming.concerns(name)}
            manifest = replace(manifest, parameters=parameters)
        super().__init__(opened.storage, opened.tag, opened._layout, manifest, opened.identity)
        self.is_one_save: bool = opened.is_one_save
        self._renaming = renaming
        self._seen = set() if opened.manifest is None else set(opened.manifest.parameters)

    def model_tree(self, at: Coordinates) -> dict[str, Any]:
        renaming = self._renaming
        tree = super().model_tree(at)
        self._seen.update(tree)
        return {renaming.live(name): leaf for name, leaf in tree.items() if renaming.concerns(name)}

    def live_name(self, name: str) -> str:
        return self._renaming.live(name)

    def experts(self) -> set[str] | None:
        names = super().experts()
        return None if names is None else set(map(self._renaming.live, names))

    @property
    def saved_names(self) -> set[str]:
        """The parameters seen in the tag so far, by their saved names."""
        return self._seen

    def live_names(self, names: SavedNames) -> SavedNames:
        """Return names of the optimizer's parameters, saved or live ones, as live ones."""
        renaming = self._renaming

        def live(name: str) -> str:
            return name if name in renaming.key_mapping else renaming.live(name)

        return [[list(map(live, group)) for group in stage] for stage in names]

    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        saved = None if param_names is None else [self._renaming.saved(name) for name in param_names]
        return super().optimizer_tree(at, saved)

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        names = super().optimizer_names(at)
        self._seen.update(names or ())
        return None if names is None else [self._renaming.live(name) for name in names]

    @property
    def per_rank(self) -> Sequence[str]:
        return self._live_leaves(super().per_rank)

    @property
    def of_groups(self) -> Sequence[str]:
        return self._live_leaves(super().of_groups)

    def _live_leaves(self, names: Sequence[str]) -> list[str]:
        return [live for name in names if (live := _live_leaf(name, self._renaming))]

    def rank_state(self, rank: int) -> OwnState:
        state = super().rank_state(rank)
        values = {
            live: own._replace(path=(self._renaming.live(own.path[0]), *own.path[1:]))
            if own.path and is_in("model", name)
            else own
            for name, own in state.values.items()
            if (live := _live_leaf(name, self._renaming))
        }
        return replace(state, values=values)


def _live_leaf(name: str, renaming: Renaming) -> str | None:
    """Return the live name of what ranks saved for themselves under ``name``; None if it has none."""
    part, _, rest = name.partition("/")
    parameter, slash, entry = rest.partition("/")
    if part == "scheduler" or (part == "optim" and parameter in ("", "param_groups", "state")):
        return name
    live = renaming.live(parameter)
    return None if live.startswith(NOT_LIVE) else f"{part}/{live}{slash}{entry}"


def unwrapped(opened: OpenTag, mapping: ModelMapping | None = None) -> OpenTag:
    """Return the tag under the names that its parameters have without wrappers, such as torch.compile's.

    Names for which ``mapping`` has a rule stay. Raises UnsupportedState if two names become equal.
    """
    if not opened.parts.model:
        return opened
    plain = plain_names(opened.model_names(), opened.where)
    changed = {name: saved for name, saved in plain.items() if name != saved}
    if mapping is not None:
        with_rules = {match.name for match in mapping.split(changed.values())[0]}
        changed = {name: saved for name, saved in changed.items() if saved not in with_rules}
    return RenamedTag(opened, Renaming(changed)) if changed else opened


class OneModelTag(RenamedTag):
    """One of several models of the tag ``opened``, and its part of the optimizers, under the model's own names."""

    def __init__(self, opened: OpenTag, model: str) -> None:
        """Raise KeyMismatch if no name in the tag begins with ``model``."""
        saved = opened.model_names() if opened.parts.model else set()
        if not any(name.startswith(f"{model}.") for name in saved):
            names = sorted({name.partition(".")[0] for name in saved if "." in name})
            raise KeyMismatch(f"{opened.where} has no model {listed([model], names)}; its names begin with {names}")
        super().__init__(opened, Renaming(prefix=f"{model}."))

    def optimizer_tree(self, at: Coordinates, param_names: Sequence[str] | None = None) -> dict[str, Any]:
        tree = super().optimizer_tree(at, param_names)
        names = super().optimizer_names(at)
        indices = [index for group in tree["param_groups"] for index in group["params"]]
        own = {index for index, name in zip(indices, names or (), strict=False) if not name.startswith(NOT_LIVE)}
        groups = [
            {**group, "params": [index for index in group["params"] if index in own]} for group in tree["param_groups"]
        ]
        parts = {section: _of(tree[section], own) for section in parameter_sections(tree)}
        return {**tree, **parts, "param_groups": [group for group in groups if group["params"]]}

    def optimizer_names(self, at: Coordinates) -> list[str] | None:
        names = super().optimizer_names(at)
        return None if names is None else [name for name in names if not name.startswith(NOT_LIVE)]


def _of(entries: Mapping[Any, Any], indices: set[Any]) -> dict[Any, Any]:
    return {index: value for index, value in entries.items() if index in indices}


class LoadAttempt:
    """A load of one tag into live objects, of which so far only names are known.

    ``request`` says how ``opened`` is verified; ``cache`` is the local copy that it is read from, if there is one.
    """

    def __init__(self, opened: OpenTag, request: LoadRequest, cache: CachedStorage | None = None) -> None:
        topology = request.topology
        options = request.options
        weights = opened.weights
        live = None if request.model is None else open_model(request.model, may_be_meta=weights is not None)
        is_filled = live is not None and not live.names() and (topology.tp, topology.pp) == (1, 1)
        if weights is not None and not (is_filled and options.mapping is None):
            opened = MappedWeights(opened, weights, live, request)
            options = replace(options, key_mapping=None, prefix="")  # which name tensors of the files
        self.filtered: Filter = Filter(options)
        base_names = {} if live is None else live.base_names()
        others = live is not None and opened.parts.model and weights is None
        if live is not None and others and (base_names or _may_be_wrapped(opened, topology, live)):
            saved = opened.model_names()
            wrapped = names_without_wrappers(live.names(), saved)
            self.filtered.know_base_names(live.former_names() | base_names | wrapped, saved)
        if self.filtered.renaming:
            opened = RenamedTag(opened, self.filtered.renaming)
            options = self.filtered.renamed(options)
        is_of_mesh = opened.manifest is not None and opened.manifest.leaders is not None
        saved_by = opened.topology
        if saved_by.sizes == topology.sizes and saved_by.coordinates_of(topology.rank) == topology.coordinates:
            opened.rank = topology.rank
        if is_of_mesh and live is not None and opened.parts.model and opened.topology.sizes == topology.sizes:
            opened.own = topology.rank, set(map(self.filtered.renaming.saved, live.names()))
        self._opened = opened
        self._cache = cache
        self._request = replace(request, options=options)
        if not self.filtered:
            self._demand()
        self._context = load_context(opened, topology, live, request.optimizer, options, self.filtered)
        self._planner = LoadPlanner(self._context, request.acts_for_one_stage, request.scheduler)
        self._names = ComparedNames()
        self._missing: Sequence[str] = ()
        self._unexpected: Sequence[str] = ()

    def apply_filter(self) -> Unmatched:
        """Apply the filter to the names; return its unmatched parts, which all ranks must judge together."""
        with self._opened.guarded(verified=self._opened.is_one_save):
            return self._apply_filter()

    def _apply_filter(self) -> Unmatched:
        opened = self._opened
        filtered = self.filtered
        request = self._request
        live = self._context.held_names()
        objects = {"scheduler": request.scheduler, "rank_content": request.options.rank_content}
        requested = {part: value is not None for part, value in objects.items()}
        parts = part_names(opened, request.topology, filtered, **requested)
        names = list(dict.fromkeys([*self._planner.names(), *parts]))
        filtered.choose(names)
        self._demand()
        saved = opened.saved_names if isinstance(opened, RenamedTag) else ()
        return Unmatched(filtered, live, saved, names, apart=bool(opened.per_rank))

    def _demand(self) -> None:
        """Raise an error for an object that was passed and never saved, and for one that a resume must not forget."""
        request = self._request
        objects = {"model": request.model, "optim": request.optimizer, "scheduler": request.scheduler}
        objects["rank_content"] = request.options.rank_content
        demand(self._opened, **{part: None if self.filtered.covers(part) else one for part, one in objects.items()})
        refuse_forgotten(self._opened, request, self.filtered)

    def compare_names(self) -> None:
        """Note the model's names, here and in the tag, which all ranks must judge together."""
        with self._opened.guarded(verified=self._opened.is_one_save):
            self.compare()

    def compare(self) -> None:
        """Do the same, within a caller's `OpenTag.guarded`, which costs a request."""
        self.filtered.refuse_collisions(self._context.held_names() or ())
        self._names = self._planner.compared_names()

    def judge_names(self) -> None:
        """Raise KeyMismatch if names differ and ``strict``, or if none match; else warn. Collective."""
        self._missing, self._unexpected = judge_model(self._request, self._names, self._opened.where)

    def prepare(self) -> PreparedLoad:
        """Return the load with the trees that fit the live objects. Raises errors if they do not."""
        with self._opened.guarded(), gc_paused():
            trees = self._planner.trees()
            trees.missing = self._missing
            trees.unexpected = self._unexpected
            if not self._request.options.verifies_first:  # else the bytes of all are compared before anything changes
                self._opened.refuse_changed(leaf for _, leaf in trees.leaves())
            return PreparedLoad(self._context, self._request, self._cache, trees)

    @property
    def save(self) -> str | None:
        """Fingerprint of the save; see `OpenTag.save`."""
        return self._opened.save

    def require_unchanged(self) -> None:
        """Raise TagReplaced unless it is still the save that was opened."""
        self._opened.require_unchanged()

    @property
    def identity(self) -> str:
        """Name of the save; see `OpenTag.save_name`."""
        return self._opened.save_name


class PreparedLoad:
    """A load whose trees fit the live objects. When its bytes are verified too, `apply` only copies."""

    def __init__(
        self, context: LoadContext, request: LoadRequest, cache: CachedStorage | None, trees: LoadTrees
    ) -> None:
        opened = context.opened
        filtered = context.filter
        self._context = context
        self._opened = opened
        self._filtered = filtered
        self._request = request
        self._cache = cache
        self._trees = trees
        self._options = options = request.options
        self._witness = Witness()
        self._before = {*trees.state_before()}
        warn_of_forgotten(opened, request, filtered)
        self._scheduler = None if filtered.covers("scheduler") else request.scheduler
        self._scheduler_state = opened.scheduler() if self._scheduler is not None else None
        if self._scheduler is not None:
            self._scheduler_state = trees.rank_state.put_into("scheduler", self._scheduler_state, None)
        check_scheduler(self._scheduler, self._scheduler_state, opened.where)
        if request.reports_progress:
            warn_of_other_shares(self._scheduler, self._scheduler_state, opened, request.topology)
        self._scheduler_state = opened.read_all(self._scheduler_state)
        require_taken(self._scheduler, self._scheduler_state, opened.where, opened.refused)
        if trees.continues_optimizer and lacks_scheduled_rates(opened):
            self._take_scheduled_rates()
        content = None if filtered.covers("user_content") else opened.user_content()
        self.user_content: Any = opened.read_all(filtered.pruned("user_content", content))
        wants_own = options.rank_content is not None and not filtered.covers("rank_content")
        self._rank_content: dict[Any, Any] | None = None
        if wants_own:
            warns = request.reports_progress
            self._rank_content = own_content(opened, request.topology, filtered, warns=warns)
        self.reader: LeafReader = opened.reader()
        self._shares = ReplicaShares(request.topology, ())
        self._reads: SharedReads | None = None

    def judge_parameters(self) -> None:
        """Raise OptimizerMismatch, or warn without ``strict``, if the tag has state that no rank loads. Collective."""
        judge_optimizer(self._request, self._trees.parameters, self.where)

    def _take_scheduled_rates(self) -> None:
        if self._scheduler is not None:
            self._trees.optimizer_tree = with_scheduled_rates(self._trees.optimizer_tree, self._scheduler_state)
        else:
            logger.warning(
                "%s: learning rates are those of the last step, as NxD saves them with expert parallelism and ZeRO-1; "
                "pass scheduler= to load the rates that it set after that step",
                self._opened.where,
            )

    def share(self) -> None:
        """Determine the leaves that replicas, data-parallel or on a mesh, have in common. Collective."""
        if self._request.agreement.world_size == 1:
            return
        # The terms decide which leaves are verified, in which order they are read, and of which copy of the tag.
        adapters = [type(adapter).__name__ for adapter in (self._trees.model, self._trees.optimizer)]
        terms = [self._options.verify, self._options.pre_download, self._opened.copy, *adapters]
        leaves = self._trees.replicated_leaves()
        placed = list(self._trees.placed_leaves())
        by_block = self._opened.mesh is not None
        request = self._request
        shares = agree_on_shares(request.agreement, request.topology, leaves, placed, terms, by_block)
        if self._cache is None:  # else copies on a local disk belong to this host: no other host has verified them
            self._shares = shares

    def verify(self) -> None:
        """Verify every byte that will be loaded, before anything changes; of shared leaves, this rank's share.

        With ``pre_download``, the needed files are downloaded first. Raises OptimizerMismatch for a scheduler whose
        learning rates would go to other param groups.
        """
        if self._trees.is_regrouped and keeps_rates(self._scheduler):
            raise OptimizerMismatch(
                f"optimizer: its param groups are not in the order of {self.where}, by which the scheduler stores "
                "learning rates; build them as when it was saved, or load with scheduler=None"
            )
        with self._opened.guarded(verified=self._is_verified):
            self._verify()

    def _verify(self) -> None:
        if self._cache is not None:
            needed = (leaf for _, leaf in self._trees.leaves())
            shown = {"reports_progress": self._request.reports_progress, "progress": self._options.progress}
            download(self._cache, self._opened, needed, **shown)
        if self._trees.model is not None:
            read = delivery_of(self.reader, self._begin, None, Witness().saw)  # it is read again
            refuse_lost_elements(self._trees.model, self._trees.names, self._trees.model_tree, read)
        if not self._options.verifies_first:
            return
        is_kept = self.reader.is_kept
        is_digested = self._opened.is_digested
        leaves = (each for each in self._trees.leaves() if is_digested(each[1]) and not is_kept(each[1]))
        mine = list(self._shares.verified_here(leaves))
        total = partial(self.reader.nbytes_to_verify, [(leaf, takes) for _, leaf, takes in mine])
        try:
            with self._watched("verify", total), gc_paused():
                for name, leaf, takes in mine:
                    self.reader.verify(leaf, name, takes)
                self.reader.finish()
        except CorruptCheckpoint as error:
            if self._cache is None:
                raise
            self._cache.discard()
            raise type(error)(f"{error}. The local copies were removed: load again to download them") from error

    @property
    def where(self) -> str:
        return self._opened.where

    @property
    def _is_verified(self) -> bool:
        """True if bytes of another save would be noticed."""
        return self._opened.manifest is not None and self._options.verify is not False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that this rank loads."""
        return sum(nbytes_of(*form_of(leaf)) for _, leaf in self._trees.leaves())

    def _watched(self, what: str, total: Callable[[], int]) -> AbstractContextManager[None]:
        """Return a context with a progress bar of ``total()`` bytes, on the reporting rank."""
        if not (self._request.reports_progress and self._options.progress and is_watched()):
            return nullcontext()  # without adding up all leaves
        done = self.reader.done
        before = done.nbytes
        return watched(what, total(), lambda: done.nbytes - before, True)

    def join(self) -> None:
        """Join the replicas for broadcasts, if they are to share the reading as well. Collective."""
        agreement = self._request.agreement
        share_reads = self._options.share_reads
        timeout = self._request.timeout
        self._reads = open_shared_reads(agreement, self._shares, share_reads, self._opened.storage, timeout)

    def apply(self) -> None:
        """Change the live objects.

        Replicas leave their groups afterwards, also on failure, so that none waits for this rank.
        """
        with (
            self._reads or nullcontext(),
            overwriting(self.where),
            self._opened.guarded(verified=self._options.verifies_first or self._is_verified),
            self._watched("load", lambda: self.nbytes),
        ):
            self._fill()
            findings = self._findings()
        judge(findings, self.where, self._options.prove)

    def _findings(self) -> list[Finding]:
        """Return the differences between the live objects and what was loaded into them."""
        request = self._request
        options = self._options
        if not is_proved(options):
            return []
        with gc_paused():
            proof = Proof(
                self._context,
                self._trees,
                self.reader,
                self._witness.digest,
                scheduler=self._scheduler_state,
                before=self._before,
                everything=options.prove is True,
                verify_again=self._verify_again,
            )
            content = (self._rank_content, options.rank_content)
            return proof.run(request.model, request.optimizer, self._scheduler, content)

    def _is_compared_live(self, leaf: Leaf, name: str) -> bool:
        """Return whether the live tensor is compared with the digest that was verified; once more is enough."""
        is_compared = self._options.verifies_first and self._options.prove is not False
        return is_compared and self._witness.digest(leaf) is not None and self._trees.is_verbatim(leaf, name)

    def _verify_again(self, leaf: Leaf, name: str) -> None:
        """Raise CorruptCheckpoint if the tag does not hold any more what was verified before."""
        with self._opened.reader() as reader:
            reader.verify(leaf, name)
            reader.finish()

    def _fill(self) -> None:
        model = self._trees.model
        optimizer = self._trees.optimizer
        delivery = delivery_of(self.reader, self._begin, self._reads, self._witness.saw)
        if model is not None:
            with gc_paused():
                model.materialize(self._trees.names)
                strict = self._options.strict_names
                fill_model(model, self._trees.names, self._trees.model_tree, delivery, strict)
            delivery.finish()
            model.after_load(self._trees.missing, self._trees.unexpected)
        if optimizer is not None:
            with gc_paused():
                if self._trees.optimizer_tree:
                    optimizer.load(self._trees.optimizer_tree, delivery, self._trees.keeps)
                else:
                    optimizer.follow(self._trees.keeps)
            delivery.finish()
            if self._trees.optimizer_tree:
                optimizer.after_load()
        if self._scheduler is not None:
            load_scheduler(self._scheduler, self._scheduler_state)
        if self._options.rank_content is not None and self._rank_content is not None:
            live = self._options.rank_content
            saved = self._rank_content
            content = self._filtered.pruned("rank_content", saved) | self._filtered.kept("rank_content", live, saved)
            live.clear()
            live.update(content)
        # Constants that the model made on the device are pending in a new process. In the first step they would make
        # its graph differ from the uninterrupted run's: a step compiled for one use, and rounded differently.
        torch_xla.sync([])

    def _begin(self, leaf: Leaf, out: torch.Tensor) -> bool:
        if self.reader.take_kept(leaf, out):
            return True
        name = self._trees.name_by_leaf[id(leaf)]
        takes = self._shares.takes(leaf)
        compare = self._options.verify is not False and not self._is_compared_live(leaf, name)
        compare = compare and self._opened.is_digested(leaf)
        verified = self._options.verifies_first
        self.reader.read_into(leaf, out, name, compare=compare, verified=verified, takes=takes)
        return False


def _may_be_wrapped(opened: OpenTag, topology: Topology, live: ModelAdapter) -> bool:
    """True if the tag may have the live names with, or without, those of wrappers.

    Names in a manifest are available. Those of other programs' tags are in the files of all stages: these are opened
    only if this rank's own one lacks a live name.
    """
    if opened.manifest is not None:
        return True
    saved = opened.topology
    with opened.guarded():
        own = opened.model_tree(
            Coordinates(min(topology.pp_rank, saved.pp - 1), topology.ep_rank % saved.ep, topology.tp_rank % saved.tp)
        )
    return any(name not in own for name in live.names())
