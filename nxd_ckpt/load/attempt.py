"""A load of one tag in its phases: names that fit the live objects, trees that fit, verified bytes, applied ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nxd_ckpt.core.topology import Coordinates, Topology
from nxd_ckpt.errors import CorruptCheckpoint, OptimizerMismatch
from nxd_ckpt.formats.tensors import iter_leaves
from nxd_ckpt.gc_paused import gc_paused
from nxd_ckpt.live import torch_xla
from nxd_ckpt.live.dtensor import names_without_wrappers
from nxd_ckpt.live.model import ModelAdapter
from nxd_ckpt.live.models import open_model
from nxd_ckpt.live.save_state import SaveState
from nxd_ckpt.load.collective_checks import Unmatched, refuse_unknown_names, refuse_unmatched
from nxd_ckpt.load.downloading import download
from nxd_ckpt.load.filters import Filter
from nxd_ckpt.load.load_context import load_context
from nxd_ckpt.load.overwriting import fill_model, nbytes_of, overwriting
from nxd_ckpt.load.parts import (
    check_scheduler,
    demand,
    keeps_rates,
    load_scheduler,
    own_content,
    part_names,
    refuse_forgotten,
)
from nxd_ckpt.load.planner import LoadPlanner
from nxd_ckpt.load.renamed_tag import RenamedTag
from nxd_ckpt.load.replicas import SharedReads, delivery_of, measured_rate, open_shared_reads
from nxd_ckpt.load.request import LoadRequest
from nxd_ckpt.load.scheduled_rates import lacks_scheduled_rates, with_scheduled_rates
from nxd_ckpt.load.shares import ReplicaShares, agree_on_shares
from nxd_ckpt.load.trees import LoadTrees
from nxd_ckpt.reshard.plain_values import ABSENT
from nxd_ckpt.storage.cached import CachedStorage
from nxd_ckpt.storage.progress import is_watched, watched
from nxd_ckpt.tag.opened import OpenTag
from nxd_ckpt.tag.reading import Leaf

logger = logging.getLogger("nxd_ckpt")


class LoadAttempt:
    """A load of one tag into live objects, of which so far only names are known.

    ``request`` says how ``opened`` is verified; ``cache`` is the local copy that it is read from, if there is one.
    """

    def __init__(self, opened: OpenTag, request: LoadRequest, cache: CachedStorage | None = None) -> None:
        topology, options = request.topology, request.options
        self.filtered = Filter(options)
        live = None if request.model is None else open_model(request.model)
        base_names = {} if live is None else live.base_names()
        if live is not None and opened.parts.model and (base_names or _may_be_wrapped(opened, topology, live)):
            saved = opened.model_names()
            wrapped = names_without_wrappers(live.names(), saved)
            self.filtered.know_base_names(live.former_names() | base_names | wrapped, saved)
        if self.filtered.renaming:
            opened = RenamedTag(opened, self.filtered.renaming)
            options = self.filtered.renamed(options)
        self._opened, self._cache, self._request = opened, cache, replace(request, options=options)
        if not self.filtered:
            self._demand()
        self._context = load_context(opened, topology, live, request.optimizer, options, self.filtered)
        self._planner = LoadPlanner(self._context)

    def apply_filter(self) -> Unmatched:
        """Apply the filter to the names; return its unmatched parts, which all ranks must judge together."""
        with self._opened.guarded():
            return self._apply_filter()

    def _apply_filter(self) -> Unmatched:
        opened, filtered, request = self._opened, self.filtered, self._request
        live = self._context.held_names()
        objects = {"scheduler": request.scheduler, "rank_content": request.options.rank_content}
        requested = {part: value is not None for part, value in objects.items()}
        parts = part_names(opened, request.topology, filtered, **requested)
        names = list(dict.fromkeys([*self._planner.names(), *parts]))
        filtered.choose(names)
        self._demand()
        saved = opened.saved_names if isinstance(opened, RenamedTag) else ()
        return Unmatched(filtered, live, saved, names)

    def _demand(self) -> None:
        """Raise an error for an object that was passed and never saved, and for one that a resume must not forget."""
        request = self._request
        objects = {"model": request.model, "optim": request.optimizer, "scheduler": request.scheduler}
        demand(self._opened, **{part: None if self.filtered.covers(part) else one for part, one in objects.items()})
        refuse_forgotten(self._opened, request, self.filtered)

    def prepare(self) -> PreparedLoad:
        """Return the load with the trees that fit the live objects. Raises errors if they do not."""
        with self._opened.guarded():
            return self.prepared()

    def prepared(self) -> PreparedLoad:
        """Do the same, within a caller's `OpenTag.guarded`."""
        self.filtered.refuse_collisions(self._context.held_names() or ())
        return PreparedLoad(self._opened, self._request, self._cache, self.filtered, self._planner.trees())

    @property
    def save(self) -> str | None:
        """Fingerprint of the save; see `OpenTag.save`."""
        return self._opened.save

    def require_unchanged(self) -> None:
        """Raise TagReplaced unless it is still the save that was opened."""
        self._opened.require_unchanged()

    @property
    def identity(self) -> str:
        """Identity of the save, independent of its place; without a manifest of ours, its place."""
        manifest = self._opened.manifest
        return self._opened.where if manifest is None else f"{manifest.tag!r} of attempt {manifest.attempt}"


class PreparedLoad:
    """A load whose trees fit the live objects. When its bytes are verified too, `apply` only copies."""

    def __init__(
        self, opened: OpenTag, request: LoadRequest, cache: CachedStorage | None, filtered: Filter, trees: LoadTrees
    ) -> None:
        self._opened, self._request, self._cache, self._filtered, self._trees = opened, request, cache, filtered, trees
        self._options = options = request.options
        self._scheduler = None if filtered.covers("scheduler") else request.scheduler
        if trees.is_regrouped and keeps_rates(self._scheduler):
            raise OptimizerMismatch(
                f"optimizer: its param groups are not in the order of {opened.where}, by which the scheduler stores "
                "learning rates; build them as when it was saved, or load with scheduler=None"
            )
        self._scheduler_state = opened.scheduler() if self._scheduler is not None else None
        check_scheduler(self._scheduler, self._scheduler_state, opened.where)
        if trees.continues_optimizer and lacks_scheduled_rates(opened):
            self._take_scheduled_rates()
        content = None if filtered.covers("user_content") else opened.user_content()
        self.user_content = filtered.pruned("user_content", content)
        wants_own = options.rank_content is not None and not filtered.covers("rank_content")
        self._rank_content = own_content(opened, request.topology, filtered) if wants_own else None
        self.reader = opened.reader()
        self._shares = ReplicaShares(request.topology, ())
        self._reads: SharedReads | None = None

    def refuse_unmatched(self) -> None:
        """Raise KeyMismatch if no rank's model has a name of the tag. Collective.

        In a mesh job raise it, or OptimizerMismatch, also if a name of the tag is in no rank's model or optimizer.
        """
        refuse_unmatched(self._request, bool(self._trees.names), self._trees.unmatched)
        refuse_unknown_names(self._request.agreement, self._trees.unknown_names, self.where)

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
        leaves, placed = self._trees.replicated_leaves(), list(self._trees.placed_leaves())
        by_block = self._opened.mesh is not None
        request = self._request
        shares = agree_on_shares(request.agreement, request.topology, leaves, placed, terms, by_block)
        if self._cache is None:  # else copies on a local disk belong to this host: no other host has verified them
            self._shares = shares

    def verify(self) -> None:
        """Verify every byte that will be loaded, before anything changes; of shared leaves, this rank's share.

        With ``pre_download``, the needed files are downloaded first.
        """
        with self._opened.guarded(verified=self._is_verified):
            self._verify()

    def _verify(self) -> None:
        if self._cache is not None:
            needed = (leaf for _, leaf in self._trees.leaves())
            shown = {"reports_progress": self._request.reports_progress, "progress": self._options.progress}
            download(self._cache, self._opened, needed, **shown)
        if not self._options.verifies_first:
            return
        leaves = self._trees.leaves()
        mine = [(*item, self._shares.takes(item[1])) for item in leaves if self._shares.is_verified_here(item[1])]
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

    def compared_with(self, live: SaveState) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield everything that will be loaded with its live counterpart; see `LoadTrees.compared_with`."""
        model, optimizer = (None if state is None else state.tree for state in (live.model, live.optimizer))
        yield from self._trees.compared_with(model or {}, optimizer or {})
        now = dict(iter_leaves(live.scheduler))
        for path, value in iter_leaves(self._scheduler_state) if self._scheduler is not None else ():
            yield "scheduler", "/".join(map(str, ("scheduler", *path))), value, now.get(path, ABSENT)

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
        return sum(nbytes_of(leaf) for _, leaf in self._trees.leaves())

    def _watched(self, what: str, total: Callable[[], int]) -> AbstractContextManager[None]:
        """Return a context with a progress bar of ``total()`` bytes, on the reporting rank."""
        if not (self._request.reports_progress and self._options.progress and is_watched()):
            return nullcontext()  # without adding up all leaves
        done = self.reader.done
        before = done.nbytes
        return watched(what, total(), lambda: done.nbytes - before, True)

    def join(self) -> None:
        """Join the replicas for broadcasts, if they are to share the reading as well. Collective."""
        rate = partial(measured_rate, self.reader, self._trees.replicated_leaves(), self._shares)
        agreement, share_reads, timeout = self._request.agreement, self._options.share_reads, self._request.timeout
        self._reads = open_shared_reads(agreement, self._shares, share_reads, rate, timeout)

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

    def _fill(self) -> None:
        model, optimizer = self._trees.model, self._trees.optimizer
        delivery = delivery_of(self.reader, self._begin, self._reads)
        if model is not None:
            with gc_paused():
                strict = self._options.strict_names
                fill_model(model, self._trees.names, self._trees.model_tree, delivery, strict)
            delivery.finish()
            model.after_load()
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
            live, saved = self._options.rank_content, self._rank_content
            content = self._filtered.pruned("rank_content", saved) | self._filtered.kept("rank_content", live, saved)
            live.clear()
            live.update(content)
        # Constants that the model made on the device are pending in a new process. In the first step they would make
        # its graph differ from the uninterrupted run's: a step compiled for one use, and rounded differently.
        torch_xla.sync()

    def _begin(self, leaf: Leaf, out: torch.Tensor) -> None:
        compare, verified = self._options.verify is not False, self._options.verifies_first
        name, takes = self._trees.name_by_leaf[id(leaf)], self._shares.takes(leaf)
        self.reader.read_into(leaf, out, name, compare=compare, verified=verified, takes=takes)


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
